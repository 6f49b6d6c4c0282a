"""Raises the program's exception, from a handler of a signal, at lines of the probe while a small training runs; run as a program:
``interrupted_training.py MODE COUNT``.

MODE: ``monitor``, ``statistics`` or ``tensor`` (tasks of a dump of level mix). COUNT: so many of the lines run by the training's thread
are chosen, evenly; each is a training in a process of its own, forked. Prints, as JSON, how many lines there are and were tried, and those
at which the program did not get its exception, with what it got instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import msprobe_engine
from msprobe.pytorch import PrecisionDebugger
from msprobe_engine.core.settings.schema import JsonLinesSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

MODE, COUNT = sys.argv[1], int(sys.argv[2])
OURS = str(Path(msprobe_engine.__file__).parents[1] / "msprobe")
Line = tuple[str, int]


class Preempted(Exception):
    """What the program raises to leave its training."""


def leave(_number: int, _frame: FrameType | None) -> None:
    raise Preempted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x)) * 2
        y.add_(1.0)
        out: torch.Tensor = self.b(self.norm(y))
        return out


def train() -> None:
    place = tempfile.mkdtemp()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    probe = debugger = None
    if MODE == "monitor":
        monitor = MonitorSettings(gradients=True, parameters=True, updates=True, activations=True)
        sinks = SinkSettings(jsonl=JsonLinesSettings(enabled=True))
        probe = TorchProbe(ProbeSettings(output_dir=place, monitor=monitor, sinks=sinks))
        probe.attach(model, optimizer)
    else:
        section = {"scope": [], "list": [], "data_mode": ["all"]}
        settings = {"task": MODE, "dump_path": place, "rank": [], "step": [], "level": "mix", MODE: section}
        Path(place, "config.json").write_text(json.dumps(settings))
        debugger = PrecisionDebugger(f"{place}/config.json")
    for step in range(2):
        if probe is not None:
            probe.begin_step(step)
        if debugger is not None:
            debugger.start(model)
        loss = model(torch.randn(3, 4)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if probe is not None:
            probe.end_step({"loss": loss})
        if debugger is not None:
            debugger.stop()
            debugger.step()
    if probe is not None:
        probe.close()


def run_lines() -> dict[Line, int]:
    """Lines of ours that the training's thread runs, and how often."""
    lines: dict[Line, int] = {}

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            lines[line] = lines.get(line, 0) + 1
        return local

    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(OURS) else None)
    try:
        train()
    finally:
        sys.settrace(None)
    return lines


def interrupt(line: Line, times: int) -> str:
    """Train; the exception comes when `line` is run for the time `times`."""
    left = times

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and frame.f_lineno == line[1]:
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGUSR1)
        return local

    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename == line[0] else None)
    try:
        train()
    except Preempted:
        return "passed"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.settrace(None)
    return "lost" if left <= 0 else "not reached"


def interrupt_in_child(line: Line, times: int) -> str:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.write(write, interrupt(line, times).encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said or "died"


torch.set_num_threads(1)
signal.signal(signal.SIGUSR1, leave)
train()  # what is imported and made once is there
lines = sorted(run_lines().items())
chosen = lines[:: max(1, len(lines) // COUNT)]
found = {f"{Path(line[0]).name}:{line[1]}": interrupt_in_child(line, (times + 1) // 2) for line, times in chosen}
wrong = {where: said for where, said in found.items() if said not in ("passed", "not reached")}
print(json.dumps({"lines": len(lines), "tried": len(found), "passed": list(found.values()).count("passed"), "wrong": wrong}))
