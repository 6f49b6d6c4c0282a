"""Which updates count, on which ranks, and what stays behind."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from grad_training import build, collect, settings, table, update
from torch.optim import optimizer as torch_optimizer

from msprobe_engine.core.errors import SettingsError, UsageError
from msprobe_engine.formats.grad_probe.background import Background
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger


def tables(path: Path) -> list[int]:
    return sorted(int(p.stem.rsplit("_", 1)[1]) for p in (path / "rank0").glob("grad_summary_*.csv"))


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks)


def test_steps_are_updates_of_the_models_optimizer(tmp_path: Path) -> None:
    """Another model's optimizer neither counts nor writes."""
    net, optimizer = build()
    other = torch.nn.Linear(2, 2)
    stranger = torch.optim.SGD(other.parameters(), lr=0.1)
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    for _ in range(3):
        other(torch.ones(1, 2)).sum().backward()
        stranger.step()
        update(net, optimizer)
    debugger.stop()
    assert tables(tmp_path) == [0, 1, 2]
    assert len(table(tmp_path, 2)) == 5


def test_chosen_steps_and_parameters(tmp_path: Path) -> None:
    """Only the listed updates and parameters are written; names of wrappers in front make no difference; hooks go with the last one."""
    before = hooks()
    debugger = PrecisionDebugger(settings(tmp_path, step=["1-2", 4], param_list=["module.1.weight", "3.bias"]))
    net, optimizer = build()
    debugger.monitor(net)
    for i in range(6):
        update(net, optimizer)
        assert hooks() == before + (i < 4)
    debugger.stop()
    assert tables(tmp_path) == [1, 2, 4]
    assert [row["param_name"] for row in table(tmp_path, 4)] == ["1.weight", "3.bias"]


def test_other_rank_is_left_alone(tmp_path: Path) -> None:
    """On a rank that is not listed there is no hook and no file."""
    before = hooks()
    debugger = PrecisionDebugger(settings(tmp_path, rank=[3]))
    net, optimizer = build()
    debugger.monitor(net)
    assert hooks() == before
    update(net, optimizer)
    debugger.stop()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["argument", "keyword"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("named", [False, True])
def test_closure(tmp_path: Path, kind: Any, given: str, named: bool) -> None:
    """Where the optimizer gets a closure, gradients of a step are those after its first call in that step, not those of the step before;
    the optimizer gets what the closure returns, and calls it as often as without the probe."""

    def train(watched: bool) -> tuple[list[list[float]], list[float]]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1, bias=False)
        optimizer = kind(net.parameters(), lr=0.1)
        debugger = PrecisionDebugger(settings(tmp_path)) if watched else None
        if debugger is not None:
            debugger.monitor(net, optimizer) if named else debugger.monitor(net)
        calls: list[list[float]] = []
        losses = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (net(torch.ones(2, 3)) - 1).square().mean()
            loss.backward()
            calls[-1].append(float(net.weight.grad.norm()))
            return loss

        for _ in range(3):
            calls.append([])
            losses.append((optimizer.step(closure) if given == "argument" else optimizer.step(closure=closure)).item())
        if debugger is not None:
            debugger.stop()
        return calls, losses

    expected = train(False)
    assert train(True) == expected
    for step, norms in enumerate(expected[0]):
        (row,) = table(tmp_path, step)
        assert float(row["norm"]) == pytest.approx(norms[0], rel=1e-6)


def test_two_optimizers_share_a_step(tmp_path: Path) -> None:
    """A step ends when an optimizer is called again; each optimizer's gradients are those at its own update."""
    net = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in net]
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net, optimizers)
    for step in range(3):
        for i, optimizer in enumerate(optimizers):
            net[i].weight.grad = torch.full((1, 2), float(10 * step + i))
            optimizer.step()
    debugger.stop()
    assert tables(tmp_path) == [0, 1, 2]
    for step in (1, 2):
        assert [row["max"] for row in table(tmp_path, step)] == [f"{10 * step}.0", f"{10 * step + 1}.0"]


def test_given_optimizer_alone_counts(tmp_path: Path) -> None:
    """With an optimizer given, no process-wide hook is put on, and no other one counts."""
    before = hooks()
    net, optimizer = build()
    copy = torch.optim.SGD(net.parameters(), lr=0.0)
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net, optimizer)
    assert hooks() == before
    update(net, optimizer)
    copy.step()
    debugger.stop()
    assert tables(tmp_path) == [0]
    assert not optimizer._optimizer_step_pre_hooks


def test_start_and_stop_in_the_loop_change_nothing(tmp_path: Path) -> None:
    """As in the existing tool: a script for dumps goes on being watched through its calls of start, stop and step."""
    net, optimizer = build()
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    for _ in range(2):
        debugger.start(net)
        update(net, optimizer)
        debugger.stop()
        debugger.step()
    debugger._at_exit()
    assert tables(tmp_path) == [0, 1]


def test_nothing_stays(tmp_path: Path) -> None:
    """After the end no hook is left, and neither model nor gradients are held."""
    before = hooks()
    net, optimizer = build()
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    update(net, optimizer)
    held = [weakref.ref(net), weakref.ref(net[1].weight.grad), weakref.ref(optimizer)]
    debugger.stop()
    del net, optimizer
    gc.collect()
    assert hooks() == before
    assert [ref() for ref in held] == [None] * 3


def test_monitor_again_goes_on(tmp_path: Path) -> None:
    """After stop, monitor watches again and the count goes on."""
    net, optimizer = build()
    debugger = PrecisionDebugger(settings(tmp_path))
    for _ in range(2):
        debugger.monitor(net)
        update(net, optimizer)
        debugger.stop()
        update(net, optimizer)
    assert tables(tmp_path) == [0, 1]


def test_replaced_parameters_are_found(tmp_path: Path) -> None:
    """A wrapper may put other parameters in place after monitor(): they are found when their optimizer is called."""
    net, _ = build()
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    for layer in (net[1], net[3]):
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
    update(net, torch.optim.SGD([net[1].weight, net[3].weight], lr=0.1))
    debugger.stop()
    assert [row["param_name"] for row in table(tmp_path)] == ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias"]


@pytest.mark.parametrize(("keys", "says"), [
    ({"param_list": ["1.wait"]}, "no parameter '1.wait'; did you mean '1.weight'"),
    ({"param_list": ["x", "y"]}, "none of the list is there"),
])  # fmt: skip
def test_wrong_names(tmp_path: Path, keys: dict[str, Any], says: str) -> None:
    """A list without any name of the model is a mistake that is said at once."""
    debugger = PrecisionDebugger(settings(tmp_path, **keys))
    with pytest.raises(UsageError, match=says):
        debugger.monitor(build()[0])


def test_wrong_arguments(tmp_path: Path) -> None:
    """What is no model, two models with equal names, a dump of a task that has none."""
    debugger = PrecisionDebugger(settings(tmp_path))
    with pytest.raises(UsageError, match="model is a int"):
        debugger.monitor(3)
    net, _ = build()
    debugger.monitor(net)
    with pytest.raises(UsageError, match="two models have a parameter '0"):
        debugger.monitor(build()[0])
    with pytest.raises(UsageError, match="the task is grad_probe: there is no dump"):
        _ = debugger.run


@pytest.mark.parametrize("section", [{"bounds": [1, 0]}, {"bounds": [2.0**70]}, {"grad_level": "L3"}, {"param_list": [""]}, {"bound": [1]}])
def test_wrong_settings(tmp_path: Path, section: dict[str, Any]) -> None:
    """Mistakes of the section name it."""
    with pytest.raises(SettingsError, match=r"grad_probe\."):
        PrecisionDebugger({"task": "grad_probe", "dump_path": str(tmp_path), "grad_probe": section})


def test_nothing_captured_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An end without a single gradient is an error that says what was seen."""
    net, _ = build()
    other = torch.nn.Linear(2, 2)
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    debugger.stop()
    assert "1 updates of optimizers were seen that hold none of the model's parameters" in capsys.readouterr().err
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    debugger.stop()
    assert "in 1 updates no parameter had a gradient" in capsys.readouterr().err


def test_parts_of_parameters_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer that holds shards of fp32 copies: one message says to give it to the probe, the training goes on."""
    net = torch.nn.Linear(4, 2, bias=False)
    net.weight.main_param = torch.nn.Parameter(torch.ones(4))
    net.weight.main_grad = torch.ones(2, 4)
    debugger = PrecisionDebugger(settings(tmp_path))
    debugger.monitor(net)
    optimizer = torch.optim.SGD([net.weight.main_param], lr=0.1)
    for _ in range(3):
        net.weight.main_param.grad = torch.ones(4)
        optimizer.step()
    debugger.stop()
    assert capsys.readouterr().err.count("monitor(model, optimizer)") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.framework
def test_full_disk(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a full disk the training goes on; steps without room have no table, no part of a file stays, the loss is counted."""
    debugger = PrecisionDebugger(settings(small, direction_format="packed"))
    net = torch.nn.Linear(1 << 10, 700, bias=False)
    debugger.monitor(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(8):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    debugger.stop()
    written = tables(small)
    assert 0 < len(written) < 8
    assert not list(small.rglob(".msprobe*"))
    text = capsys.readouterr().err
    assert text.count("lost data, training goes on") == 1
    assert f"gradients of {len(written)} updates are in {small}, {8 - len(written)} are lost" in text


@pytest.mark.parametrize("name", ["grad_summary_0.csv", "step0.signs", "step0/1.bias.npy"])
def test_links_are_not_followed(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A link in place of a file costs that step, which is said; what it leads to stays."""
    (tmp_path / "out/rank0/step0").mkdir(parents=True)
    target = tmp_path / "precious"
    target.write_text("mine")
    os.symlink(target, tmp_path / "out/rank0" / name)
    collect(tmp_path / "out", steps=2)
    assert target.read_text() == "mine"
    assert f"cannot write {tmp_path / 'out/rank0' / name}: a link is where a regular file belongs" in capsys.readouterr().err
    assert (tmp_path / "out/rank0/grad_summary_1.csv").is_file()


def test_memory_is_bounded() -> None:
    """Jobs that wait never hold more than the budget together; one that is larger goes alone."""
    from msprobe_engine.core.guard import Faults

    background, held = Background(Faults(), "files", 100, patience=10.0), []
    for nbytes in (60, 30, 60, 300, 60):
        assert background.reserve(nbytes, 0)
        held.append(background._held)
        background.submit(lambda: None, nbytes)
    background.close()
    assert background.done == 5
    assert all(n <= 100 or n == 300 for n in held)


def test_without_memory_the_step_is_lost() -> None:
    """When nothing is written for the whole patience, the caller is told instead of waiting for ever."""
    from msprobe_engine.core.guard import Faults

    background = Background(Faults(), "files", 100, patience=0.01)
    assert background.reserve(80, 0)
    assert background.reserve(80, 80)  # its own bytes do not stand in its way
    assert not background.reserve(80, 0)
    background.release(160)
    assert background.reserve(80, 0)
