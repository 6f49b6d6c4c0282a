"""Helpers of MindSpore's capture tests: run a function under a capture and return the frames; small models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry, Frame, TensorRef
from msprobe_engine.core.statistics.rows import Statistics, read_row
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.mindspore.backend import MindSporeBackend
from msprobe_integrations.mindspore.capture.level import Capture

LEVELS = ("L0", "L1", "mix")


class Layers(nn.Cell):  # type: ignore[misc]
    """Two layers with an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.e = nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):  # type: ignore[no-untyped-def]
        return self.e(ops.relu(self.d(x)))


def tensor(seed: int = 0, shape: tuple[int, ...] = (4, 4)) -> Any:
    """Random float32."""
    return ms.Tensor(np.random.RandomState(seed).randn(*shape).astype(np.float32))


def gradients(model: Any) -> Callable[[Any], Any]:
    """Loss and gradients with respect to the input and all weights."""
    run: Callable[[Any], Any] = ms.value_and_grad(lambda x: model(x).sum(), 0, model.trainable_params())
    return run


def capture(
    model: Any, work: Callable[[], Any], level: str = "mix", steps: int = 1, *, opened: Any = None, **options: Any
) -> tuple[list[Frame], list[Any]]:
    """The frames of `steps` runs of `work` under a capture of `level`, and what `work` has given. `opened` is told of the capture."""
    faults = Faults(strict=True)
    frames: list[Frame] = []
    pipeline = Pipeline(MindSporeBackend(), [], Writer([], faults), faults, [lambda f, _: frames.append(f)])
    session = Capture(pipeline, level, **options)
    if opened is not None:
        opened(session)
    if model is not None:
        session.attach(model)
    results = []
    try:
        for step in range(steps):
            session.open()
            results.append(work())
            pipeline.end_step(step, session.end_step())
    finally:
        session.close()
    pipeline.advance(wait=True)
    return frames, results


def entries(frame: Frame) -> dict[str, Entry]:
    """Entries by name; names must be unique."""
    found = {e.name: e for e in frame.entries}
    assert len(found) == len(frame.entries), "a record name occurs twice"
    return found


def stat(frame: Frame, ref: TensorRef) -> Statistics:
    """Statistics of one tensor of a frame."""
    assert ref.row >= 0
    return read_row(frame.rows[ref.row])


def same(a: Any, b: Any) -> bool:
    """Are two nested results the same bits?"""
    if isinstance(a, ms.Tensor):
        return bool(a.dtype == b.dtype and a.asnumpy().tobytes() == b.asnumpy().tobytes())
    return len(a) == len(b) and all(map(same, a, b))
