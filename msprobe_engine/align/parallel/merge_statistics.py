"""The statistics of a whole from those of its pieces.

* Max and Min are those of the piece that has the largest and the smallest element
* Mean is weighted by the number of elements, Norm the root of the sum of squares
* counts of NaN and Inf add up

A sum whose terms lie on several ranks (the output of a row-parallel product before its reduction, a gradient before it is averaged) has
no such rule but for its mean, which is the sum of the means.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SAME = 1e-6
"""Replicas hold the same numbers; a collective that sums in another order on each rank moves a last bit of a float32."""

AGREES = 1e-3
"""Closer than this a replica is taken for the right one when replicas disagree."""

NEAR = 1e-5
"""The same, of single numbers."""

_ROUNDING = 2.0**-46
"""Adding up pieces in float64 moves the last bits; integers must stay equal."""


def whole_shape(target: Any, golden: Any) -> list[int] | None:
    """The smallest shape that two shapes are pieces of; None when they are no pieces of one tensor.

    >>> whole_shape([4, 16, 48], [2, 16, 96])
    [4, 16, 96]
    """
    if not (isinstance(target, list) and isinstance(golden, list)) or len(target) != len(golden):
        return None
    shape = []
    for target_size, golden_size in zip(target, golden):
        if not (isinstance(target_size, int) and isinstance(golden_size, int)):
            return None
        large, small = max(target_size, golden_size), min(target_size, golden_size)
        if large != small and (small == 0 or large % small):
            return None
        shape.append(large)
    return shape


def times(shape: Sequence[int], target_shape: Sequence[int], golden_shape: Sequence[int], n: int) -> list[int]:
    """A shape with `n` times as much in the dimension in which two others differ, or in the first one."""
    dimension = next((d for d, (target_size, golden_size) in enumerate(zip(target_shape, golden_shape)) if target_size != golden_size), 0)
    return [size * n if d == dimension else size for d, size in enumerate(shape)]


def is_padded(target: Any, golden: Any, pieces: int) -> bool:
    """One dimension of the first, times at most `pieces`, is a bit more than the whole of the second, or a bit less: one of the two is
    filled up to a round number. In other dimensions one may be a piece of the other."""
    if not (isinstance(target, list) and isinstance(golden, list)) or len(target) != len(golden):
        return False
    unequal = [
        (target_size, golden_size)
        for target_size, golden_size in zip(target, golden)
        if target_size != golden_size
        and not (min(target_size, golden_size) > 0 and max(target_size, golden_size) % min(target_size, golden_size) == 0)
    ]
    if len(unequal) != 1:
        return False
    target_size, golden_size = unequal[0]
    return any(
        golden_size < target_size * n <= golden_size + max(1024, golden_size // 8) or target_size < golden_size <= target_size * n
        for n in range(1, pieces + 1)
    )


def fills_up(target: Any, golden: Any) -> bool:
    """Two matrices that differ in their rows alone, one of them a bit longer: a vocabulary filled up to a round number."""
    if not (isinstance(target, list) and isinstance(golden, list) and len(target) == len(golden) == 2 and target[1] == golden[1]):
        return False
    large, small = max(target[0], golden[0]), min(target[0], golden[0])
    return bool(0 < small < large <= small + max(1024, small // 8))


def count_pieces(shape: Sequence[int], whole: Sequence[int]) -> int:
    """How many pieces of a shape make the whole."""
    return math.prod(w // s for s, w in zip(shape, whole) if s)


def merge_pieces(stats: Floats) -> Floats:
    """float64 (pieces, 4) of Max, Min, Mean, Norm of pieces of one size -> those four of the whole."""
    with np.errstate(all="ignore"):
        return np.array((stats[:, 0].max(), stats[:, 1].min(), stats[:, 2].mean(), np.sqrt(np.square(stats[:, 3]).sum())))


def close(target: Floats, golden: Floats, tolerance: float = SAME) -> bool:
    """Two rows of statistics say the same; what neither of them has (the mean of a mask) does not count."""
    if np.array_equal(target, golden, equal_nan=True):
        return True
    with np.errstate(all="ignore"):
        scale = np.array(
            (max(abs(target[0]), abs(target[1]), abs(golden[0]), abs(golden[1])),) * 3 + (max(abs(target[3]), abs(golden[3])),)
        )
        near = np.abs(target - golden) <= tolerance * scale
    return bool((near | (np.isnan(target) & np.isnan(golden))).all())


def are_unlike(pieces: Floats) -> bool:
    """There are several pieces, and no two of them say the same."""
    ordered = pieces[np.argsort(pieces[:, 3], kind="stable")]
    return len(pieces) > 1 and not any(close(one, other) for one, other in pairwise(ordered))


def distance(value: Floats, golden: Floats) -> float:
    """Relative; of extremes and norm."""
    with np.errstate(all="ignore"):
        top = max(abs(value[0]), abs(value[1]), abs(golden[0]), abs(golden[1]))
        far = max(abs(value[0] - golden[0]), abs(value[1] - golden[1])) / top if top else 0.0
        norm = max(value[3], golden[3])
        without_norm = np.isnan(value[3]) and np.isnan(golden[3]) and far == far  # masks have extremes only
        result = max(far, abs(value[3] - golden[3]) / norm if norm and not without_norm else 0.0)
    return float(result) if result == result else float("inf")


def groupings(pieces: int, need: int) -> Iterator[list[list[int]]]:
    """Ways in which pieces, by rank and micro batch, make `pieces / need` replicas of one whole.

    The places of a replica's pieces are a number of several digits; the digit that tells replicas apart may be the last one
    (neighbours), the first one (far away), or one in between; or there are two of them, around that of the pieces (data-parallel ranks of
    tensor-parallel ones with several micro batches each).
    """
    copies = pieces // need
    for inner in divisors(copies)[1:-1] if need > 1 else ():
        replicas = [(outer, last) for outer in range(copies // inner) for last in range(inner)]
        yield [[(outer * need + i) * inner + last for i in range(need)] for outer, last in replicas]
    for low in divisors(need) if copies > 1 else [1]:
        yield [[(i * copies + replica) * low + j for i in range(need // low) for j in range(low)] for replica in range(copies)]


def divisors(n: int) -> list[int]:
    """Ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def wholes(pieces: Floats, need: int) -> Iterator[tuple[list[list[int]], list[Floats]]]:
    """Each grouping, and the whole of each of its replicas."""
    for grouping in groupings(len(pieces), need):
        yield grouping, [merge_pieces(pieces[members]) if need > 1 else pieces[members[0]] for members in grouping]


def merge_replicas(pieces: Floats, need: int) -> Floats | None:
    """The whole, when all its replicas say the same."""
    if not len(pieces) or not need or len(pieces) % need:
        return None
    for _, made in wholes(pieces, need):
        if all(close(made[0], replica) for replica in made[1:]):
            return made[0]
    return None


def odd_one(pieces: Floats, need: int, golden: Floats, factor: float, agrees: float) -> tuple[Floats | None, int]:
    """The replica that is off while another agrees with the golden side, and the place of one of its pieces; (None, 0) when none agrees."""
    for grouping, made in wholes(pieces, need):
        far = [min(distance(replica, golden), distance(replica / factor, golden)) for replica in made]
        if min(far) <= agrees:
            worst = int(np.argmax(far))
            return made[worst], grouping[worst][0]
    return None, 0


def farthest(pieces: Floats, need: int, golden: Floats) -> Floats:
    """Of all wholes that can be made, the one that is most unlike the golden side."""
    return max((whole for _, made in wholes(pieces, need) for whole in made), key=lambda whole: distance(whole, golden))


def _of_one(number: float) -> Floats:
    """Statistics of a single number."""
    return np.append(np.full(3, number), abs(number))


def number_of(pieces: Floats, golden: Floats, agrees: float) -> Floats | None:
    """What one number per piece makes, whichever is nearest to the golden side's: sum, mean, largest, smallest, or root of the sum of
    squares. None: none is near."""
    numbers = pieces[:, 2]
    totals = (numbers.sum(), numbers.mean(), numbers.max(), numbers.min(), np.sqrt(np.square(numbers).sum()))
    nearest = min(map(_of_one, totals), key=lambda value: distance(value, golden))
    return nearest if distance(nearest, golden) <= agrees else None


def zeros_elsewhere(pieces: Floats, golden: Floats, agrees: float) -> Floats | None:
    """The sum of tensors each of which is zero where another one is not, as gradients of pieces that every rank has cut from the same
    tensor. None: it is not what the golden side has."""
    for count in divisors(len(pieces))[1:]:
        for grouping in groupings(len(pieces), count):
            made = [merge_pieces(pieces[members]) for members in grouping]
            for whole, members in zip(made, grouping):
                whole[2] = pieces[members, 2].sum()
            if all(distance(whole, golden) <= agrees for whole in made):
                return made[0]
    return None


def mean_of(pieces: Floats, times: int = 1) -> Floats:
    """Mean of one number per piece, `times` over: the sum of that many shares."""
    return _of_one(pieces[:, 2].mean() * times)


def mean_or_sum(pieces: Floats, golden: Floats) -> Floats:
    """Mean or sum of one number per piece, whichever is nearer to the golden side's."""
    return min((mean_of(pieces), mean_of(pieces, len(pieces))), key=lambda made: distance(made, golden))


def shares(target: Floats, golden: Floats, near: float) -> tuple[int, int]:
    """How many shares of one number per piece make that of the whole, on either side: (1, 1) where the means are the same, or where no
    numbers of shares bring the sides together."""
    choices = [(m, n) for m in divisors(len(target)) for n in divisors(len(golden)) if 1 in (m, n)]
    distances = {choice: distance(mean_of(target, choice[0]), mean_of(golden, choice[1])) for choice in choices}
    best = min(choices, key=lambda choice: (distances[choice] > near, choice))
    return best if distances[best] <= near else (1, 1)


def may_be_means(target: Floats, golden: Floats) -> bool:
    """One number per piece on both sides, as a loss per token over unlike numbers of tokens: that of the whole lies between those of its
    pieces, so that the sides can be of one whole where they overlap."""
    target_means, golden_means = target[:, 2], golden[:, 2]
    slack = SAME * max(np.abs(target_means).max(), np.abs(golden_means).max())
    return bool(target_means.min() <= golden_means.max() + slack and golden_means.min() <= target_means.max() + slack)


class Cut(NamedTuple):
    """How the pieces of one row of both sides make the same whole.

    Attributes:
        shape: of the whole.
        need, other: pieces of the target, and of the golden side, that make it.
        value, golden: statistics of the whole; None when the replicas of that side do not agree.
        times: of the smallest shape that both sides are pieces of.
        sure: the golden side's replicas agree, or there is nothing to choose.
    """

    shape: list[int]
    need: int
    other: int
    value: Floats | None
    golden: Floats | None
    times: int = 1
    sure: bool = True


def together(target: Floats, shape: Sequence[int], golden: Floats, golden_shape: Sequence[int], times_cut: int | None = None) -> Cut | None:
    """Find the smallest whole that both sides can be put together to.

    Where a dimension is cut on both sides, the whole is a multiple of what the shapes say. The first multiple counts at which replicas
    of one side agree, or all of its pieces are used up.

    Args:
        target, golden: float64 (pieces, 4).
        shape, golden_shape: of a piece of either side.
        times_cut: the multiple, when it is known.

    Returns:
        None when no number of pieces fits.
    """
    least = whole_shape(list(shape), list(golden_shape))
    if least is None or 0 in least:
        return None
    target_pieces, golden_pieces = count_pieces(shape, least), count_pieces(golden_shape, least)
    maybe: Cut | None = None
    for n in [times_cut] if times_cut else divisors(max(len(target) // target_pieces, len(golden) // golden_pieces, 1)):
        target_need, golden_need = n * target_pieces, n * golden_pieces
        if target_need > len(target) or golden_need > len(golden) or len(target) % target_need or len(golden) % golden_need:
            continue
        target_whole, golden_whole = merge_replicas(target, target_need), merge_replicas(golden, golden_need)
        sure = golden_whole is not None and (golden_need < len(golden) or n == 1 or bool(times_cut))
        cut = Cut(times(least, shape, golden_shape, n), target_need, golden_need, target_whole, golden_whole, n, sure)
        if times_cut or sure or (target_whole is not None and (golden_whole is not None or target_need < len(target))):
            return cut
        if maybe is None or (maybe.golden is None and golden_whole is not None):
            maybe = cut
    return maybe


def filled_up(target: Floats, shape: Sequence[int], golden: Floats, golden_shape: Sequence[int]) -> Cut | None:
    """Put two tables together of which one has rows that fill it up to a round number, in one dimension, cut or not.

    Returns:
        both wholes in the shape of the smaller one. Where the larger table holds at least what the smaller one does (largest, smallest
        element, norm), it says nothing against the smaller one, and gets its statistics. None: they cannot be put together.
    """
    unequal = [d for d, (target_size, golden_size) in enumerate(zip(shape, golden_shape)) if target_size != golden_size]
    if len(unequal) != 1:
        return None
    target_size, golden_size = shape[unequal[0]], golden_shape[unequal[0]]
    for target_need in divisors(len(target)):
        for golden_need in divisors(len(golden)):
            target_length, golden_length = target_size * target_need, golden_size * golden_need
            target_whole, golden_whole = merge_replicas(target, target_need), merge_replicas(golden, golden_need)
            if (
                target_whole is None
                or golden_whole is None
                or not (0.5 < target_length / golden_length < 2.0)
                or (target_need > 1 and target_size * (target_need - 1) >= golden_length)
            ):
                continue
            large, small = (target_whole, golden_whole) if target_length > golden_length else (golden_whole, target_whole)
            slack = SAME * max(abs(small[0]), abs(small[1]))
            if large[0] >= small[0] - slack and large[1] <= small[1] + slack and large[3] >= small[3] * (1 - SAME):
                target_whole = golden_whole = small
            whole = list(shape)
            whole[unequal[0]] = min(target_length, golden_length)
            return Cut(whole, target_need, golden_need, target_whole, golden_whole)
    return None


def without_partner(target: Floats, golden: Floats, agrees: float) -> list[int]:
    """Which pieces, float64 (n, 4), are none of the other side's, of two runs that are cut alike (each has its part of the batch); [] for
    other numbers of pieces."""
    if len(target) != len(golden) or len(target) < 2:
        return []
    return [
        position
        for position, target_piece in enumerate(target)
        if min(distance(target_piece, golden_piece) for golden_piece in golden) > agrees
    ]


def snap(value: Floats, golden: Floats) -> Floats:
    """Numbers that were put together, as the golden side has them where they differ by what putting together rounds."""
    with np.errstate(invalid="ignore"):  # -inf on both sides
        return np.asarray(np.where(np.abs(value - golden) <= _ROUNDING * np.abs(golden), golden, value))
