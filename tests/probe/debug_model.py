"""A tiny model and its settings for the tests of `PrecisionDebugger`, all in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.formats.dump.notebook.step_dump import StepDump
from msprobe_engine.formats.dump.reader import open_dump
from msprobe_integrations.torch.dump.debugger import PrecisionDebugger


class Net(nn.Module):
    """Two linear layers; the second one is called with what the first one gives."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a = nn.Linear(width, width)
        self.b = nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.b(self.a(x)))


def x(rows: int = 2, width: int = 4) -> torch.Tensor:
    """An input."""
    return torch.linspace(-1, 1, rows * width).reshape(rows, width)


def config(directory: Path, level: str = "L0", task: str = "statistics", **keys: Any) -> Path:
    """A config.json with the keys at the top, and ``section`` as the task's section."""
    section = keys.pop("section", {})
    document = {"task": task, "dump_path": str(directory / "dump"), "level": level, "rank": [], "step": [], **keys, task: section}
    path = directory / "config.json"
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))
    return path


def written(directory: Path, step: int = 0) -> StepDump:
    """The one rank of a step, when everything is written."""
    debugger = PrecisionDebugger._instance
    assert debugger is not None
    debugger.run.files.wait()
    return open_dump(directory / "dump").load(step)


def names(directory: Path, step: int = 0) -> list[str]:
    """Record names of a step."""
    return list(written(directory, step).entries)


def steps(directory: Path) -> list[int]:
    """Steps that are written."""
    debugger = PrecisionDebugger._instance
    assert debugger is not None
    debugger.run.files.wait()
    return open_dump(directory / "dump").steps if (directory / "dump").exists() else []
