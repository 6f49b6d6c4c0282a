"""Replay: inputs of module calls replaced by the tensors an earlier dump saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import LoadSettings
from msprobe_integrations.torch.dump.replay import Replay


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass(frozen=True)
class Extra:
    mask: torch.Tensor
    scale: float


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen.append((x, args, kwargs))
        return self.fc(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.block = Block()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.block(self.first(x), *args, **kwargs)


CALL = "Module.block.Block.forward.0"
SAVED = torch.full((2, 3), 7.0)


@pytest.fixture
def dump(tmp_path: Path) -> Callable[..., Path]:
    """Writes the tensors of `CALL` into a dump: place -> tensor."""

    def write(places: dict[str, torch.Tensor], step: int = 0, rank: str = "rank0", call: str = CALL) -> Path:
        directory = tmp_path / "dump" / f"step{step}" / rank
        (directory / "dump_tensor_data").mkdir(parents=True, exist_ok=True)
        (directory / "dump.json").write_text('{"data": {}}')
        for place, tensor in places.items():
            torch.save(tensor, directory / "dump_tensor_data" / f"{call}.{place}.pt")
        return tmp_path / "dump"

    return write


def replay(path: Path, *modules: str, **options: Any) -> Replay:
    """A replay that raises what goes wrong in it."""
    return Replay(LoadSettings(path=str(path), modules=modules or (CALL,), **options), Faults(strict=True))


def run(net: Net, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """What the block was given in one forward call."""
    net.block.seen.clear()
    net(torch.ones(2, 3), *args, **kwargs)
    return net.block.seen[-1]


def test_values_are_replaced_while_it_is_on(dump: Callable[..., Path]) -> None:
    """Between begin and pause the listed call gets the saved values; other calls, and all calls afterwards, get their own."""
    net = Net()
    session = replay(dump({"input.0": SAVED}))
    own = run(net)[0]
    session.begin(net, 0, 0)
    assert torch.equal(run(net)[0], SAVED)
    assert torch.equal(run(net)[0], own)  # forward.1 is not listed
    session.pause()
    assert torch.equal(run(net)[0], own)
    session.end_step(1)
    session.close()
    assert not session.installed
    assert not net.block._forward_pre_hooks


def test_nested_and_keyword_tensors(dump: Callable[..., Path]) -> None:
    """Tensors inside lists, tuples, named tuples, dicts and dataclasses are replaced too; the containers keep their types, and the
    caller's own are not touched."""
    one = torch.ones(1)
    net = Net()
    places = {"input.1.0": 1, "input.1.1.right.k": 2, "input.2.left": 3, "kwargs.mask": 4, "kwargs.extra.mask": 5, "kwargs.many.1": 6}
    session = replay(dump({p: torch.full((1,), float(v)) for p, v in places.items()} | {"input.0": SAVED}))
    given = ([one, Pair(one, {"k": one})], Pair(one, None))
    named = {"mask": one, "extra": Extra(one, 0.5), "many": (one, one)}
    session.begin(net, 0, None)
    _, args, kwargs = run(net, *given, **named)
    session.close()
    assert args[0][0] == 1
    assert isinstance(args[0][1], Pair)
    assert (args[0][1].left, args[0][1].right["k"]) == (one, 2)
    assert args[1] == Pair(torch.full((1,), 3.0), None)
    assert (kwargs["mask"], kwargs["extra"].mask, kwargs["extra"].scale) == (4, 5, 0.5)
    assert kwargs["many"] == (one, torch.full((1,), 6.0))
    assert given[0][0] is one
    assert named["extra"].mask is one
    assert one == 1


def test_gradients_go_on(dump: Callable[..., Path]) -> None:
    """The gradient of the replacement reaches the layers before it, so every parameter has one; it is that of the saved values."""
    net = Net()
    session = replay(dump({"input.0": SAVED}))
    session.begin(net, 0, 0)
    net(torch.ones(2, 3)).sum().backward()
    session.close()
    arriving = torch.ones(2, 3) @ net.block.fc.weight
    assert torch.allclose(net.block.fc.weight.grad, torch.ones(3, 2) @ SAVED)
    assert torch.allclose(net.first.weight.grad, arriving.t() @ torch.ones(2, 3))


def test_without_gradients(dump: Callable[..., Path]) -> None:
    """Under no_grad nothing gets a graph, and the replacement needs a gradient where the original did."""
    net = Net()
    session = replay(dump({"input.0": SAVED, "input.1": SAVED, "input.2": SAVED}))
    session.begin(net, 0, 0)
    with torch.no_grad():
        x, args, _ = run(net, torch.ones(2, 3), torch.ones(2, 3, requires_grad=True))
    session.close()
    assert [t.requires_grad for t in (x, *args)] == [False, False, True]
    assert all(t.is_leaf and torch.equal(t, SAVED) for t in (x, *args))


def test_in_place_module(dump: Callable[..., Path]) -> None:
    """A module that writes into its input works as with its own input, gradients too (a leaf would refuse the write)."""
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    session = replay(dump({"input.0": torch.full((2, 3), -1.0)}, call="Module.1.ReLU.forward.0"), "Module.1.ReLU.forward.0")
    session.begin(net, 0, 0)
    out = net(torch.ones(2, 3))
    out.sum().backward()
    session.close()
    assert torch.equal(out, torch.zeros(2, 3))
    assert torch.equal(net[0].weight.grad, torch.zeros(3, 3))


def test_strides_and_device_are_those_of_the_original(dump: Callable[..., Path]) -> None:
    """Only values come from the file: a transposed input stays transposed."""
    net = Net()
    session = replay(dump({"input.1": torch.arange(6.0).reshape(3, 2)}))
    session.begin(net, 0, 0)
    (given,) = run(net, torch.zeros(2, 3).t())[1]
    session.close()
    assert torch.equal(given, torch.arange(6.0).reshape(3, 2))
    assert given.stride() == (1, 3)


@pytest.mark.parametrize(("saved", "kind"), [(torch.ones(4, 3), "[4, 3]"), (torch.ones(2, 3, dtype=torch.float64), "float64")])
def test_other_shape_or_type(dump: Callable[..., Path], saved: torch.Tensor, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved tensor of another shape or type replaces the original all the same, with a warning that names both."""
    net = Net().to(saved.dtype)
    session = replay(dump({"input.0": SAVED, "kwargs.y": saved}))
    session.begin(net, 0, 0)
    net.block.fc.float()
    net.first.float()
    y = run(net, y=torch.zeros(2, 3, requires_grad=True))[2]["y"]
    session.close()
    assert torch.equal(y, saved)
    assert y.requires_grad
    said = capsys.readouterr().err
    assert "torch.float32 [2, 3] here" in said
    assert kind in said


def test_missing_and_damaged_files(dump: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no usable file the value is kept, with one warning each; nothing but a tensor is taken from a file."""
    path = dump({"input.0": SAVED, "input.2": SAVED, "input.3": SAVED, "input.4": SAVED})
    data = path / "step0/rank0/dump_tensor_data"
    (data / f"{CALL}.input.2.pt").write_bytes(b"cut")
    torch.save({"a": print}, data / f"{CALL}.input.3.pt")
    (data / f"{CALL}.input.4.pt").unlink()
    (data / f"{CALL}.input.4.pt").symlink_to(data / f"{CALL}.input.0.pt")
    net, one = Net(), torch.ones(1)
    session = replay(path)
    for step in range(2):
        session.begin(net, step, 0)
        x, args, _ = run(net, one, one, one, one)
        assert torch.equal(x, SAVED) == (step == 0)
        assert all(a is one for a in args)
        session.end_step(step + 1)
    session.close()
    said = capsys.readouterr().err
    assert said.count("is kept") == 5
    assert "step 1 was not dumped" in said
    assert f"there is no tensor '{CALL}.input.1.pt'" in said
    assert said.count("cannot be loaded") == 2


def test_steps_and_ranks(dump: Callable[..., Path]) -> None:
    """`step` and `rank` say when it is active; it works when the first listed step is not the first one, and the hooks are gone when
    the last one is over."""
    path = dump({"input.0": SAVED}, step=2)
    dump({"input.0": SAVED * 2}, step=2, rank="rank1")
    net = Net()
    session = replay(path, step=(2,), rank=(1,))
    for step in range(4):
        session.begin(net, step, 1)
        assert torch.equal(run(net)[0], SAVED * 2) == (step == 2)
        session.end_step(step + 1)
        assert session.installed == (step < 2)
    session.begin(net, 4, 1)
    assert not session.installed
    first = replay(dump({"input.0": SAVED}), step=(0,))
    first.begin(net, 0, 0)
    assert torch.equal(run(net)[0], SAVED)
    first.end_step(1)
    assert not first.installed
    other = replay(path, step=(2,), rank=(1,))
    other.begin(net, 2, 0)
    assert not torch.equal(run(net)[0], SAVED)
    other.close()


@pytest.mark.parametrize("directory", ["rank0", "rank", "proc123"])
@pytest.mark.parametrize("rank", [None, 0])
def test_which_directory(dump: Callable[..., Path], directory: str, rank: int | None) -> None:
    """A dump of one process is found whatever its directory is called (8.1.1: rank, without a group: proc{pid})."""
    net = Net()
    session = replay(dump({"input.0": SAVED}, rank=directory))
    session.begin(net, 0, rank)
    assert torch.equal(run(net)[0], SAVED)
    session.close()


def test_another_rank_is_no_stand_in(dump: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that the dump does not have keeps its values: those of another rank are not its own."""
    net = Net()
    session = replay(dump({"input.0": SAVED}, rank="rank3"))
    session.begin(net, 0, 1)
    assert not torch.equal(run(net)[0], SAVED)
    session.close()
    assert "has ranks 3" in capsys.readouterr().err


def test_several_models_have_an_index(dump: Callable[..., Path]) -> None:
    """In a list of models the index comes first in the name, as in a dump of them."""
    call = "Module.1.block.Block.forward.0"
    nets = [Net(), Net()]
    session = replay(dump({"input.0": SAVED}, call=call), call)
    session.begin(nets, 0, 0)
    assert [torch.equal(run(net)[0], SAVED) for net in nets] == [False, True]
    session.close()


def test_a_replaced_module(dump: Callable[..., Path]) -> None:
    """A module that the program replaced between steps is found under its name again, and the old one is let go."""
    path = dump({"input.0": SAVED})
    dump({"input.0": SAVED}, step=1)
    net = Net()
    session = replay(path)
    session.begin(net, 0, 0)
    old, net.block = net.block, Block()
    session.end_step(1)
    session.begin(net, 1, 0)
    assert torch.equal(run(net)[0], SAVED)
    assert not old._forward_pre_hooks
    session.close()


def test_calls_that_never_come(dump: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Listed calls that never came are named once at the end of a step."""
    net = Net()
    session = replay(dump({"input.0": SAVED}), CALL, "Module.block.Block.forward.7", "Module.gone.Linear.forward.0")
    for step in range(2):
        session.begin(net, step, 0)
        run(net)
        session.end_step(step + 1)
    session.close()
    said = capsys.readouterr().err
    assert said.count("Module.block.Block.forward.7: no such call") == 1
    assert said.count("Module.gone.Linear.forward.0: no such call") == 1
    assert f"{CALL}: no such call" not in said


def test_recomputation_is_named(dump: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Activation checkpointing calls the module again in backward. Listed, that call is replaced too and the gradients are those of the
    saved values; not listed, it is named."""
    call = CALL.replace(".0", ".1")
    net, x = Net(), torch.ones(2, 3, requires_grad=True)
    path = dump({"input.0": SAVED})
    dump({"input.0": SAVED}, call=call)
    for names in ((CALL,), (CALL, call)):
        net.zero_grad()
        session = replay(path, *names)
        session.begin(net, 0, 0)
        checkpoint(net.block, net.first(x), use_reentrant=False).sum().backward()
        session.close()
        assert torch.allclose(net.block.fc.weight.grad, torch.ones(3, 2) @ SAVED) == (len(names) == 2)
    said = capsys.readouterr().err
    assert said.count("recomputes an earlier call") == 1


def test_needs_the_model(dump: Callable[..., Path]) -> None:
    """Without a model there is nothing to replace in."""
    with pytest.raises(UsageError, match=r"PrecisionDebugger.start\(model\)"):
        replay(dump({})).begin(None, 0, 0)


def test_a_fault_ends_the_replay_only(dump: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error inside goes to the faults once; the training goes on with its own values."""
    faults, net = Faults(), Net()
    session = Replay(LoadSettings(path=str(dump({"input.0": SAVED})), modules=(CALL, CALL.replace(".0", ".1"))), faults)
    monkeypatch.setattr(session, "_replace_value", lambda *_: 1 / 0)
    for step in range(2):
        session.begin(net, step, 0)
        assert not torch.equal(run(net)[0], SAVED)
        run(net)
        session.end_step(step + 1)
    session.close()
    assert faults.counts == {"replay of inputs": 1}
