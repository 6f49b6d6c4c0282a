"""Where the elements of parameters lie in the flat partitions of DeepSpeed's ZeRO.

Stages 1 and 2 (``deepspeed/runtime/zero/stage_1_and_2.py``, ``bf16_optimizer.py``): the parameters of a group lie one behind the other in
one flat vector, each with some padding behind it; the vector is cut into equal partitions, one per rank; what fills up the last ones may
have been left out of the file. Stage 3 (``stage3.py``): each parameter is cut by itself into equal pieces, and a rank's vector has its
pieces one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.formats.checkpoint.model import Box, Index, flat
from msprobe_engine.formats.tensors.torch_pickle import FileTensor


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter in a flat vector.

    Attributes:
        at: elements before it: of the whole group (stages 1 and 2), of a rank's vector (stage 3).
    """

    name: str
    shape: Index
    at: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def in_a_row(shapes: Mapping[str, Index], paddings: Sequence[int] = ()) -> tuple[list[Slot], int]:
    """The parameters of a group one behind the other, and the elements they take together.

    Args:
        shapes: in their order in the flat vector.
        paddings: elements behind each parameter; none where it ends.
    """
    slots, at = [], 0
    for number, (name, shape) in enumerate(shapes.items()):
        slots.append(Slot(name, shape, at))
        at += math.prod(shape) + (paddings[number] if number < len(paddings) else 0)
    return slots, at


def share(numel: int, ranks: int) -> int:
    """Elements of a parameter that a rank of stage 3 has, padding at the end counted."""
    return -(-numel // ranks)


def in_pieces(shapes: Mapping[str, Index], ranks: int) -> tuple[list[Slot], int]:
    """The pieces of a group's parameters in the vector of each rank of stage 3, and the length of that vector."""
    slots, at = [], 0
    for name, shape in shapes.items():
        slots.append(Slot(name, shape, at))
        at += share(math.prod(shape), ranks)
    return slots, at


def partition_size(lengths: Mapping[int, int], paddings: Mapping[int, int]) -> int | None:
    """Elements of each partition of a flat vector.

    Args:
        lengths: of what the ranks' files have, by rank.
        paddings: elements at the end of the vector that only fill it up, by the rank that counts them; they may have been left out of its
            file, and there can be more of them than a partition has.

    Returns:
        None: the files do not belong together.
    """
    whole = {length for rank, length in lengths.items() if not paddings.get(rank)}
    if not whole:  # the last rank's file alone is there
        whole = {length + paddings[rank] for rank, length in lengths.items()}
    size = max(whole)
    fit = all(length in (size, max(0, size - paddings.get(rank, 0))) for rank, length in lengths.items())
    return size if len(whole) == 1 and fit else None


def of_partitions(slot: Slot, parts: Mapping[int, FileTensor], size: int) -> tuple[Box, ...]:
    """A parameter of stages 1 and 2: where its elements lie in the partitions that are there.

    Args:
        slot: its place in the flat vector.
        parts: what the ranks' files have, by rank; shorter than `size` where padding was left out.
        size: elements of a partition.
    """
    boxes: list[Box] = []
    end = slot.at + slot.numel
    for rank in range(slot.at // size, -(-end // size)) if size else ():
        part = parts.get(rank)
        if part is None:
            continue
        low, high = max(slot.at, rank * size), min(end, rank * size + part.numel)
        if low < high:
            boxes += _stretch(slot, low - slot.at, high - low, part, low - rank * size)
    return tuple(boxes)


def of_pieces(slot: Slot, parts: Mapping[int, FileTensor], ranks: int) -> tuple[Box, ...]:
    """A parameter of stage 3: where its elements lie in the vectors of the ranks that are there."""
    one, boxes = share(slot.numel, ranks), list[Box]()
    for rank, part in sorted(parts.items()):
        first = rank * one
        count = min(one, slot.numel - first, part.numel - slot.at)
        if count > 0:
            boxes += _stretch(slot, first, count, part, slot.at)
    return tuple(boxes)


def _stretch(slot: Slot, first: int, count: int, part: FileTensor, at: int) -> list[Box]:
    width = item_size(part.dtype) or 1
    return flat(slot.shape, first, count, part.file, part.start + at * width, width)
