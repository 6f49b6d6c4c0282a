"""Two arrays, element by element: the numbers of ``cn`` and ``vc`` of the interactive tool."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.tensors.decoding import Array

_BLOCK = 1 << 20
"""Elements at a time: what is computed on the way takes a few tens of megabytes, however large the arrays are."""

Line = tuple[int, object, object, object]
"""Index, element on the left, on the right, absolute difference."""


class Elements(NamedTuple):
    """Outcome of `compare`.

    Attributes:
        total: elements that were compared; the shorter side counts as filled up with zeros.
        wrong: how many differ by more than ``atol + rtol * abs(right)``. NaN and Inf differ from everything but themselves.
        cosine: cosine similarity in float64; None when a side is all zeros, NaN when it holds NaN or Inf.
        errors, top: the first elements that differ, and the first of all.
        note: what is odd about the two, "" when nothing is.
    """

    total: int
    wrong: int
    cosine: float | None
    errors: list[Line]
    top: list[Line]
    note: str

    @property
    def share(self) -> float:
        """Part of the elements that differ, 0 to 1."""
        return self.wrong / self.total if self.total else 0.0


def compare(target: Array, golden: Array, atol: float = 0.001, rtol: float = 0.001, most: int = 20) -> Elements:
    """Compare two arrays of numbers.

    Args:
        most: how many elements are listed.

    Raises:
        UsageError: an array holds no numbers.
    """
    for array in (target, golden):
        check_numbers(array)
    note = "" if target.shape == golden.shape else f"shapes differ: {list(target.shape)} and {list(golden.shape)}"
    if target.size != golden.size:
        note += "; the shorter one is filled up with zeros"
    sums = np.zeros(3, np.float64)
    wrong = 0
    errors: list[Line] = []
    top: list[Line] = []
    for start, target_block, golden_block in _blocks(target.reshape(-1), golden.reshape(-1)):
        with np.errstate(all="ignore"):
            target_values, golden_values = wide(target_block), wide(golden_block)
            difference = np.abs(target_values - golden_values)
            bad = ~(
                (target_values == golden_values)
                | (difference <= atol + rtol * np.abs(golden_values))
                | (np.isnan(target_values) & np.isnan(golden_values))
            )
            bad |= (np.isinf(target_values) | np.isinf(golden_values)) & (target_values != golden_values)
            sums += (
                np.vdot(target_values, golden_values).real,
                np.vdot(target_values, target_values).real,
                np.vdot(golden_values, golden_values).real,
            )
        wrong += int(bad.sum())
        errors += _lines(np.flatnonzero(bad)[: most - len(errors)], start, target_block, golden_block, difference)
        top += _lines(np.arange(min(most - len(top), len(target_block))), start, target_block, golden_block, difference)
    size = float(np.sqrt(sums[1]) * np.sqrt(sums[2]))
    return Elements(max(target.size, golden.size), wrong, float(sums[0]) / size if size != 0 else None, errors, top, note)


class Row(NamedTuple):
    """Outcome of `summary`, as the columns of the table want it."""

    mean: float
    bench_mean: float
    same: bool
    absolute: float
    relative: float


def summary(target: Array, golden: Array) -> Row:
    """Means, equal bytes, largest absolute error and largest error relative to the right side, in float64; a zero there counts as the
    rounding unit of its type, as in the existing tool.

    Raises:
        UsageError: an array holds no numbers or nothing, or the shapes or types differ.
    """
    for array in (target, golden):
        check_numbers(array)
    if target.shape != golden.shape or target.dtype != golden.dtype:
        raise UsageError(f"{target.dtype} {list(target.shape)} and {golden.dtype} {list(golden.shape)} cannot be compared")
    if not target.size:
        raise UsageError("both are empty")
    unit = float(np.finfo(target.dtype if target.dtype.kind in "fc" else np.float64).eps)
    absolute = relative = 0.0
    for _, target_block, golden_block in _blocks(target.reshape(-1), golden.reshape(-1)):
        with np.errstate(all="ignore"):
            target_values, golden_values = wide(target_block), wide(golden_block)
            difference = np.where(target_values == golden_values, 0.0, np.abs(target_values - golden_values))
            absolute = float(np.maximum(absolute, difference.max()))
            relative = float(np.maximum(relative, (difference / np.where(golden_values == 0, unit, np.abs(golden_values))).max()))
    with np.errstate(all="ignore"):
        mean, bench_mean = (float(wide(array).mean().real) for array in (target, golden))
    return Row(mean, bench_mean, checksum(target) == checksum(golden), absolute, relative)


def checksum(array: Array) -> int:
    """CRC-32 of the bytes in C order: what the existing tool calls md5."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) if array.size else 0


def check_numbers(array: Array) -> None:
    """Raises:
    UsageError: the array holds something else."""
    if array.dtype.kind not in "biufc":
        raise UsageError(f"holds {array.dtype}; only numbers can be shown and compared")


def wide(array: Array) -> npt.NDArray[np.float64] | npt.NDArray[np.complex128]:
    """As float64 or complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _blocks(target: Array, golden: Array) -> Iterator[tuple[int, Array, Array]]:
    for start in range(0, max(len(target), len(golden)), _BLOCK):
        target_block, golden_block = target[start : start + _BLOCK], golden[start : start + _BLOCK]
        size = max(len(target_block), len(golden_block))
        yield start, _pad_with_zeros(target_block, size), _pad_with_zeros(golden_block, size)


def _pad_with_zeros(part: Array, size: int) -> Array:
    return part if len(part) == size else np.concatenate((part, np.zeros(size - len(part), part.dtype)))


def _lines(positions: npt.NDArray[np.intp], start: int, target: Array, golden: Array, difference: Array) -> list[Line]:
    return [(start + int(i), target[i], golden[i], difference[i]) for i in positions]
