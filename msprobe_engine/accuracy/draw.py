"""Values for a tensor of which only statistics were recorded: they have the recorded extremes, mean and norm, and NaN and Inf as often.

A uniform distribution between the extremes, with which one outlier stretches everything, is only what is left when a record has no mean.
Integers stay between the recorded extremes, so indices stay valid; what an operator needs beyond that (sorted boundaries, class numbers
with an ignored one, a positive definite matrix) is a `purpose`. What is drawn depends on the seed text and the record alone: the same bits
in any process, order, split or resumed run.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.accuracy.moments import POOL, Floats, build_position_rows, definite, dominant, moments, symmetric
from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.dump.dump_table import WORDS_OF_NUMBERS

Array = npt.NDArray[Any]
PLAIN, SORTED, OFFSETS, UNIQUE, DISTINCT, CLASSES = "plain", "sorted", "offsets", "unique", "distinct", "classes"
DEFINITE, SYMMETRIC, TRIANGULAR, KEEP, DROP = "definite", "symmetric", "triangular", "keep", "drop"
"""What a tensor is for: nothing special; boundaries in ascending order; the same beginning with the smallest; indices of which none
occurs twice along an axis, or anywhere; numbers of classes, of which a negative one is ignored; a symmetric positive definite, symmetric
or triangular well-conditioned matrix; a mask that is true where values are kept, or where they are dropped."""

_MATRICES = {SYMMETRIC: symmetric, DEFINITE: definite, TRIANGULAR: dominant}
LARGEST = 1 << 33
"""Bytes of one drawn tensor: a damaged shape must not take the machine's memory."""
_MOST_DIMENSIONS = 64
_FAR = 8
"""Part of the range that a mean nobody knows is away from its middle, when that is zero."""
_COMPLEX = {"complex32": "complex64", "complex64": "complex64", "complex128": "complex128", "chalf": "complex64"}


class Statistics(NamedTuple):
    """What a record says of the values of a tensor; None: nothing.

    Attributes:
        low, high: extremes of the finite values.
        mean, norm: of all values; None when not all are finite.
        nans, positive, negative: how many values are NaN, Inf, -Inf.
        zeroed: nothing of it matters (memory that is only written to).
    """

    low: float | int | None
    high: float | int | None
    mean: float | None
    norm: float | None
    nans: int
    positive: int
    negative: int
    zeroed: bool = False


def draw(item: Mapping[str, Any], seed_text: str, purpose: str = PLAIN, axis: int = -1) -> Array:
    """Values for a recorded tensor.

    Args:
        item: of dump.json: ``dtype``, ``shape``, ``Max``, ``Min``, ``Mean``, ``Norm``, and where the dump has them ``nan_count``,
            ``inf_count``, ``Max_except_inf_nan``, ``Min_except_inf_nan``.
        seed_text: tells this tensor from all others, ``"0 Torch.matmul.0 input 1"``.
        purpose: one of the constants of this module.
        axis: for `UNIQUE`.

    Returns:
        the recorded shape in the recorded type; types that numpy has not (bfloat16, float8) as float32, to be rounded by the caller.

    Raises:
        DumpFormatError: type or shape cannot be, or the tensor would be larger than `LARGEST`.
    """
    name, shape = plain_name(str(item.get("dtype"))), _shape(item)
    kind = _kind(name)
    if kind is None:
        raise DumpFormatError(f"a tensor of type {str(item.get('dtype'))[:60]} cannot be drawn")
    count = math.prod(shape)
    if count * 16 > LARGEST:
        raise DumpFormatError(f"a tensor of shape {list(shape)} is too large to be drawn")
    digest = hashlib.sha256(f"{seed_text}|{name}|{shape}".encode()).digest()
    rng = np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))
    if count == 0:
        return np.empty(shape, kind)
    stats = statistics(item, count)
    if kind.kind == "b":
        return _booleans(rng, shape, stats, purpose)
    if kind.kind == "c":
        return _complex(rng, count, stats).reshape(shape).astype(kind)
    if kind.kind in "iu":
        return _integers(rng, shape, stats, kind, purpose, axis)
    values = _floats(rng, shape, stats)
    values = _shape_for_purpose(values, purpose)
    with np.errstate(over="ignore"):
        return values.astype(kind)


def statistics(item: Mapping[str, Any], count: int) -> Statistics:
    """The statistics of a record of `count` values. Without counts (dumps of the existing tool) a NaN or Inf among the extremes stands
    for one such value."""
    low, high, mean, norm = (_number(item.get(key)) for key in ("Min", "Max", "Mean", "Norm"))
    nans, infs = _count(item.get("nan_count")), _count(item.get("inf_count"))
    values = [v for v in (low, high, mean, norm) if v is not None]
    if nans is None:
        nans = 1 if any(math.isnan(v) for v in values) else 0
    up, down = high is not None and high == math.inf, low is not None and low == -math.inf
    if infs is None:
        infs = up + down if low != high else 0
        if low == high and (up or down or low in (math.inf, -math.inf)):
            infs = count - nans
    nans = min(nans, count)
    infs = min(infs, count - nans)
    if high == -math.inf:
        positive = 0
    elif up and down:
        positive = (infs + 1) // 2
    else:
        positive = 0 if down else infs
    finite = nans + infs == 0
    inner = (_finite(_number(item.get("Min_except_inf_nan"))), _finite(_number(item.get("Max_except_inf_nan"))))
    low, high = (inner[0] if inner[0] is not None else _finite(low)), (inner[1] if inner[1] is not None else _finite(high))
    if low is not None and high is not None and low > high:
        low, high = high, low
    return Statistics(
        low, high, _finite(mean) if finite else None, _finite(norm) if finite else None,
        nans, positive, infs - positive, bool(item.get("ignored") or item.get("uninitialised")),
    )  # fmt: skip


def _shape(item: Mapping[str, Any]) -> tuple[int, ...]:
    shape = item.get("shape")
    if (
        not isinstance(shape, (list, tuple))
        or len(shape) > _MOST_DIMENSIONS
        or not all(type(n) is int and 0 <= n <= 1 << 62 for n in shape)
    ):
        raise DumpFormatError(f"a tensor of shape {str(shape)[:80]} cannot be drawn")
    return tuple(shape)


def _kind(name: str) -> np.dtype[Any] | None:
    if name in _COMPLEX:
        return np.dtype(_COMPLEX[name])
    if name in ("float64", "double"):
        return np.dtype(np.float64)
    if name.startswith(("float", "bfloat", "hifloat", "half")):
        return np.dtype(np.float32)
    if name in ("bool", "bool_"):
        return np.dtype(np.bool_)
    if name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        return np.dtype(name)
    return None


def _number(value: Any) -> float | int | None:
    if isinstance(value, str):
        value = WORDS_OF_NUMBERS.get(value)
    return value if isinstance(value, (int, float)) else None


def _finite(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _range(found: Statistics) -> tuple[float | int, float | int]:
    """Extremes of the finite values, where the record has none or only one of them a guess."""
    low, high = found.low, found.high
    if low is None and high is None:
        return -1.0, 1.0
    if low is None:
        assert high is not None
        return 0 - abs(high), high
    if high is None:
        return low, abs(low)
    return low, high


def _floats(rng: np.random.Generator, shape: tuple[int, ...], stats: Statistics) -> Floats:
    count = math.prod(shape)
    if stats.zeroed:
        return np.zeros(shape)
    low, high = (float(n) for n in _range(stats))
    special = stats.nans + stats.positive + stats.negative
    if special == 0:
        pattern = build_position_rows(shape, *stats[:4])
        if pattern is not None:
            return pattern
        return moments(rng, count, low, high, _mean(stats, low, high), stats.norm).reshape(shape)
    out = np.empty(count)
    places = _places(rng, shape, special)
    rest = np.ones(count, bool)
    rest[places] = False
    out[rest] = moments(rng, count - special, low, high, _mean(stats, low, high), None)
    if stats.nans and stats.positive + stats.negative:
        rng.shuffle(places)
    out[places[: stats.nans]] = math.nan
    out[places[stats.nans : stats.nans + stats.positive]] = math.inf
    out[places[stats.nans + stats.positive :]] = -math.inf
    return out.reshape(shape)


def _mean(found: Statistics, low: float, high: float) -> float | None:
    """The recorded mean. Where there is none (NaN or Inf among the values), one that is not near zero: of values whose mean is zero any
    number of them has the same mean, and a kernel that divides by a wrong one would pass."""
    if found.mean is not None or high - low == math.inf or abs(low + high) > (high - low) / _FAR:
        return found.mean
    return low + (0.5 + 1 / _FAR) * (high - low)


def _places(rng: np.random.Generator, shape: tuple[int, ...], special: int) -> npt.NDArray[np.int64]:
    """Where values that are not finite stand: in the pattern of a causal mask when there are just as many, otherwise spread over
    the rows (the last axis), so that no row has nothing else unless it must be."""
    count = math.prod(shape)
    if len(shape) >= 2:
        mask = _causal(shape[-2], shape[-1])
        inside = int(mask.sum())
        if inside and special == inside * (count // (shape[-2] * shape[-1])):
            return np.flatnonzero(np.broadcast_to(mask, shape).reshape(-1))
    length = shape[-1] if shape else 1
    rows = count // length
    rank = np.argsort(rng.random((rows, length)), axis=1, kind="stable") if count <= POOL else None
    if rank is None:
        places: npt.NDArray[np.int64] = rng.choice(count, special, replace=False)
        return places
    quota = np.full(rows, special // rows)
    quota[rng.permutation(rows)[: special % rows]] += 1
    chosen = np.zeros((rows, length), bool)
    np.put_along_axis(chosen, rank, np.arange(length) < quota[:, None], axis=1)
    return np.flatnonzero(chosen.reshape(-1))


def _causal(rows: int, columns: int) -> npt.NDArray[np.bool_]:
    """True above the diagonal that ends in the lower right corner: what a query must not see."""
    return np.arange(columns)[None, :] > np.arange(rows)[:, None] + max(columns - rows, 0)


def _shape_for_purpose(values: Floats, purpose: str) -> Floats:
    """Values in the form that an operator needs."""
    if purpose in (SORTED, OFFSETS):
        return np.sort(values, axis=-1)
    if values.ndim < 2 or values.shape[-1] != values.shape[-2] or purpose not in _MATRICES:
        return values
    return _MATRICES[purpose](values)


def _complex(rng: np.random.Generator, count: int, found: Statistics) -> npt.NDArray[np.complex128]:
    """Statistics of complex tensors are those of their magnitudes."""
    if found.zeroed:
        return np.zeros(count, np.complex128)
    if found.low is None or found.low < 0:
        return np.asarray(rng.standard_normal(count) + 1j * rng.standard_normal(count))
    size = _floats(rng, (count,), found)
    angle = rng.random(count) * (2 * math.pi)
    values = np.where(np.isfinite(size), size, 0.0) * np.exp(1j * angle)
    values[~np.isfinite(size)] = size[~np.isfinite(size)]
    return np.asarray(values)


def _booleans(rng: np.random.Generator, shape: tuple[int, ...], stats: Statistics, purpose: str) -> Array:
    low, high = bool(stats.low), bool(stats.high) if stats.high is not None else True
    if stats.low is not None and low == high:
        return np.full(shape, high)
    if purpose in (KEEP, DROP) and len(shape) >= 2 and shape[-1] == shape[-2] > 1 and stats.mean is None:
        mask = np.broadcast_to(_causal(shape[-2], shape[-1]), shape)
        return np.array(mask if purpose == DROP else ~mask)
    share = stats.mean if stats.mean is not None and 0 <= stats.mean <= 1 else 0.5
    count = math.prod(shape)
    flat = np.zeros(count, bool)
    flat[: min(max(round(share * count), 1), count - 1) if count > 1 else 1] = True
    rng.shuffle(flat)
    values: Array = flat.reshape(shape)
    if purpose in (KEEP, DROP) and shape and count > shape[-1] > 1:
        values[..., 0] = purpose == KEEP  # no row is dropped as a whole
    return values


def _integers(rng: np.random.Generator, shape: tuple[int, ...], stats: Statistics, kind: np.dtype[Any], purpose: str, axis: int) -> Array:
    limits = np.iinfo(kind)
    if stats.zeroed or (stats.low is None and stats.high is None):
        return np.zeros(shape, kind)  # an index that is always there
    low, high = (min(max(int(n), int(limits.min)), int(limits.max)) for n in _range(stats))
    count = math.prod(shape)
    if purpose == CLASSES and low < 0 <= high:
        return _classes(rng, shape, low, high, stats.mean).astype(kind)
    if purpose == UNIQUE:
        unique = _unique(rng, shape, low, high, axis)
        if unique is not None:
            return unique.astype(kind)
    if (pattern := build_position_rows(shape, *stats[:4])) is not None and purpose != SORTED:
        return pattern.astype(kind)
    if purpose == DISTINCT and shape:
        distinct = _unique(rng, (count,), low, high, 0)
        if distinct is not None:
            return distinct.reshape(shape).astype(kind)
    unit = moments(rng, count, float(low), float(high), stats.mean, stats.norm)
    span = high - low
    steps = np.rint(unit - low) if span < 1 << 52 else (unit - low)
    steps = np.clip(steps, 0, float(span))
    if span < 1 << 52:
        values = steps.astype(np.int64)
        _to_sum(rng, values, span, None if stats.mean is None else round(stats.mean * count) - low * count)
        out: Array = values + low if limits.min < 0 else values.astype(np.uint64) + np.uint64(low)
    else:  # distances of up to 2^64: numbers that wrap around
        large = np.minimum(steps, 2.0**64 - 2048).astype(np.uint64)
        out = (large + np.uint64(low % (1 << 64))).astype(np.uint64)
        out[unit == low], out[unit == high] = np.uint64(low % (1 << 64)), np.uint64(high % (1 << 64))
        out = out.view(np.int64) if limits.min < 0 else out
    out = out.astype(kind)
    if purpose in (SORTED, OFFSETS):
        out = np.sort(out.reshape(shape), axis=-1).reshape(-1)
    return out.reshape(shape)


def _to_sum(rng: np.random.Generator, values: npt.NDArray[np.int64], span: int, wanted: int | None) -> None:
    """Change `values`, which are between 0 and `span`, one by one until their sum is `wanted` (numbers of repeats must add up).
    The first smallest and the first largest stay."""
    if wanted is None or values.size > POOL:
        return
    fixed = {int(values.argmin()), int(values.argmax())}
    free = np.array([n for n in range(values.size) if n not in fixed]) if values.size < 1000 else rng.permutation(values.size)
    if values.size >= 1000:
        free = free[~np.isin(free, list(fixed))]
    for _ in range(64):
        missing = wanted - int(values.sum())
        if missing == 0 or free.size == 0:
            return
        step = 1 if missing > 0 else -1
        room = free[(values[free] < span) if step > 0 else (values[free] > 0)]
        if room.size == 0:
            return
        values[rng.permutation(room)[: abs(missing)]] += step


def _classes(rng: np.random.Generator, shape: tuple[int, ...], ignored: int, high: int, mean: float | None) -> npt.NDArray[np.int64]:
    """Numbers from 0 to `high`, and the negative number that losses ignore as often as the mean says."""
    count = math.prod(shape)
    share = 0.25 if mean is None else (high / 2 - mean) / (high / 2 - ignored)
    values = rng.integers(0, high + 1, count)
    order = rng.permutation(count)
    number = min(max(round(share * count), 1), max(count - 1, 1))
    values[order[:number]] = ignored
    if number < count:
        values[order[number]] = high
    return values.reshape(shape)


def _unique(rng: np.random.Generator, shape: tuple[int, ...], low: int, high: int, axis: int) -> npt.NDArray[np.int64] | None:
    """Numbers of which none occurs twice along `axis`; None where there are not enough."""
    if not shape or not -len(shape) <= axis < len(shape):
        return None
    length, span = shape[axis], high - low + 1
    rows = math.prod(shape) // length
    if length > span or rows * span > 4 * POOL:
        return None
    values = np.argsort(rng.random((rows, span)), axis=1, kind="stable")
    values = values[:, :length]
    if length < span:  # the extremes occur in the first row
        for place, wanted in ((0, 0), (length - 1, span - 1)):
            positions = np.flatnonzero(values[0] == wanted)
            if positions.size == 0 and (place != 0 or length > 1 or wanted == span - 1):
                values[0, place] = wanted
    others = [n for n in range(len(shape)) if n != axis % len(shape)]
    moved = values.reshape([shape[n] for n in others] + [length])
    return np.moveaxis(moved, -1, axis % len(shape)) + low
