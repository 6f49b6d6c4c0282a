"""Collectives that the monitor saw, counted by operation: calls, and bytes of their outputs on this rank."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from msprobe_engine.core.records import Frame, Sample

_BITS = re.compile(r"(\d+)")


class Traffic:
    """Adds up collectives of frames; what a step holds is worked out once per layout.

    Attributes:
        calls, bytes: operation to count, since the start.
    """

    def __init__(self) -> None:
        self.calls: dict[str, float] = {}
        self.bytes: dict[str, float] = {}
        self._samples: Sequence[Sample] = ()
        self._step: tuple[dict[str, float], dict[str, float]] = ({}, {})

    def update(self, frame: Frame) -> None:
        if frame.samples != self._samples:
            self._samples = frame.samples
            self._step = _count(frame.samples)
        for total, step in zip((self.calls, self.bytes), self._step):
            for op, value in step.items():
                total[op] = total.get(op, 0.0) + value


def _count(samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    calls: dict[str, set[object]] = {}
    sizes: dict[str, float] = {}
    for sample in samples:
        if sample.family == "other" and "call" in sample.extra:
            calls.setdefault(sample.name, set()).add(sample.extra["call"])
            if "/pre_" not in str(sample.extra.get("tag", "")):
                description = sample.ref.description
                sizes[sample.name] = sizes.get(sample.name, 0.0) + math.prod(description.shape) * element_size(description.dtype)
    return {op: float(len(found)) for op, found in calls.items()}, sizes


def element_size(dtype: str) -> float:
    """Bytes of one element, from the name of its type; 1 for bool and types without a number."""
    found = _BITS.search(dtype)
    return int(found.group(1)) / 8 if found is not None else 1.0
