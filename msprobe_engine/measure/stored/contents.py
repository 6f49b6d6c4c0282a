"""Looks into stored tensors beyond a comparison element by element: are these two the same bits, which rows are which, one element.

For hints only: bounded in what is read, and anything that cannot be read is no hint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from msprobe_engine.formats.checkpoint.blocks import Block, Boxes, Room, blocks_of, fill
from msprobe_engine.formats.checkpoint.cuts import width_of
from msprobe_engine.formats.checkpoint.model import StoredTensor
from msprobe_engine.formats.tensors.decoding import decoder
from msprobe_engine.formats.tensors.file_reads import FileReads
from msprobe_engine.measure.stored.tensors import Array

_BLOCK_BYTES = 1 << 20
_FIRST_BYTES = 16 << 10
"""Of the block that is looked at first: two tensors that are not the same mostly differ there."""


class Contents:
    """Reads tensors one block at a time.

    Args:
        budget: bytes that may be read in all; from then on every answer is "unknown".
    """

    def __init__(self, budget: int = 4 << 30) -> None:
        self._reads = FileReads()
        self._rooms = [Room(4 * _BLOCK_BYTES), Room(4 * _BLOCK_BYTES)]
        self._budget = budget

    @property
    def spent(self) -> bool:
        """Whether the budget is used up."""
        return self._reads.nbytes >= self._budget

    def same(self, target: StoredTensor, golden: StoredTensor) -> bool:
        """Whether two tensors of one shape and dtype hold the same bits; False too where that cannot be told."""
        if target.shape != golden.shape or target.dtype != golden.dtype or not (_complete(target) and _complete(golden)):
            return False
        boxes = Boxes(target.boxes), Boxes(golden.boxes)
        for block in self._blocks(target, golden):
            if self.spent:
                return False
            target_words, golden_words = (fill(side, block, target.dtype, room, self._reads)[0] for side, room in zip(boxes, self._rooms))
            if not np.array_equal(target_words, golden_words):
                return False
        return True

    def _blocks(self, target: StoredTensor, golden: StoredTensor) -> Iterator[Block]:
        width = width_of(target)
        yield from _some(blocks_of(target.shape, max(1, _FIRST_BYTES // width), (target, golden)), 1)
        yield from blocks_of(target.shape, max(1, _BLOCK_BYTES // width), (target, golden))

    def row_digests(self, tensor: StoredTensor) -> list[bytes]:
        """A digest of each slice of dimension 0, in their order; [] where that cannot be told."""
        n = tensor.shape[0] if tensor.shape else 0
        width = width_of(tensor)
        per_row = math.prod(tensor.shape[1:]) * width
        if not n or not per_row or not _complete(tensor):
            return []
        boxes, all_digests = Boxes(tensor.boxes), []
        step = max(1, _BLOCK_BYTES // per_row)
        for first_row in range(0, n, step):
            if self.spent:
                return []
            count = min(step, n - first_row)
            digests = [hashlib.blake2b(digest_size=16) for _ in range(count)]
            for block in blocks_of((count, *tensor.shape[1:]), max(1, _BLOCK_BYTES // width), ()):
                block_of_tensor = Block((block.offsets[0] + first_row, *block.offsets[1:]), block.sizes)
                words = fill(boxes, block_of_tensor, tensor.dtype, self._rooms[0], self._reads)[0]
                for i in range(block.sizes[0]):
                    digests[block.offsets[0] + i].update(np.ascontiguousarray(words[i]).tobytes())
            all_digests += [digest.digest() for digest in digests]
        return all_digests

    def digest_beginning(self, tensor: StoredTensor) -> bytes:
        """A digest of the first elements, the same for every layout; empty where that cannot be told."""
        if not tensor.numel or not _complete(tensor) or self.spent:
            return b""
        block = next(iter(blocks_of(tensor.shape, max(1, _FIRST_BYTES // width_of(tensor)))))
        words = fill(Boxes(tensor.boxes), block, tensor.dtype, self._rooms[0], self._reads)[0]
        return hashlib.blake2b(np.ascontiguousarray(words).tobytes(), digest_size=16).digest()

    def words(self, tensor: StoredTensor, block: Block) -> Array:
        """Elements as words of their size, [block.sizes]; a copy."""
        words: Array = fill(Boxes(tensor.boxes), block, tensor.dtype, self._rooms[0], self._reads)[0].copy()
        return words

    def sample(self, tensor: StoredTensor, most: int = 1 << 14) -> Array:
        """The first elements, as values (float8 and bfloat16 as float32); empty where the dtype has no values."""
        known = decoder(tensor.dtype)
        if known is None or not tensor.numel:
            return np.empty(0, np.float32)
        words = self.words(tensor, next(iter(blocks_of(tensor.shape, most, (tensor,))))).view(np.dtype(known.words))
        return words if known.values is None else known.values(words)


def _complete(tensor: StoredTensor) -> bool:
    return sum(box.numel for box in tensor.boxes) == tensor.numel


def _some(blocks: Iterator[Block], count: int) -> Iterator[Block]:
    for _, block in zip(range(count), blocks):
        yield block
