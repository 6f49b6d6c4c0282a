"""What `PrecisionDebugger` says: lines that people look for, the last line, and why a dump is empty."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from debug_model import Net, config, x

from msprobe_engine.core import log
from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

pytestmark = [pytest.mark.framework, pytest.mark.usefixtures("own_debugger")]
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(\d+\)(?: \[rank \d+\])? \[(DEBUG|INFO|WARNING|ERROR)\] (.*)")


def step(debugger: PrecisionDebugger, net: Any, run: bool = True) -> None:
    debugger.start(net)
    if run:
        net(x()).sum().backward()
    debugger.stop()
    debugger.step()


def test_lines_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines of the existing tool, in its format: where the dump goes, where dump.json is, and the end; nothing else."""
    path = config(tmp_path, "L0", step=["0-1"])
    debugger = PrecisionDebugger(path)
    net = Net()
    for _ in range(3):
        step(debugger, net)
    debugger.run.at_exit()
    said = capsys.readouterr().err.splitlines()
    assert all(LINE.fullmatch(line) for line in said), said
    place = tmp_path / "dump"
    expected = [
        f"Dump switch is turned on at step 0. Dump data will be saved in {place}/step0/proc{os.getpid()}",
        f"dump.json is at {place}/step0/proc{os.getpid()}/dump.json",
        f"Dump switch is turned on at step 1. Dump data will be saved in {place}/step1/proc{os.getpid()}",
        f"dump.json is at {place}/step1/proc{os.getpid()}/dump.json",
    ]
    texts = [LINE.fullmatch(line)[2] for line in said]  # type: ignore[index]
    assert sorted(texts[:-1]) == sorted(expected)
    end = re.fullmatch(r"msprobe ends successfully\. 2 steps \(0-1\), (\d+) records, 6 files, ([\d.]+) kB in (.*)", texts[-1])
    assert end is not None
    dump = open_dump(place)
    assert int(end[1]) == sum(len(dump.load(s).entries) for s in (0, 1))
    size = sum(p.stat().st_size for p in place.rglob("*.json"))
    assert end[2] == f"{size / 1000:.1f}"
    assert end[3] == str(place)


@pytest.mark.parametrize(("level", "seen"), [("0", "DIWE"), ("1", "IWE"), ("2", "WE"), ("3", "E"), ("4", ""), ("loud", "IWE"), ("", "IWE")])
def test_log_level(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, level: str, seen: str) -> None:
    """MSPROBE_LOG_LEVEL: 0 to 4, any other value counts as 1."""
    for name in [name for name in os.environ if name.startswith("MSPROBE_")]:
        monkeypatch.delenv(name)  # one that msprobe does not know is said at level 0
    monkeypatch.setenv("MSPROBE_LOG_LEVEL", level)
    try:
        debugger = PrecisionDebugger(config(tmp_path, "debug"))
        log.debug("D")
        log.info("I")
        log.warning("W")
        debugger.run.at_exit()
        said = capsys.readouterr().err
        assert "".join(line.partition("[")[2][0] for line in said.splitlines()) == seen
        assert ("is empty: PrecisionDebugger.save() was never called" in said) == ("E" in seen)
    finally:
        log.set_level("info")


EMPTY: list[tuple[dict[str, Any], str, str]] = [
    ({"level": "L0"}, "nothing", "PrecisionDebugger.start() was never called"),
    ({"level": "debug"}, "idle", "PrecisionDebugger.save() was never called"),
    ({"level": "L0", "step": [50]}, "train", "'step' is [50] and steps 0-2 ran; the run was too short"),
    ({"level": "L0", "rank": [4]}, "train", "'rank' is [4] and this process has no rank, which counts as rank 0"),
    ({"level": "L0"}, "idle", "no module inside the model given to start() was called between start() and stop()"),
    ({"level": "L1"}, "idle", "no torch function was called on this thread between start() and stop()"),
    ({"level": "L0", "section": {"list": ["nowhere"]}}, "train", "has a name that list ['nowhere'] wants"),
    (
        {"level": "L1", "section": {"scope": ["Torch.no.0.forward", "Torch.no.1.forward"]}},
        "train",
        "has a name that scope ['Torch.no.0.forward', 'Torch.no.1.forward'] wants",
    ),
    ({"level": "L0", "dump_enable": False}, "train", "dump_enable was false all the time (steps 0-2 ran); set it to true in the file"),
]


@pytest.mark.parametrize(("keys", "what", "says"), EMPTY)
def test_why_a_dump_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: dict[str, Any], what: str, says: str) -> None:
    """When nothing was captured in any step that was asked for, one ERROR line says why that can be."""
    debugger = PrecisionDebugger(config(tmp_path, **keys))
    net = Net()
    for _ in range(0 if what == "nothing" else 3):
        step(debugger, net, what == "train")
    debugger.run.at_exit()
    errors = [line for line in capsys.readouterr().err.splitlines() if "[ERROR]" in line]
    assert len(errors) == 1, errors
    assert f"the dump in {tmp_path / 'dump'} is empty: " in errors[0]
    assert says in errors[0]


def test_strict_raises(tmp_path: Path) -> None:
    """With strict the end of the window raises."""
    debugger = PrecisionDebugger(
        {"strict": True, "dump": {"level": "L0", "step": [0], "dump_path": str(tmp_path / "dump")}}  # type: ignore[arg-type]
    )
    with pytest.raises(NothingCapturedError, match=r"no module inside the model given to start\(\) was called"):
        step(debugger, Net(), run=False)


def test_one_empty_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step without records is a warning with the reason, when others have some."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    step(debugger, net)
    step(debugger, net, run=False)
    debugger.run.at_exit()
    said = capsys.readouterr().err
    assert said.count("[WARNING] step 1: nothing was captured; no module inside the model given to start() was called") == 1
    assert "msprobe ends successfully" in said
    assert "[ERROR]" not in said


def test_losses_are_in_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part that failed is no success: the last line counts what was lost, and is a warning."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    debugger.start(net)
    net(x())
    debugger.pipeline.lose("something", 3)
    debugger.stop()
    debugger.step()
    debugger.run.at_exit()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "msprobe ends" in line]
    assert "[WARNING] msprobe ends, but not everything is there. 1 step (0)" in line
    assert line.endswith("; lost: something 3")


def test_a_fault_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the probe switches the dump off with one message; the training, and every later call, goes on."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    step(debugger, net)

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("inside the probe")

    monkeypatch.setattr(debugger.capture, "attach", broken)
    for _ in range(3):
        step(debugger, net)
        assert not net.a._forward_hooks
        assert torch._C._len_torch_function_stack() == 0
    debugger.run.at_exit()
    said = capsys.readouterr().err
    assert said.count("dump is switched off, training goes on: ZeroDivisionError: inside the probe") == 1
    assert "msprobe ends, but not everything is there. 1 step (0)" in said


def test_the_last_line_comes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of the window, not again at exit; again when more was dumped after it."""
    debugger = PrecisionDebugger(config(tmp_path, "L0", step=[0]))
    net = Net()
    for _ in range(3):
        step(debugger, net)
    assert capsys.readouterr().err.count("msprobe ends successfully. 1 step (0)") == 1
    debugger.set_init_step(0)
    step(debugger, net)
    debugger.run.at_exit()
    assert capsys.readouterr().err.count("msprobe ends successfully") == 1
    log.forget_warnings()


def test_a_fault_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty dump that a fault has switched off says so, and does not blame the loop."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("inside the probe")

    monkeypatch.setattr(debugger.capture, "attach", broken)
    step(debugger, Net())
    debugger.run.at_exit()
    said = capsys.readouterr().err
    assert f"the dump in {tmp_path / 'dump'} is empty: a fault switched it off, see the message above" in said
    assert "too short" not in said


def test_step_is_never_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop without step() makes one step of everything; the end says so. One start() alone may be meant like this."""
    debugger = PrecisionDebugger(config(tmp_path, "L0"))
    net = Net()
    for _ in range(3):
        debugger.start(net)
        net(x())
        debugger.stop()
    debugger.run.at_exit()
    said = capsys.readouterr().err
    assert "[WARNING] step() was never called: what 3 calls of start() began is one step; call it after each" in said


CUT_OFF = """
import sys, torch
from msprobe.pytorch import PrecisionDebugger
PrecisionDebugger(sys.argv[1])
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
for step in range(2):
    PrecisionDebugger.start(net)
    y = net(torch.ones(1, 2)).sum()
    if step == 1:
        raise RuntimeError("mine")
    y.backward()
    PrecisionDebugger.stop()
    PrecisionDebugger.step()
"""


def test_a_step_that_was_cut_off(tmp_path: Path) -> None:
    """A program that ends by an exception inside a step does not end successfully: the last line names the step."""
    done = warm.run(CUT_OFF, config(tmp_path, "L0"))
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "mine" in done.stderr  # the writer's thread may put a line of its own between the two
    assert "[WARNING] msprobe ends, but not everything is there. 2 steps (0-1)" in done.stderr
    assert "; cut off: 1 step (1)" in done.stderr
