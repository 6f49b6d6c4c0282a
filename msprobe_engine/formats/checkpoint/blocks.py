"""Blocks of tensors, put together from the boxes that lie in files.

Two tensors are walked in the same blocks, whatever way each was cut: a block is a slab of the whole tensor, small enough for a buffer that
is used again and again. Slabs are chosen so that they are stretches of the files on both sides; where the sides have their dimensions in
another order (a transposed weight) they are tiles, whose edges are long on both. So every byte of a file is read once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.formats.checkpoint.model import Box, Index, StoredTensor
from msprobe_engine.formats.checkpoint.strided_reads import Piece, read_piece
from msprobe_engine.formats.tensors.decoding import word_type
from msprobe_engine.formats.tensors.file_reads import FileReads, Unreadable, buffer

_MANY = 32
"""From so many boxes on numpy looks for those of a block."""


class Block(NamedTuple):
    """A slab of a tensor: index of its first element, elements per dimension."""

    offsets: Index
    sizes: Index

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def place_of(self, position: int) -> Index:
        """Of element `position` of the block, in C order: its index in the whole tensor."""
        inside = np.unravel_index(position, self.sizes) if self.sizes else ()
        return tuple(int(o + i) for o, i in zip(self.offsets, inside))


def width_of(tensor: StoredTensor) -> int:
    """Bytes of an element.

    Raises:
        Unreadable: the element type is unknown.
    """
    size = item_size(tensor.dtype)
    if size is None:
        raise Unreadable(f"{tensor.key}: elements of type {tensor.dtype!r} are not known here")
    return size


def blocks_of(shape: Sequence[int], most: int, tensors: Sequence[StoredTensor] = ()) -> Iterator[Block]:
    """Cut a tensor into blocks of at most `most` elements, in the order of the first tensor's files.

    Args:
        shape: of the whole.
        tensors: what will be read in these blocks; their strides decide where to cut.
    """
    sizes = list(shape)
    if math.prod(sizes) == 0:
        return
    order = _outer_first(sizes, tensors)
    runs = {d for t in tensors for box in t.boxes[:1] for d in range(len(sizes)) if box.strides[d] == 1 and sizes[d] > 1}
    edges = list(sizes)
    if len(runs) > 1:  # the sides have their dimensions in another order: tiles
        for d in order:
            if d not in runs:
                edges[d] = max(1, min(edges[d], most // max(1, math.prod(edges) // edges[d])))
        while math.prod(edges) > most:
            longest = max(range(len(edges)), key=edges.__getitem__)
            edges[longest] = -(-edges[longest] // 2)
    else:
        for d in order:
            rest = math.prod(edges) // edges[d]
            edges[d] = max(1, min(edges[d], most // rest))
            if rest <= most:
                break
    yield from _grid(sizes, edges, order)


def _outer_first(sizes: Sequence[int], tensors: Sequence[StoredTensor]) -> list[int]:
    """Dimensions, the one with the longest strides first. That of the first tensor's first box is the order of the files."""
    for tensor in tensors:
        if tensor.boxes:
            strides = tensor.boxes[0].strides
            return sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    return list(range(len(sizes)))


def _grid(sizes: Sequence[int], edges: Sequence[int], order: Sequence[int]) -> Iterator[Block]:
    counts = [-(-sizes[d] // edges[d]) for d in order]
    for place in np.ndindex(*counts):
        first = [0] * len(sizes)
        for d, k in zip(order, place):
            first[d] = k * edges[d]
        yield Block(tuple(first), tuple(min(edge, n - at) for edge, n, at in zip(edges, sizes, first)))


class Boxes:
    """Boxes of a tensor, to be asked which of them a block has parts of."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = sorted(boxes, key=lambda box: box.offsets)
        self._firsts = [box.offsets[0] if box.offsets else 0 for box in self._boxes]
        self._longest = max((box.sizes[0] for box in self._boxes if box.sizes), default=1)
        many = len(self._boxes) > _MANY
        self._low = np.array([box.offsets for box in self._boxes], np.int64) if many else None
        self._high = self._low + np.array([box.sizes for box in self._boxes], np.int64) if self._low is not None else None

    def __len__(self) -> int:
        return len(self._boxes)

    def pieces(self, block: Block) -> Iterator[Piece]:
        """The parts of boxes that lie in `block`."""
        if not block.sizes:
            for box in self._boxes:
                yield Piece(box, (...,), (), ())
            return
        first = bisect.bisect_right(self._firsts, block.offsets[0] - self._longest)
        last = bisect.bisect_left(self._firsts, block.offsets[0] + block.sizes[0])
        for box in self._near(first, last, block):
            low = [max(box_begin, begin) for box_begin, begin in zip(box.offsets, block.offsets)]
            high = [
                min(box_begin + box_size, begin + size)
                for box_begin, box_size, begin, size in zip(box.offsets, box.sizes, block.offsets, block.sizes)
            ]
            if any(high_end <= low_end for high_end, low_end in zip(high, low)):
                continue
            inside = (*(slice(low_end - begin, high_end - begin) for low_end, high_end, begin in zip(low, high, block.offsets)), ...)
            yield Piece(
                box,
                inside,
                tuple(high_end - low_end for low_end, high_end in zip(low, high)),
                tuple(low_end - box_begin for low_end, box_begin in zip(low, box.offsets)),
            )

    def _near(self, first: int, last: int, block: Block) -> list[Box]:
        if self._low is None or self._high is None or last - first <= _MANY:
            return self._boxes[first:last]
        begin = np.array(block.offsets)
        hit = (self._low[first:last] < begin + np.array(block.sizes)) & (self._high[first:last] > begin)
        return [self._boxes[first + int(i)] for i in np.flatnonzero(hit.all(axis=1))]


class Room:
    """Memory of one thread for blocks of one side: where a block is put together, and where stretches of files go that have gaps."""

    def __init__(self, nbytes: int) -> None:
        self.block = buffer(nbytes)
        self.stage = buffer(nbytes)


def fill(boxes: Boxes, block: Block, dtype: str, room: Room, reads: FileReads) -> tuple[npt.NDArray[Any], list[Piece]]:
    """Read a block of a tensor.

    Returns:
        the block, [block.sizes] of `word_type(dtype)`, in `room.block`, and the pieces it was made of. Elements that no box covers are 0.

    Raises:
        Unreadable: a file cannot be read.
    """
    words = word_type(dtype)
    to = room.block[: block.numel * words.itemsize].view(words).reshape(block.sizes)
    pieces = list(boxes.pieces(block))
    if sum(math.prod(piece.sizes) for piece in pieces) < block.numel:
        to.fill(0)
    for piece in pieces:
        read_piece(piece, to[piece.inside], room.stage, reads)
    return to, pieces
