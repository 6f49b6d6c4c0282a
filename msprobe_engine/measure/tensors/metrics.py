"""Figures of two tensors, taken in one pass over blocks that stay in the cache.

Sums are in float64. What a relative error is follows a rule:

* `OLD` (8.1.1): ``|(n - b) / b|`` in the type of the tensors, float64 for what is no float; where b is 0, 2.2e-16 is added to both first
* `NEW` (26.2.0), and ours: the same in the wider of both types and float32, with the epsilon of that type

With a rule of the existing tool the imaginary part of complex numbers is dropped and the signs of infinities are not looked at, as it does;
its verdicts depend on it.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.tensors.blocks import Readable
from msprobe_engine.measure.options import NEW, OLD

Array = npt.NDArray[Any]

BLOCK = 9984
"""Elements looked at together. More than 10,000 would make OpenBLAS start threads of its own for every sum."""
_READ = 8 * BLOCK
"""Elements read together."""

_WHOLE = 1 << 22
"""Up to so many elements the existing tool's figures are taken in one block: its last digits depend on the order of the sum."""

_MASK_VALUE = 1e3
_scratch = threading.local()


@dataclass
class Figures:
    """Of a target n and a golden b, in C order.

    Attributes:
        size: elements compared.
        bad_target, bad_golden: NaN and Inf in n and in b.
        apart: elements that are NaN or Inf on one side only, or not of the same kind on both; they count in nothing below.
        dot, target_squares, golden_squares, difference: sums of n*b, n*n, b*b, (n-b)*(n-b).
        worst: largest ``|n - b|``; at: its place in C order; values: n and b there.
        top: largest ``|b|`` and ``|n|``.
        relative: largest relative error; thousandth, five: elements with one below 0.001 and 0.005.
        rest_difference, rest: sums of (n-b)*(n-b) and b*b over elements below half of `top`, where a mask's constant is the top.
    """

    size: int = 0
    bad_target: int = 0
    bad_golden: int = 0
    apart: int = 0
    dot: float = 0.0
    target_squares: float = 0.0
    golden_squares: float = 0.0
    difference: float = 0.0
    worst: float = 0.0
    at: int = 0
    values: tuple[Any, Any] = (0.0, 0.0)
    top: float = 0.0
    relative: float = 0.0
    thousandth: int = 0
    five: int = 0
    rest_difference: float = 0.0
    rest: float = 0.0

    @property
    def cosine(self) -> float:
        """NaN when either side is zero everywhere."""
        scale = math.sqrt(self.target_squares) * math.sqrt(self.golden_squares)
        return self.dot / scale if scale else math.nan

    @property
    def distance(self) -> float:
        """How far the tensors are apart, relative to them: by their norm, or by the largest element. inf: NaN or Inf on one side only.
        Constants of a mask, which dwarf what matters, are left out."""
        if self.apart:
            return math.inf
        if not self.worst:
            return 0.0
        if self.rest:
            return max(math.sqrt(self.rest_difference / self.rest), self.worst / self.top)
        norm = max(self.target_squares, self.golden_squares)
        by_norm = math.sqrt(self.difference / norm) if norm else 0.0
        return max(by_norm, self.worst / self.top if self.top else math.inf)


class TensorDiff:
    """Takes the figures of two tensors of equal size.

    Args:
        rule: `OLD`, `NEW` or None for ours.
    """

    def __init__(self, target: Readable, golden: Readable, rule: str | None) -> None:
        self._sides = target, golden
        self._rule = rule
        self.figures = Figures(target.size)

    def run(self) -> Figures:
        """One pass; a second one over elements below a mask's constant, if there is one and something differs.

        Raises:
            DumpFormatError: a file ends before its tensor does.
        """
        size = self.figures.size
        whole = self._rule is not None and size <= _WHOLE
        for begin in range(0, size, size if whole else _READ):
            target, golden = self._read_pair(begin, min(size if whole else _READ, size - begin))
            step = size if whole else BLOCK
            for start in range(0, len(target), step):
                self._block(target[start : start + step], golden[start : start + step], begin + start)
            if self._rule and self.figures.apart:
                break
        figures = self.figures
        if figures.worst and figures.top >= _MASK_VALUE and not self._rule and figures.worst < figures.top / 2:
            self._below(figures.top / 2)
        return figures

    def _read_pair(self, start: int, count: int) -> tuple[Array, Array]:
        if not hasattr(_scratch, "memory"):
            _scratch.memory = bytearray(), bytearray()
        memories = _scratch.memory if count <= _READ else (bytearray(), bytearray())
        target, golden = (side.read(start, count, memory) for side, memory in zip(self._sides, memories))
        if self._rule:
            target, golden = (side.real.astype(np.float64) if side.dtype.kind == "c" else side for side in (target, golden))
        elif (target.dtype.kind == "c") != (golden.dtype.kind == "c"):
            target, golden = target.astype(np.complex128), golden.astype(np.complex128)
        return target, golden

    def _block(self, target: Array, golden: Array, start: int) -> None:
        f = self.figures
        with np.errstate(all="ignore"):
            target_values, golden_values = _wide(target), _wide(golden)
            target_squares, golden_squares = float(target_values.dot(target_values)), float(golden_values.dot(golden_values))
            if not math.isfinite(target_squares + golden_squares):
                target, golden = self._without_bad(target, golden)
                target_values, golden_values = _wide(target), _wide(golden)
                target_squares, golden_squares = float(target_values.dot(target_values)), float(golden_values.dot(golden_values))
            f.target_squares += target_squares
            f.golden_squares += golden_squares
            f.dot += float(target_values.dot(golden_values))
            f.top = max(f.top, _largest(target_values), _largest(golden_values))
            np.subtract(target_values, golden_values, out=target_values)
            difference = float(target_values.dot(target_values))
            f.difference += difference
            if difference or _long(target, golden) or target_values.any():
                self._errors(target, golden, target_values, start)
            elif self._rule == OLD:
                self._relative(target, golden)  # 0 / 0 in float16, which has no 2.2e-16
            else:
                f.thousandth += len(target)
                f.five += len(target)

    def _errors(self, target: Array, golden: Array, difference: Array, start: int) -> None:
        f = self.figures
        if target.dtype.kind == "c" or golden.dtype.kind == "c":
            size = np.abs(target - golden).astype(np.float64)
        elif self._rule is None and _long(target, golden):
            size = np.abs(target.astype(np.longdouble) - golden.astype(np.longdouble)).astype(np.float64)
        else:
            size = np.abs(difference, out=difference)
        worst = float(size.max())
        if worst > f.worst:
            position = int(size.argmax())
            f.worst, f.at, f.values = worst, start + position, (target[position].item(), golden[position].item())
        self._relative(target, golden)

    def _relative(self, target: Array, golden: Array) -> None:
        f = self.figures
        error = relative_error(target, golden, self._rule)
        worst = float(error.max())
        if worst > f.relative or worst != worst:
            f.relative = worst
        f.thousandth += int(np.count_nonzero(error < 0.001))
        f.five += int(np.count_nonzero(error < 0.005))

    def _without_bad(self, target: Array, golden: Array) -> tuple[Array, Array]:
        """NaN and Inf become 0 on both sides; where only one side has them, or not the same, the elements are counted as apart."""
        f = self.figures
        bad_target, bad_golden = ~np.isfinite(target), ~np.isfinite(golden)
        bad = bad_target | bad_golden
        if not bad.any():
            return target, golden  # squares of float64 that are too large
        f.bad_target += int(np.count_nonzero(bad_target))
        f.bad_golden += int(np.count_nonzero(bad_golden))
        nan_target, nan_golden = np.isnan(target), np.isnan(golden)
        same = (bad_target == bad_golden) & (nan_target == nan_golden)
        if self._rule is None:
            same &= nan_target | ~bad | (target == golden)
        f.apart += int(len(target) - np.count_nonzero(same))
        return np.where(bad, target.dtype.type(0), target), np.where(bad, golden.dtype.type(0), golden)

    def _below(self, limit: float) -> None:
        f = self.figures
        for start in range(0, f.size, _READ):
            target, golden = self._read_pair(start, min(_READ, f.size - start))
            with np.errstate(all="ignore"):
                keep = (np.abs(target) < limit) & (np.abs(golden) < limit)
                target_values, golden_values = _wide(target[keep]), _wide(golden[keep])
                f.rest += float(golden_values.dot(golden_values))
                np.subtract(target_values, golden_values, out=target_values)
                f.rest_difference += float(target_values.dot(target_values))


def relative_error(target: Array, golden: Array, rule: str | None) -> Array:
    """Relative error of each element; see the rules of this module."""
    real = target.dtype.kind != "c" and golden.dtype.kind != "c"
    if rule == OLD:
        if golden.dtype.kind != "f":
            target, golden = target.astype(np.float64), golden.astype(np.float64)
        eps = float(np.finfo(np.float64).eps)
        wide = np.result_type(target, golden)
    else:
        assert rule in (NEW, None)
        if real:
            target = target if target.dtype.kind == "f" else target.astype(np.float64)
            golden = golden if golden.dtype.kind == "f" else golden.astype(np.float64)
        wide = np.result_type(target, golden, np.float32)
        eps = float(np.finfo(wide).eps)
        target, golden = target.astype(wide, copy=False), golden.astype(wide, copy=False)
    zero = golden == 0
    if zero.any():
        target, golden = target.copy(), golden.copy()
        target[zero] += target.dtype.type(eps)
        golden[zero] += golden.dtype.type(eps)
    error = np.subtract(target, golden)
    if error.dtype != wide:
        return np.abs(np.divide(error, golden))
    np.divide(error, golden, out=error)
    return np.abs(error, out=error) if real else np.abs(error)


def _wide(values: Array) -> Array:
    """As float64; of complex numbers both parts one after the other. Always a copy."""
    if values.dtype.kind == "c":
        return np.ascontiguousarray(values).astype(np.complex128).view(np.float64)
    return values.astype(np.float64)


def _largest(values: Array) -> float:
    return max(float(values.max()), -float(values.min())) if values.size else 0.0


def _long(target: Array, golden: Array) -> bool:
    """Integers that float64 cannot hold."""
    return target.dtype.kind in "iub" and golden.dtype.kind in "iub" and max(target.dtype.itemsize, golden.dtype.itemsize) == 8
