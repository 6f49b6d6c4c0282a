"""The life of a `PrecisionDebugger`: calls in every order, models that change, exceptions, forks, two of them."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from debug_model import Net, config, names, steps, written, x
from torch import nn
from torch.utils.data import DataLoader, Dataset

from msprobe.pytorch import PrecisionDebugger as Public
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


def step(debugger: PrecisionDebugger, net: nn.Module) -> None:
    debugger.start(net)
    net(x()).sum().backward()
    debugger.stop()
    debugger.step()


def test_start_twice_stop_twice(tmp_path: Path) -> None:
    """A second start in a row changes nothing, nor does a second stop; numbers go on within the step and begin anew in the next."""
    debugger = PrecisionDebugger(config(tmp_path, "mix"))
    net = Net()
    for _ in range(2):
        debugger.start(net)
        net(x())
        debugger.start(net)
        debugger.start()
        net(x())
        debugger.stop()
        debugger.stop()
        net(x())
        debugger.step()
    for number in range(2):
        found = names(tmp_path, number)
        assert sum("Module.a.Linear.forward" in n for n in found) == 2
        assert "Functional.linear.3.forward" in found
        assert "Functional.linear.4.forward" not in found


def test_pairs_in_one_step(tmp_path: Path) -> None:
    """Several start/stop pairs make one step; calls between them are neither seen nor counted, as in 26.2.0."""
    debugger = PrecisionDebugger(config(tmp_path, "mix"))
    net = Net()
    for _ in range(2):
        debugger.start(net)
        torch.sin(net.a(x()))
        debugger.forward_backward_dump_end()
        torch.sin(net.a(x()))
    debugger.step()
    found = names(tmp_path)
    assert [n for n in found if "sin" in n] == ["Torch.sin.0.forward", "Torch.sin.1.forward"]
    assert [n for n in found if "Linear" in n] == ["Module.a.Linear.forward.0", "Module.a.Linear.forward.1"]


def test_stop_and_step_before_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stop before any start does nothing and says so; step counts."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    debugger.stop()
    debugger.step()
    step(debugger, Net())
    assert steps(tmp_path) == [1]
    assert capsys.readouterr().err.count("stop() has no effect before the first start()") == 1


@pytest.mark.parametrize("call", [
    lambda: Public.start(), lambda: Public.stop(), lambda: Public.step(), lambda: Public.save(1, "a"), lambda: Public.set_init_step(1),
    lambda: Public.forward_backward_dump_end(), lambda: Public.register_custom_api(torch, "sin"),
    lambda: Public.restore_custom_api(torch, "sin"),
])  # fmt: skip
def test_before_construction(call: Any) -> None:
    """Every call before the construction says what to do."""
    with pytest.raises(UsageError, match="PrecisionDebugger instance is not created: construct it first"):
        call()


def test_monitor_of_other_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the existing tool monitor() does nothing where the task is another one; that is said once."""
    debugger = PrecisionDebugger(config(tmp_path))
    debugger.monitor(Net())
    debugger.monitor(Net())
    assert capsys.readouterr().err.count("monitor has no effect: the task is not grad_probe") == 1


@pytest.mark.parametrize("bad", [-1, True, 1.0, "3", None])
def test_wrong_init_step(tmp_path: Path, bad: Any) -> None:
    """The initial step is an int >= 0."""
    debugger = PrecisionDebugger(config(tmp_path))
    with pytest.raises(UsageError, match=r"set_init_step: step is .*; allowed: an int >= 0"):
        debugger.set_init_step(bad)


def test_init_step(tmp_path: Path) -> None:
    """Counting goes on from the given step; a step that is open is finished; listed steps that come again are dumped again."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", step=[7, 9]))
    net = Net()
    debugger.set_init_step(6)
    for _ in range(5):
        step(debugger, net)
    assert steps(tmp_path) == [7, 9]
    assert debugger.run.ended
    debugger.set_init_step(9)
    debugger.start(net)
    net(x())
    net(x())
    debugger.set_init_step(0)
    assert len([n for n in names(tmp_path, 9) if "a.Linear.forward" in n]) == 2


def test_exception_in_the_users_step(tmp_path: Path) -> None:
    """A step that the user's own exception cut off is written as far as it came, and the next step is clean: numbers, parents, nothing
    of the old one."""
    debugger = PrecisionDebugger(config(tmp_path, "mix"))
    net = Net()

    class Broken(nn.Module):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            torch.matmul(h, h)
            raise AssertionError("does not come here")

    def one(broken: bool) -> None:
        debugger.start(net)
        try:
            net(x()).sum().backward()
        except RuntimeError:
            assert broken
        finally:
            debugger.stop()
            debugger.step()

    one(False)
    net.b.append(Broken())
    one(True)
    del net.b[2]
    one(False)
    cut = written(tmp_path, 1).entries
    assert cut["Module.b.2.Broken.forward.0"].tags["raised"] is True
    first, last = written(tmp_path, 0).entries, written(tmp_path, 2).entries
    assert list(first) == list(last)
    assert {n: e.parent for n, e in first.items()} == {n: e.parent for n, e in last.items()}


def test_an_exception_that_leaves_the_step_open(tmp_path: Path) -> None:
    """When the user goes on without stop and step, the next start goes on with the same step."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    debugger.start(net)
    with pytest.raises(RuntimeError):
        net(x(2, 3))
    step(debugger, net)
    assert steps(tmp_path) == [0]
    entries = written(tmp_path).entries
    assert entries["Module.a.Linear.forward.0"].tags["raised"] is True
    assert entries["Module.b.Sequential.forward.0"].parent is None


def test_models_that_change(tmp_path: Path) -> None:
    """A replaced submodule and a new model are seen from the next step on, the old ones lose their hooks and are let go."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    step(debugger, net)
    old = weakref.ref(net.a)
    net.a = nn.Linear(4, 4, bias=False)
    step(debugger, net)
    assert set(written(tmp_path, 1).entries["Module.a.Linear.forward.0"].sections["parameters"]) == {"weight"}
    gc.collect()
    assert old() is None
    gone, net = weakref.ref(net), nn.Sequential(nn.Linear(4, 4), nn.Tanh())  # type: ignore[assignment]
    step(debugger, net)
    assert [n for n in names(tmp_path, 2) if "forward" in n] == ["Module.0.Linear.forward.0", "Module.1.Tanh.forward.0"]
    gc.collect()
    assert gone() is None


def test_two_models_in_turn(tmp_path: Path) -> None:
    """Models given one after the other in a step are both seen, in every step, with numbers of their common names going on."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    nets = [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))]
    for _ in range(2):
        for net in nets:
            debugger.start(net)
            net(x())
            debugger.stop()
        debugger.step()
    for number in range(2):
        assert names(tmp_path, number) == ["Module.0.Linear.forward.0", "Module.0.Linear.forward.1"]


def test_part_of_a_model(tmp_path: Path) -> None:
    """Names are relative to what start is given; what is outside is not seen; the constructor can take the model, start without then."""
    net = Net()
    debugger = PrecisionDebugger(config(tmp_path, "L0"), None, None, None, net.b)
    debugger.start()
    net(x())
    debugger.stop()
    debugger.step()
    assert names(tmp_path) == ["Module.0.Linear.forward.0", "Module.1.ReLU.forward.0"]


@pytest.mark.parametrize("model", ["net", 3, [], [nn.Identity(), "b"], {"a": 1}])
def test_what_is_no_model(tmp_path: Path, model: Any) -> None:
    """Something that is no module, or a list with such a thing in it, is named by its type."""
    debugger = PrecisionDebugger(config(tmp_path, "L1"))
    with pytest.raises(UsageError, match=r"model is an? .*; allowed: torch\.nn\.Module or a list of them"):
        debugger.start(model)


@pytest.mark.parametrize(("arguments", "expected"), [
    (("statistics", None, "L0", [1, "3-4"]), (None, (1, 3, 4))),
    (("statistics", None, "L0", None, [2]), (None, (2,))),
    (("statistics", None, "L0", []), (None, ())),
    (("statistics", None, "L0", nn.Identity(), [2]), (nn.Identity, (2,))),
    (("statistics", None, "L0", [nn.Identity()]), (list, ())),
])  # fmt: skip
def test_both_orders_of_arguments(tmp_path: Path, arguments: Any, expected: Any) -> None:
    """8.1.1 has the model in fifth place, 26.2.0 the steps: both work."""
    debugger = PrecisionDebugger(str(config(tmp_path)), *arguments)
    kind, wanted = expected
    assert debugger.dump.step == wanted
    assert debugger.run.model is None if kind is None else isinstance(debugger.run.model, kind)


def test_steps_given_twice(tmp_path: Path) -> None:
    """Steps in the place of the model and as steps cannot both count."""
    with pytest.raises(UsageError, match=r"model is \[1\]"):
        PrecisionDebugger(config(tmp_path), None, None, "L0", [1], [2])  # type: ignore[arg-type]


def test_two_debuggers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second construction returns the first object, names what it would change, and is not stopped by its own mistakes."""
    path = config(tmp_path, "L0", step=[0, 1])
    debugger = PrecisionDebugger(path)
    assert PrecisionDebugger() is debugger
    assert PrecisionDebugger(path) is debugger
    assert "with the same settings" in capsys.readouterr().err
    assert PrecisionDebugger(path, level="mix", step=[4]) is debugger
    said = capsys.readouterr().err
    assert "of this second construction are not used. They would change: level 'L0' -> 'mix'; step [0, 1] -> [4]" in said
    assert PrecisionDebugger(level="L1") is debugger
    assert "They would change: level 'L0' -> 'L1'\n" in capsys.readouterr().err
    assert PrecisionDebugger(level="L9") is debugger
    assert "is not used, and is wrong" in capsys.readouterr().err
    assert (debugger.dump.level, debugger.dump.step) == ("L0", (0, 1))


class Numbers(Dataset):  # type: ignore[type-arg]
    """What a worker says about the debugger it was forked with."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> torch.Tensor:
        PrecisionDebugger.start(Net())
        y = torch.full((4,), float(i)) * 2
        PrecisionDebugger.stop()
        PrecisionDebugger.step()
        return y


def test_calls_in_a_fork(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a forked worker the calls do nothing, which is said once per worker; the parent's step goes on and counts nothing of it."""
    debugger = PrecisionDebugger(config(tmp_path, "mix"))
    net = nn.Sequential(nn.Linear(4, 4))
    debugger.start(net)
    for batch in DataLoader(Numbers(), batch_size=1, num_workers=1):
        net(batch)
    debugger.stop()
    debugger.step()
    assert steps(tmp_path) == [0]
    assert sum("Linear.forward" in n for n in names(tmp_path)) == 2
    assert capfd.readouterr().err.count("start() has no effect in a forked process; construct PrecisionDebugger in it") == 1
    assert len(open_dump(tmp_path / "dump").ranks(0)) == 1


def test_a_new_debugger_in_a_fork(tmp_path: Path) -> None:
    """A forked process that constructs its own debugger dumps into its own directory, and the parent's is left alone."""
    PrecisionDebugger(config(tmp_path, "L0"))
    child = os.fork()
    if child == 0:
        try:
            step(PrecisionDebugger(config(tmp_path, "L0"), dump_path=str(tmp_path / "child")), Net())
            PrecisionDebugger._instance.run.at_exit()  # type: ignore[union-attr]
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert open_dump(tmp_path / "child").ranks(0) == [f"proc{child}"]
    assert steps(tmp_path) == []


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """After the last listed step no hook, mode, patch or threshold is left, and start puts none on."""
    before = gc.get_threshold(), torch.autograd._engine_run_backward
    debugger = PrecisionDebugger(config(tmp_path, "mix", step=[1]))
    net = Net()
    for number in range(4):
        debugger.start(net)
        assert bool(net.a._forward_hooks) == (number == 1)
        net(x()).sum().backward()
        debugger.stop()
        debugger.step()
        assert not net.a._forward_hooks
        assert not net.a.weight._post_accumulate_grad_hooks
        assert torch._C._len_torch_function_stack() == 0
        assert (gc.get_threshold(), torch.autograd._engine_run_backward) == before
    assert steps(tmp_path) == [1]
