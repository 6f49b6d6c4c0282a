"""Parts of an inference step: `token_range`, `scheduled_tokens` with `request_id`, `rank_id`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from debug_model import Net, config, names, steps, written, x
from torch.overrides import TorchFunctionMode

from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


def generate(net: Net, tokens: int = 5) -> None:
    """So many forward calls with something after each, as sampling is."""
    torch.exp(x())
    for _ in range(tokens):
        torch.sin(net(x()))


def test_only_the_range(tmp_path: Path) -> None:
    """The second and third forward call are recorded, with what follows each; numbers begin at 0 there, and again at each start."""
    debugger = PrecisionDebugger(config(tmp_path, "mix"))
    net = Net()
    for _ in range(2):
        debugger.start(net, token_range=[1, 2])
        generate(net)
        debugger.stop()
        debugger.step()
    for step in (0, 1):
        found = names(tmp_path, step)
        assert [n for n in found if n.startswith("Module.a.")] == ["Module.a.Linear.forward.0", "Module.a.Linear.forward.1"]
        assert [n for n in found if "sin" in n] == ["Torch.sin.0.forward", "Torch.sin.1.forward"]
        assert not [n for n in found if "exp" in n]
    assert not net._forward_pre_hooks


@pytest.mark.parametrize(("token_range", "calls"), [((0, 0), 1), ([3, 9], 2), ([4, 4], 1)])
def test_edges(tmp_path: Path, token_range: Any, calls: int) -> None:
    """The first call alone, a range that goes beyond the last call, the last call alone."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    debugger.start(net, token_range)
    generate(net)
    debugger.stop()
    debugger.step()
    assert names(tmp_path).count("Module.a.Linear.forward.0") == 1
    assert sum("Module.a.Linear.forward" in n for n in names(tmp_path)) == calls


def test_each_start_has_its_own_range(tmp_path: Path) -> None:
    """A start without a range records everything, also after one with a range; a second start counts from 0; the first model of a
    list is counted."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    debugger.start([net], token_range=[0, 0])
    generate(net)
    debugger.start(net, token_range=[1, 1])
    generate(net)
    debugger.step()
    debugger.start(net)
    generate(net)
    debugger.stop()
    debugger.step()
    assert sum("a.Linear.forward" in n for n in names(tmp_path, 0)) == 2
    assert sum("a.Linear.forward" in n for n in names(tmp_path, 1)) == 5


def test_hooks_come_with_the_first_wanted_call(tmp_path: Path) -> None:
    """Before the range no module has a hook, after it nothing is seen."""
    debugger = PrecisionDebugger(config(tmp_path, "mix"))
    net = Net()
    seen = []

    class Spy(torch.nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            seen.append((bool(net.a._forward_hooks), debugger.capture.on))
            return h

    net.b.append(Spy())
    debugger.start(net, token_range=[1, 2])
    generate(net, 4)
    assert [hooked for hooked, _ in seen][:2] == [False, True]
    assert [on for _, on in seen] == [False, True, True, False]
    debugger.stop()
    debugger.step()


class Mine(TorchFunctionMode):
    """A mode of the user."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_stay_in_order(tmp_path: Path) -> None:
    """A range that opens inside the user's own function mode does not stand above it: leaving the mode takes off the right one."""
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    net = Net()
    debugger.start(net, token_range=[1, 3])
    net(x())
    with Mine():
        net(x())
    assert torch.overrides._get_current_function_mode_stack() == [debugger.capture.api]
    net(x())
    debugger.stop()
    assert torch.overrides._get_current_function_mode_stack() == []
    debugger.step()
    assert sum("tanh" in n for n in names(tmp_path)) == 2


@pytest.mark.parametrize("token_range", ["1-2", 3, [1], [1, 2, 3], [2, 1], [-1, 2], [0, 1.0], [True, 2], {0: 1}])
def test_wrong_range(tmp_path: Path, token_range: Any) -> None:
    """A range that is none says what is allowed, and what was given."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    with pytest.raises(UsageError, match=r"token_range is .*; allowed: \[first, last\]"):
        debugger.start(Net(), token_range)
    with pytest.raises(UsageError, match="with token_range needs the model"):
        debugger.start(token_range=[0, 1])


def test_range_that_is_not_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """When the model is called too few times, the message says how often it was."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", step=[0]))
    net = Net()
    debugger.start(net, token_range=[7, 8])
    generate(net, 2)
    debugger.stop()
    debugger.step()
    assert "the model was called 2 times between start() and stop()" in capsys.readouterr().err


def test_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches with the request are dumped and cut to its tokens, batches without it are not; without scheduled_tokens all is dumped."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", section={"request_id": "r2"}))
    net = Net()
    for scheduled, rows in (({"r1": 1, "r2": 2}, 3), ({"r1": 3}, 3), (None, 3), ({"r2": 3}, 3), ({}, 2)):
        debugger.start(net, scheduled_tokens=scheduled)
        net(x(rows))
        debugger.stop()
        debugger.step()
    assert steps(tmp_path) == [0, 2, 3]
    entry = written(tmp_path, 0).entries["Module.a.Linear.forward.0"]
    tensors = dict(entry.tensors())
    assert tensors["input.0"].description.shape == (2, 4)
    assert tensors["input.0"].max == pytest.approx(x(3)[1:].max().item())
    assert tensors["parameters.weight"].description.shape == (4, 4)
    for step, shape in ((2, (3, 4)), (3, (3, 4))):
        assert dict(written(tmp_path, step).entries["Module.a.Linear.forward.0"].tensors())["input.0"].description.shape == shape
    debugger.run.at_exit()
    assert "left out: batches without request r2 2" in capsys.readouterr().err


def test_request_that_never_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A request that is in no batch leaves the dump empty, which is said with its name."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", step=[0], section={"request_id": "r9"}))
    debugger.start(Net(), scheduled_tokens={"r1": 2})
    debugger.stop()
    debugger.step()
    assert "request_id 'r9' was in none of the 1 batches" in capsys.readouterr().err


@pytest.mark.parametrize("scheduled", [[("r", 1)], {"r": 0}, {"r": 1.0}, {1: 2}, "r", {"r": True}])
def test_wrong_schedule(tmp_path: Path, scheduled: Any) -> None:
    """A schedule that is none says what is allowed."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", section={"request_id": "r"}))
    with pytest.raises(UsageError, match=r"scheduled_tokens is .*allowed: a dict from request id to its number of tokens"):
        debugger.start(Net(), scheduled_tokens=scheduled)


def test_rank_id(tmp_path: Path) -> None:
    """rank_id names the directory and is what `rank` is asked about, from the start that gives it on."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", rank=[3]))
    net = Net()
    for rank_id in (3, None, 2):
        debugger.start(net, rank_id=rank_id)
        net(x())
        debugger.stop()
        debugger.step()
    assert steps(tmp_path) == [0, 1]
    assert [open_dump(tmp_path / "dump").ranks(s) for s in (0, 1)] == [[3], [3]]


@pytest.mark.parametrize("rank_id", ["0", -1, True, 1.0])
def test_wrong_rank_id(tmp_path: Path, rank_id: Any) -> None:
    """A rank_id that is no rank says what is allowed."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    with pytest.raises(UsageError, match=r"rank_id is .*allowed: an int >= 0"):
        debugger.start(Net(), rank_id=rank_id)
