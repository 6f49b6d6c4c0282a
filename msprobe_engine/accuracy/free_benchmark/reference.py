"""to_cpu: does the result of a device agree with that of the CPU, which has computed in a wider type?

Errors are taken as the existing tool (8.1.1) does, absolute ones of values below 1, relative ones of others. Three of its flaws are not
here: an error as large as all values of a small result passes there, NaN and Inf are taken for right, and a mean error is seen on one
side only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.free_benchmark.judge import Judgement
from msprobe_engine.core.dtypes import FLOATS

Array = npt.NDArray[Any]

ALLOWED = {name: FLOATS[name].round_off for name in ("float16", "bfloat16")}
"""Largest error, by type of the device's result."""
OTHERWISE = 2.0**-14
MEAN = 1e-4
_LARGEST = {name: FLOATS[name].largest for name in ("float16", "bfloat16", "float32")}


@dataclass
class Agreement:
    """Errors of a result, part by part.

    Args:
        dtype: type of the device's result, its name in `perturb.NOISE`.
        largest: largest finite absolute value of the CPU's whole result; what is smaller than 1 as a whole is judged by that.
    """

    dtype: str
    largest: float
    one_sided: bool = False
    error: float = 0.0
    total: float = 0.0
    count: int = 0

    def add(self, device: Array, cpu: Array) -> None:
        """Take a part: values of both sides, of one shape, in types that hold them."""
        d, c = device.astype(np.float64).reshape(-1), cpu.astype(np.float64).reshape(-1)
        largest = _LARGEST.get(self.dtype, math.inf)
        with np.errstate(over="ignore", invalid="ignore"):
            c = np.where(np.abs(c) > largest * (1 + ALLOWED.get(self.dtype, OTHERWISE)), np.copysign(np.inf, c), c)  # rounds to Inf
            finite = np.isfinite(d) & np.isfinite(c)
            same = (d == c) | (np.isnan(d) & np.isnan(c))
            at_limit = np.isinf(d) & (np.sign(d) == np.sign(c)) & (np.abs(c) >= largest)
            self.one_sided |= bool((~finite & ~same & ~at_limit).any())
            d, c = d[finite], c[finite]
            scale = np.maximum(np.abs(c), min(1.0, self.largest) or 1.0)
            errors = (d - c) / scale
        self.error = max(self.error, float(np.abs(errors).max(initial=0.0)))
        self.total += float(errors.sum())
        self.count += errors.size

    @property
    def agrees(self) -> bool:
        """Is the device right?"""
        limit = ALLOWED.get(self.dtype, OTHERWISE)
        mean = abs(self.total / self.count) if self.count else 0.0
        return not self.one_sided and self.error <= limit and mean <= max(MEAN, limit / math.sqrt(self.count or 1))

    def judgement(self) -> Judgement:
        """As a verdict of the free benchmark; there is no ratio."""
        return Judgement(self.agrees, math.inf if self.one_sided else self.error, False, 0.0)
