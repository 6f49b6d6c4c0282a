"""Helpers of the capture tests: run a function under a capture and return the frame; a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry, Frame, TensorRef
from msprobe_engine.core.statistics.rows import Statistics, read_row
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.level import Capture


class Block(nn.Module):
    """A block of a model: a layer, an activation, a function and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.act(self.fc(x))) + x


def capture(model: Any, work: Callable[[], Any], level: str = "mix", steps: int = 1, **options: Any) -> list[Frame]:
    """The frames of `steps` runs of `work` under a capture of `level`."""
    faults = Faults(strict=True)
    frames: list[Frame] = []
    pipeline = Pipeline(TorchBackend(), [], Writer([], faults), faults, [lambda f, _: frames.append(f)])
    session = Capture(pipeline, level, **options)
    if model is not None:
        session.attach(model)
    try:
        for step in range(steps):
            session.open()
            work()
            stacks = session.end_step()
            pipeline.end_step(step, stacks)
    finally:
        session.close()
    pipeline.advance(wait=True)
    return frames


def entries(frame: Frame) -> dict[str, Entry]:
    """Entries by name; names must be unique."""
    found = {e.name: e for e in frame.entries}
    assert len(found) == len(frame.entries), "a record name occurs twice"
    return found


def stat(frame: Frame, ref: TensorRef) -> Statistics:
    """Statistics of one tensor of a frame."""
    assert ref.row >= 0
    return read_row(frame.rows[ref.row])
