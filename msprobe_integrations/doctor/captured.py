"""A dump of one function in memory, for checks that look at its records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Frame, TensorRef
from msprobe_engine.core.statistics import rows
from msprobe_engine.core.statistics.rows import Statistics
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.level import Capture


def capture(work: Callable[[], object], level: str = "L1", model: Any = None) -> Frame:
    """The frame of one call of `work`. A fault inside the probe is raised."""
    faults, frames = Faults(strict=True), []
    pipeline = Pipeline(TorchBackend(), [], Writer([], faults), faults, [lambda frame, _: frames.append(frame)])
    session = Capture(pipeline, level)
    if model is not None:
        session.attach(model)
    try:
        session.open()
        work()
        pipeline.end_step(0, session.end_step())
    finally:
        session.close()
    pipeline.advance(wait=True)
    return frames[0]


def tensors_of(node: Any) -> Iterator[TensorRef]:
    """Tensors in a part of a record."""
    if isinstance(node, TensorRef):
        yield node
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from tensors_of(child)
    elif isinstance(node, dict):
        yield from tensors_of(list(node.values()))


def first_tensor(node: Any) -> TensorRef:
    """The first of `tensors_of`."""
    return next(tensors_of(node))


def statistics_of(frame: Frame, ref: TensorRef) -> Statistics | None:
    """Numbers of a tensor; None where it has none."""
    return rows.read_row(frame.rows[ref.row]) if ref.row >= 0 else None
