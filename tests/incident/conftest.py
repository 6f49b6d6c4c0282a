"""Frames by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Entry, Frame, Sample, TensorDescription, TensorRef
from msprobe_engine.core.statistics import rows

DESCRIPTION = TensorDescription("torch.Tensor", "torch.float32", (4,), True)


def make_frame(step: int, rank: int = 0, *, bad: bool = False, entries: bool = True) -> Frame:
    """Three rows: input, output and a gradient; with `bad` the output and the gradient hold a NaN."""
    table = rows.empty(3)
    words = rows.as_int64(table)
    words[:, rows.COUNT] = 4
    words[:, rows.FLAGS] = rows.WRITTEN
    table[:, rows.MIN], table[:, rows.MAX], table[:, rows.SUM], table[:, rows.SUMSQ] = -1.0, 2.0, 1.0, 6.0
    if bad:
        words[1:, rows.NANS] = 1
    entry = Entry(
        "Module.fc.Linear.forward.0", {"input_args": [TensorRef(0, DESCRIPTION)], "input_kwargs": {}, "output": [TensorRef(1, DESCRIPTION)]}
    )
    return Frame(
        step=step, rank=rank, rows=np.ascontiguousarray(table), entries=[entry] if entries else [],
        samples=[Sample("grad_reduced", "fc.weight", TensorRef(2, DESCRIPTION), "reduced")],
        scalars={"loss": math.nan if bad else 1.0}, level="L0" if entries else "",
    )  # fmt: skip


def make_alert(step: int, rank: int = 0, *, rule: str = "nan_inf", severity: str = "critical", order: int = 0) -> Alert:
    return Alert(
        rule, severity, "grad", "fc.weight", step, rank, math.nan, "finite", f"step {step} rank {rank}: fc.weight holds 1 NaN", order=order
    )


@pytest.fixture(scope="session")
def frame() -> Callable[..., Frame]:
    return make_frame


@pytest.fixture(scope="session")
def alert() -> Callable[..., Alert]:
    return make_alert


@pytest.fixture
def store() -> Any:
    torch = pytest.importorskip("torch")
    return torch.distributed.HashStore()
