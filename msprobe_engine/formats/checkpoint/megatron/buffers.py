"""Where parameters lie in the flat buffers of Megatron's distributed optimizer.

A buffer takes the parameters of a model chunk from the last to the first; each begins at a multiple of 64 elements; a buffer is divided
into buckets, and what fills a bucket up for the data-parallel ranks is not saved. Source: ``_ParamAndGradBuffer.__init__`` (megatron-core
0.16.1, core/distributed/param_and_grad_buffer.py), ``get_parameter_state_dp_zero`` (core/optimizer/distrib_optimizer.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

ALIGNMENT = 64
"""Elements; Megatron before core 0.6 had none."""


class Place(NamedTuple):
    """Where a parameter begins: the bucket and the element in it."""

    bucket: int
    start: int


class Layout(NamedTuple):
    """Places of the parameters of a buffer, in the buffer's order, and the size of each bucket."""

    places: list[Place]
    sizes: list[int]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def starts(self) -> list[int]:
        """First elements in the buckets put one behind the other, as legacy checkpoints have them."""
        return [sum(self.sizes[: place.bucket]) + place.start for place in self.places]


def _align_up(number: int, to: int) -> int:
    return -(-number // to) * to


def laid_out(numels: Sequence[int], alone: Collection[int] = (), bucket_size: int | None = None, alignment: int = ALIGNMENT) -> Layout:
    """The layout that Megatron gives to parameters.

    Args:
        numels: elements of each parameter, in the buffer's order (the model's from the end).
        alone: indices of parameters with a bucket of their own (embeddings shared by the first and the last stage).
        bucket_size: a bucket that has as many elements is closed; None: one bucket.
        alignment: of the first element of a parameter.
    """
    places: list[Place] = []
    sizes: list[int] = []
    at = 0
    begun = False
    for i, numel in enumerate(numels):
        at = _align_up(at, alignment)
        if i in alone and begun:
            sizes.append(at)
            at = 0
        places.append(Place(len(sizes), at))
        at += numel
        begun = True
        if i in alone or (bucket_size is not None and at >= bucket_size):
            sizes.append(at)
            at, begun = 0, False
    if begun:
        sizes.append(at)
    return Layout(places, sizes)


def fit_buckets(numels: Sequence[int], sizes: Sequence[int]) -> Layout | None:
    """The layout of parameters in buckets whose sizes are known; None: they do not fit.

    Args:
        numels: elements of each parameter, in the buffer's order.
        sizes: of the buckets, without what fills them up.
    """
    places: list[Place] = []
    bucket = at = 0
    for numel in numels:
        at = _align_up(at, ALIGNMENT)
        if bucket < len(sizes) and at == sizes[bucket] and at:  # closed before this parameter, which has a bucket of its own
            bucket, at = bucket + 1, 0
        if bucket == len(sizes) or at + numel > sizes[bucket]:
            return None
        places.append(Place(bucket, at))
        at += numel
        if at == sizes[bucket]:
            bucket, at = bucket + 1, 0
    return Layout(places, list(sizes)) if bucket == len(sizes) and at == 0 else None


def find_layout(numels: Sequence[int], total: int, alone: Collection[int], bucket_sizes: Sequence[int | None]) -> Layout | None:
    """The layout whose buckets have `total` elements together; None: none of the known ones has.

    Args:
        numels: elements of each parameter, in the buffer's order.
        total: elements of all buckets.
        alone: indices of parameters that may have a bucket of their own.
        bucket_sizes: to be tried, in this order.
    """
    for alignment in (ALIGNMENT, 1):
        for own in (alone, ()):
            for size in bucket_sizes:
                layout = laid_out(numels, own, size, alignment)
                if layout.total == total:
                    return layout
    return None
