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
        bad_left, bad_right: NaN and Inf in n and in b.
        apart: elements that are NaN or Inf on one side only, or not of the same kind on both; they count in nothing below.
        dot, left, right, difference: sums of n*b, n*n, b*b, (n-b)*(n-b).
        worst: largest ``|n - b|``; at: its place in C order; values: n and b there.
        top: largest ``|b|`` and ``|n|``.
        relative: largest relative error; thousandth, five: elements with one below 0.001 and 0.005.
        rest_difference, rest: sums of (n-b)*(n-b) and b*b over elements below half of `top`, where a mask's constant is the top.
    """

    size: int = 0
    bad_left: int = 0
    bad_right: int = 0
    apart: int = 0
    dot: float = 0.0
    left: float = 0.0
    right: float = 0.0
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
        scale = math.sqrt(self.left) * math.sqrt(self.right)
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
        norm = max(self.left, self.right)
        by_norm = math.sqrt(self.difference / norm) if norm else 0.0
        return max(by_norm, self.worst / self.top if self.top else math.inf)


class TensorDiff:
    """Takes the figures of two tensors of equal size.

    Args:
        rule: `OLD`, `NEW` or None for ours.
    """

    def __init__(self, left: Readable, right: Readable, rule: str | None) -> None:
        self._sides = left, right
        self._rule = rule
        self.figures = Figures(left.size)

    def run(self) -> Figures:
        """One pass; a second one over elements below a mask's constant, if there is one and something differs.

        Raises:
            DumpFormatError: a file ends before its tensor does.
        """
        size = self.figures.size
        whole = self._rule is not None and size <= _WHOLE
        for begin in range(0, size, size if whole else _READ):
            x, y = self._read_pair(begin, min(size if whole else _READ, size - begin))
            step = size if whole else BLOCK
            for start in range(0, len(x), step):
                self._block(x[start : start + step], y[start : start + step], begin + start)
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
        x, y = (side.read(start, count, memory) for side, memory in zip(self._sides, memories))
        if self._rule:
            x, y = (side.real.astype(np.float64) if side.dtype.kind == "c" else side for side in (x, y))
        elif (x.dtype.kind == "c") != (y.dtype.kind == "c"):
            x, y = x.astype(np.complex128), y.astype(np.complex128)
        return x, y

    def _block(self, x: Array, y: Array, start: int) -> None:
        f = self.figures
        with np.errstate(all="ignore"):
            a, b = _wide(x), _wide(y)
            left, right = float(a.dot(a)), float(b.dot(b))
            if not math.isfinite(left + right):
                x, y = self._without_bad(x, y)
                a, b = _wide(x), _wide(y)
                left, right = float(a.dot(a)), float(b.dot(b))
            f.left += left
            f.right += right
            f.dot += float(a.dot(b))
            f.top = max(f.top, _largest(a), _largest(b))
            np.subtract(a, b, out=a)
            difference = float(a.dot(a))
            f.difference += difference
            if difference or _long(x, y) or a.any():
                self._errors(x, y, a, start)
            elif self._rule == OLD:
                self._relative(x, y)  # 0 / 0 in float16, which has no 2.2e-16
            else:
                f.thousandth += len(x)
                f.five += len(x)

    def _errors(self, x: Array, y: Array, difference: Array, start: int) -> None:
        f = self.figures
        if x.dtype.kind == "c" or y.dtype.kind == "c":
            size = np.abs(x - y).astype(np.float64)
        elif self._rule is None and _long(x, y):
            size = np.abs(x.astype(np.longdouble) - y.astype(np.longdouble)).astype(np.float64)
        else:
            size = np.abs(difference, out=difference)
        worst = float(size.max())
        if worst > f.worst:
            at = int(size.argmax())
            f.worst, f.at, f.values = worst, start + at, (x[at].item(), y[at].item())
        self._relative(x, y)

    def _relative(self, x: Array, y: Array) -> None:
        f = self.figures
        error = relative_error(x, y, self._rule)
        worst = float(error.max())
        if worst > f.relative or worst != worst:
            f.relative = worst
        f.thousandth += int(np.count_nonzero(error < 0.001))
        f.five += int(np.count_nonzero(error < 0.005))

    def _without_bad(self, x: Array, y: Array) -> tuple[Array, Array]:
        """NaN and Inf become 0 on both sides; where only one side has them, or not the same, the elements are counted as apart."""
        f = self.figures
        bad_x, bad_y = ~np.isfinite(x), ~np.isfinite(y)
        both = bad_x | bad_y
        if not both.any():
            return x, y  # squares of float64 that are too large
        f.bad_left += int(np.count_nonzero(bad_x))
        f.bad_right += int(np.count_nonzero(bad_y))
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        same = (bad_x == bad_y) & (nan_x == nan_y)
        if self._rule is None:
            same &= nan_x | ~both | (x == y)
        f.apart += int(len(x) - np.count_nonzero(same))
        return np.where(both, x.dtype.type(0), x), np.where(both, y.dtype.type(0), y)

    def _below(self, limit: float) -> None:
        f = self.figures
        for start in range(0, f.size, _READ):
            x, y = self._read_pair(start, min(_READ, f.size - start))
            with np.errstate(all="ignore"):
                keep = (np.abs(x) < limit) & (np.abs(y) < limit)
                a, b = _wide(x[keep]), _wide(y[keep])
                f.rest += float(b.dot(b))
                np.subtract(a, b, out=a)
                f.rest_difference += float(a.dot(a))


def relative_error(x: Array, y: Array, rule: str | None) -> Array:
    """Relative error of each element; see the rules of this module."""
    real = x.dtype.kind != "c" and y.dtype.kind != "c"
    if rule == OLD:
        if y.dtype.kind != "f":
            x, y = x.astype(np.float64), y.astype(np.float64)
        eps = float(np.finfo(np.float64).eps)
        wide = np.result_type(x, y)
    else:
        assert rule in (NEW, None)
        if real:
            x = x if x.dtype.kind == "f" else x.astype(np.float64)
            y = y if y.dtype.kind == "f" else y.astype(np.float64)
        wide = np.result_type(x, y, np.float32)
        eps = float(np.finfo(wide).eps)
        x, y = x.astype(wide, copy=False), y.astype(wide, copy=False)
    zero = y == 0
    if zero.any():
        x, y = x.copy(), y.copy()
        x[zero] += x.dtype.type(eps)
        y[zero] += y.dtype.type(eps)
    error = np.subtract(x, y)
    if error.dtype != wide:
        return np.abs(np.divide(error, y))
    np.divide(error, y, out=error)
    return np.abs(error, out=error) if real else np.abs(error)


def _wide(x: Array) -> Array:
    """As float64; of complex numbers both parts one after the other. Always a copy."""
    if x.dtype.kind == "c":
        return np.ascontiguousarray(x).astype(np.complex128).view(np.float64)
    return x.astype(np.float64)


def _largest(a: Array) -> float:
    return max(float(a.max()), -float(a.min())) if a.size else 0.0


def _long(x: Array, y: Array) -> bool:
    """Integers that float64 cannot hold."""
    return x.dtype.kind in "iub" and y.dtype.kind in "iub" and max(x.dtype.itemsize, y.dtype.itemsize) == 8
