"""Parts of boxes, read from their files into memory that has another order or other gaps.

The dimensions of a part are taken in the order of the file. The inner ones that lie close together are a unit, which is read in one go,
small gaps and all; outer ones are loops over units. A unit without gaps goes straight to where it belongs when that memory has none either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.formats.checkpoint.model import Box, Index
from msprobe_engine.formats.tensors.file_reads import Bytes, FileReads, kernel

_NEAR = 2 << 10 if kernel is not None else 16 << 10
"""Bytes between two stretches of a file that are read along instead of a read of its own for each stretch."""


class Piece(NamedTuple):
    """What of a box lies in a block: its place in the block (an index that gives a view), its sizes, and what of the box lies before."""

    box: Box
    inside: tuple[Any, ...]
    sizes: Index
    skip: Index


def read_piece(piece: Piece, to: npt.NDArray[Any], stage: Bytes, reads: FileReads) -> None:
    """Read a part of a box into `to`, which has its sizes and any strides.

    Args:
        stage: memory for what cannot be read where it belongs.

    Raises:
        Unreadable: the file cannot be read.
    """
    width = to.dtype.itemsize
    box = piece.box
    start = box.start + sum(k * s for k, s in zip(piece.skip, box.strides)) * width
    order = sorted((d for d, n in enumerate(piece.sizes) if n != 1), key=lambda d: -box.strides[d])
    sizes, strides = [piece.sizes[d] for d in order], [box.strides[d] * width for d in order]
    # `to` with its dimensions in the order of the file, those of one element dropped
    inside: tuple[Any, ...] = (*(slice(None) if n != 1 else 0 for n in piece.sizes), ...)
    kept: npt.NDArray[Any] = to[inside]
    remaining = [d for d, n in enumerate(piece.sizes) if n != 1]
    view: npt.NDArray[Any] = kept.transpose([remaining.index(d) for d in order])
    if view.flags.c_contiguous and strides == _c_strides(sizes, width):
        reads.read(box.file, start, view.reshape(-1).view(np.uint8))
    else:
        _Gather(piece.box, stage, reads).run(start, sizes, strides, view)


def _c_strides(sizes: Sequence[int], width: int) -> list[int]:
    strides, step = [], width
    for n in reversed(sizes):
        strides.append(step)
        step *= n
    return strides[::-1]


class _Gather:
    def __init__(self, box: Box, stage: Bytes, reads: FileReads) -> None:
        self._file, self._stage, self._reads = box.file, stage, reads

    def run(self, start: int, sizes: list[int], strides: list[int], to: npt.NDArray[Any]) -> None:
        """Read what begins at byte `start`; `sizes` and `strides` (bytes) in the order of the file."""
        width = to.dtype.itemsize
        split, hull = self._unit(sizes, strides, width)
        if split == 0:
            self._read_through_stage(start, hull, 0, 1, sizes, strides, to[None])
            return
        first: tuple[Any, ...] = (*(0,) * split, ...)
        direct = hull == math.prod(sizes[split:]) * width and to[first].flags.c_contiguous
        for outer in np.ndindex(*sizes[: split - 1]):
            at = start + sum(k * s for k, s in zip(outer, strides))
            inside: tuple[Any, ...] = (*outer, ...)
            part = to[inside]
            if direct:
                self._reads.read_runs(self._file, at, hull, strides[split - 1], sizes[split - 1], part, part.strides[0])
            else:
                self._read_through_stage(at, hull, strides[split - 1], sizes[split - 1], sizes[split:], strides[split:], part)

    def _unit(self, sizes: list[int], strides: list[int], width: int) -> tuple[int, int]:
        """The first of the dimensions that are read in one go, and the bytes from their first element to their last."""
        split, hull = len(sizes), width
        while split > 0:
            wider = (sizes[split - 1] - 1) * strides[split - 1] + hull
            if strides[split - 1] - hull > _NEAR or wider > self._stage.size:
                break
            split, hull = split - 1, wider
        return split, hull

    def _read_through_stage(
        self, start: int, hull: int, stride: int, count: int, sizes: list[int], strides: list[int], to: npt.NDArray[Any]
    ) -> None:
        """`count` units, as many at a time as the stage holds, and from there to their places."""
        width = to.dtype.itemsize
        step = -(-hull // width) * width
        each = max(1, self._stage.size // step)
        for first in range(0, count, each):
            n = min(each, count - first)
            self._reads.read_runs(self._file, start + first * stride, hull, stride, n, self._stage, step)
            _copy(np.ndarray([n, *sizes], to.dtype, self._stage.data, 0, [step, *strides]), to[first : first + n])


def _copy(source: npt.NDArray[Any], to: npt.NDArray[Any]) -> None:
    """``to[...] = source``; a transposition by tiles."""
    kept = [d for d, n in enumerate(to.shape) if n != 1]
    width = to.itemsize
    if kernel is not None and len(kept) == 2 and width <= 8:
        (rows, columns), (a, b), (c, d) = ([of[k] for k in kept] for of in (to.shape, source.strides, to.strides))
        if b == width == c and a % width == d % width == 0:
            kernel.turn(source.ctypes.data, a // width, to.ctypes.data, d // width, rows, columns, width)
            return
    to[...] = source
