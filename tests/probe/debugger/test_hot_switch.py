"""The hot switch: `dump_enable` in a file that changes while the training runs."""

from __future__ import annotations

import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from debug_model import Net, config, names, steps, x

from msprobe_engine.core.settings import hot
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the file is a real one."""
    monkeypatch.setattr(hot, "SECONDS_ON", 0.0)
    monkeypatch.setattr(hot, "SECONDS_OFF", 0.0)


def write(path: Path, **keys: Any) -> None:
    """Change keys of the file; ``...`` takes one out. The time of change goes up, however fast the test is."""
    document = json.loads(path.read_text())
    document |= keys
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))
    later = time.time_ns() + write.calls * 10_000_000  # type: ignore[attr-defined]
    write.calls += 1  # type: ignore[attr-defined]
    os.utime(path, ns=(later, later))


write.calls = 1  # type: ignore[attr-defined]


def step(debugger: PrecisionDebugger, net: Net) -> None:
    debugger.start(net)
    net(x()).sum().backward()
    debugger.stop()
    debugger.step()


def hooks(net: Net) -> int:
    """Everything that the probe may have put on a model or on torch."""
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())
    on_parameters = sum(len(p._post_accumulate_grad_hooks or {}) for p in net.parameters())
    modes = torch._C._len_torch_function_stack()
    return on_modules + on_parameters + modes + ("apply" in vars(torch.autograd.function._SingleLevelFunction))


def test_on_and_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Off at first, on from step 2, off from step 4: steps count on meanwhile, hooks are there only while it is on, and thresholds of
    the garbage collector are what they were."""
    path = config(tmp_path, "mix", dump_enable=False)
    debugger = PrecisionDebugger(path)
    net, before = Net(), gc.get_threshold()
    for number in range(6):
        if number in (2, 4):
            write(path, dump_enable=number == 2)
        step(debugger, net)
        # the file is looked at before a step and after it
        assert bool(hooks(net)) == (2 <= number < 4), number
    assert steps(tmp_path) == [2, 3]
    assert gc.get_threshold() == before
    said = capsys.readouterr().err
    assert "detected config change and reloaded runtime settings. The dump is on from step 2 on. Changed: dump_enable False -> True" in said
    assert "The dump is off from step 4 on" in said


def test_every_setting_is_taken_over(tmp_path: Path) -> None:
    """Level, list, data_mode, summary_mode, step and dump_path count from the next step on; each step is whole in its own way."""
    path = config(tmp_path, "L0", dump_enable=True)
    debugger = PrecisionDebugger(path)
    net = Net()
    step(debugger, net)
    write(path, level="L1", statistics={"list": ["tanh"], "data_mode": ["forward"], "summary_mode": "digest"})
    step(debugger, net)
    write(path, level="mix", statistics={}, dump_path=str(tmp_path / "other"), step=[3])
    step(debugger, net)
    step(debugger, net)
    assert steps(tmp_path) == [0, 1]
    assert all(n.startswith("Module.") for n in names(tmp_path, 0))
    assert names(tmp_path, 1) == ["Torch.tanh.0.forward"]
    other = open_dump(tmp_path / "other")
    assert other.steps == [3]
    assert {"Module.a.Linear.forward.0", "Torch.tanh.0.backward"} <= set(other.load(3).entries)


def test_a_change_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """A step that has begun is finished as it began; the change counts from the next one on."""
    path = config(tmp_path, "L0", dump_enable=True)
    debugger = PrecisionDebugger(path)
    net = Net()
    debugger.start(net)
    net(x())
    write(path, dump_enable=False)
    debugger.stop()
    debugger.start(net)
    net(x())
    debugger.stop()
    debugger.step()
    assert hooks(net) == 0
    step(debugger, net)
    assert steps(tmp_path) == [0]
    assert "Module.a.Linear.forward.1" in names(tmp_path)


def test_a_removed_key_keeps_the_state(tmp_path: Path) -> None:
    """Without the key the dump stays what it was, other keys count."""
    path = config(tmp_path, "L0", dump_enable=True)
    debugger = PrecisionDebugger(path)
    net = Net()
    write(path, dump_enable=..., level="L1")
    step(debugger, net)
    write(path, dump_enable=False)
    step(debugger, net)
    write(path, dump_enable=..., level="L0")
    step(debugger, net)
    assert steps(tmp_path) == [0]
    assert "Torch.tanh.0.forward" in names(tmp_path)


@pytest.mark.parametrize(
    "content", ["{ not json", json.dumps({"level": "L9"}), json.dumps({"lst": []}), json.dumps({"task": "tensor", "rank": "x"})]
)
def test_a_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    """A file that cannot be used switches off with one warning that holds the mistake, the training goes on, and a corrected file
    switches on again."""
    path = config(tmp_path, "L0", dump_enable=True)
    good = path.read_text()
    debugger = PrecisionDebugger(path)
    net = Net()
    step(debugger, net)
    path.write_text(content)
    write_time(path)
    for _ in range(3):
        step(debugger, net)
    assert hooks(net) == 0
    assert capsys.readouterr().err.count("the dump is switched off: the configuration was changed and cannot be used") == 1
    path.write_text(good)
    write_time(path)
    step(debugger, net)
    assert steps(tmp_path) == [0, 4]


def write_time(path: Path) -> None:
    later = time.time_ns() + write.calls * 10_000_000  # type: ignore[attr-defined]
    write.calls += 1  # type: ignore[attr-defined]
    os.utime(path, ns=(later, later))


def test_a_file_that_is_gone_or_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file changes nothing, nor does one with the same content."""
    path = config(tmp_path, "L0", dump_enable=True)
    debugger = PrecisionDebugger(path)
    net = Net()
    write(path)
    step(debugger, net)
    path.unlink()
    step(debugger, net)
    assert steps(tmp_path) == [0, 1]
    assert "config change" not in capsys.readouterr().err


def test_the_end_can_be_moved(tmp_path: Path) -> None:
    """After the last listed step a new list goes on; arguments of the constructor keep the last word."""
    path = config(tmp_path, "L1", dump_enable=True, step=[0])
    debugger = PrecisionDebugger(path, level="L0")
    net = Net()
    for _ in range(3):
        step(debugger, net)
    write(path, step=[4])
    for _ in range(3):
        step(debugger, net)
    assert steps(tmp_path) == [0, 4]
    assert all(n.startswith("Module.") for n in names(tmp_path, 4))


def test_a_level_that_needs_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Changed to L0 while start() is called without a model: said once, the training goes on."""
    path = config(tmp_path, "L1", dump_enable=True)
    debugger = PrecisionDebugger(path)
    net = Net()
    write(path, level="L0")
    for _ in range(2):
        debugger.start()
        net(x())
        debugger.stop()
        debugger.step()
    assert capsys.readouterr().err.count("the dump stays off: level L0 needs the model") == 1
    assert steps(tmp_path) == []


def test_level_debug_and_back(tmp_path: Path) -> None:
    """From modules to saved variables and back."""
    path = config(tmp_path, "L0", dump_enable=True)
    debugger = PrecisionDebugger(path)
    net = Net()
    for level in ("L0", "debug", "L0"):
        write(path, level=level)
        debugger.start(net)
        debugger.save(net(x()), "y")
        debugger.stop()
        debugger.step()
    assert names(tmp_path, 1) == ["y.0.debug", "y_grad.0.debug"]
    assert names(tmp_path, 0) == names(tmp_path, 2)


def test_without_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Settings that come from no file cannot change: false means off, which is said."""
    debugger = PrecisionDebugger({"dump": {"dump_enable": False, "dump_path": str(tmp_path / "dump"), "level": "L0"}})  # type: ignore[arg-type]
    step(debugger, Net())
    assert "there is no file to watch" in capsys.readouterr().err
    assert steps(tmp_path) == []
    debugger.run.at_exit()
    assert "dump_enable was false all the time (steps 0 ran)" in capsys.readouterr().err
