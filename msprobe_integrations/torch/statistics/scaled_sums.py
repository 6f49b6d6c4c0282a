"""Sums of powers to ten digits by float32 and integer operators, for devices without float64: an NPU makes float32 of
``.to(torch.float64)``.

The values of a piece are divided by a power of two, so that the largest is between 1/2 and 1: no power over- or underflows. A value is
split into a head of 12 bits and the rest; the product of two heads is exact in float32, and what the rests add is 2**-11 of it, so
that rounding them costs 2**-35 at most. The products are summed exactly: of each, the multiples of `_UNITS` are added in float32 in rows so
short that nothing is rounded, and the rows as int64. The result does not depend on the order in which a device adds. Error: about 1e-10 of
the sum of absolute values.

A row that is written here has whole numbers in place of float64, and `WORDS` in place of sixteen; `decode` makes the usual row of
it on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from msprobe_engine.core.statistics import rows as _rows

WORDS = 24
"""Of a row on a device; the first sixteen are those of `msprobe_engine.core.statistics.rows`."""
_SCALE = 16
"""Word: 0 when the row is as `msprobe_engine.core.statistics.rows` says, else `_BIAS` + e, where values were divided by 2**e."""
_BIAS = 1024
_SUMS = (_rows.SUM, _rows.SUMSQ, _rows.SUM3, _rows.SUM4)
_RESTS = 17
"""Word of the first of four sums of rests, in 2**-50; `_SUMS` have the sums of products, in 2**-35. For integers, SUM and its rest are
the exact sums of the high and the low halves."""
_SHORT = 64  # products per row: 64 multiples of 2**-17 below 1 need 24 bits
_UNITS = (96.0, 96.0 * 2.0**-18)  # 1.5 * 2**23 units: what is added to it and taken away again is rounded to units of 2**-17 and 2**-35
_HEAD = -4096  # bits of a float32 with 12 of its 24 digits
_TOP = -(2**63)


def write(kept: torch.Tensor, low: torch.Tensor, high: torch.Tensor, words: torch.Tensor, moments: bool) -> None:
    """MIN, MAX and the sums of a piece.

    Args:
        kept: flat, at most 2**20 elements of at most 32 bits (sums of rests stay below 2**62), without NaN and Inf.
        low, high: its extremes, +Inf and -Inf when there are none.
        words: the row, [WORDS] int64.
        moments: SUM3 and SUM4 are wanted.
    """
    extremes = torch.stack([low, high]).to(torch.float32)
    words[_rows.MIN : _rows.SUM].copy_(extremes.view(torch.int32))
    factors = _factors(torch.maximum(-extremes[0], extremes[1]).clamp_(min=0), words)
    short = kept.dtype in (torch.float16, torch.bfloat16)  # all of their digits are in the head
    values = _pad_to_multiple(kept)
    for factor in factors:
        values.mul_(factor)
    _write_sums(*_powers(values, None if short else torch.zeros((), device=values.device), moments), words)


def write_integers(wide: torch.Tensor, unsigned: bool, words: torch.Tensor, moments: bool) -> None:
    """As `write`, of int64, or of uint64 seen as int64; IMIN and IMAX of the row are written by the caller."""
    flipped = wide ^ _TOP if unsigned else wide
    extremes = words[_rows.MIN : _rows.SUM]
    torch.amin(flipped, 0, out=extremes[0])
    torch.amax(flipped, 0, out=extremes[1])
    sizes = (extremes ^ _TOP if unsigned else extremes).to(torch.float32)
    sizes = torch.where(sizes < 0, 1.5 * 2.0**63, sizes) if unsigned else sizes.abs()  # the exponent counts
    factors = _factors(sizes.amax(), words)
    high, middle, low = wide >> 48, (wide >> 24) & 0xFFFFFF, wide & 0xFFFFFF
    upper, lower = (high & 0xFFFF if unsigned else high).to(torch.float32).mul_(2.0**48), middle.to(torch.float32).mul_(2.0**24)
    both = upper + lower
    rest = lower.sub_(both - upper).add_(low)  # exact: what `both` has lost, and 24 bits
    values = both + rest
    rest.sub_(values - both)
    for factor in factors:
        values.mul_(factor)
        rest.mul_(factor)
    _write_sums(*_powers(_pad_to_multiple(values), _pad_to_multiple(rest), moments), words)
    torch.sum((wide >> 32) & 0xFFFFFFFF if unsigned else wide >> 32, 0, out=words[_rows.SUM])
    torch.sum(wide & 0xFFFFFFFF, 0, out=words[_RESTS])


def split_digits(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 12 digits of a float32, and the others."""
    head = (value.view(torch.int32) & _HEAD).view(torch.float32)
    return head, value - head


def decode(found: npt.NDArray[np.int64], ints: npt.NDArray[np.int64], integers: npt.NDArray[np.bool_]) -> None:
    """Put the float64 words of rows written here into the usual rows.

    Args:
        found: [n, WORDS] from the device, also rows that are not of this module.
        ints: [n, 16], its first words with COUNT and FLAGS of the host.
        integers: [n], of a tensor of integers.
    """
    own = found[:, _SCALE] != 0
    if not own.any():
        return
    exponent = (found[own, _SCALE] - _BIAS).astype(np.int32)
    reals = ints.view(np.float64)
    for power, word in enumerate(_SUMS, 1):
        sums, rests = found[own, word].astype(np.float64), found[own, _RESTS - 1 + power].astype(np.float64)
        reals[own, word] = np.ldexp(sums * 2.0**-35 + rests * 2.0**-50, power * exponent)
    floats = own & ~integers
    for word in (_rows.MIN, _rows.MAX):
        reals[floats, word] = found[floats, word].astype(np.int32).view(np.float32)
    whole = own & integers
    reals[whole, _rows.SUM] = found[whole, _rows.SUM] * 2.0**32 + found[whole, _RESTS]
    fits = ints[:, _rows.FLAGS] & _rows.HAS_INTEGERS != 0
    for word, limit in ((_rows.MIN, _rows.IMIN), (_rows.MAX, _rows.IMAX)):
        unsigned = found[whole, word].view(np.uint64) ^ np.uint64(2**63)
        reals[whole, word] = np.where(fits[whole], found[whole, limit].astype(np.float64), unsigned.astype(np.float64))


def _factors(top: torch.Tensor, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two powers of two whose product takes `top` (float32, 0-dim, at least 0) to between 1/2 and 1. Neither is subnormal."""
    place = top.view(torch.int32) >> 23
    shift = (place < 26) * 24 - (place > 252) * 2  # away from what is subnormal, and from what has no inverse
    first = ((shift + 127) << 23).to(torch.int32).view(torch.float32)
    place = (top * first).view(torch.int32) >> 23
    words[_SCALE].copy_(place - shift + (_BIAS - 126))
    return first, ((253 - place) << 23).view(torch.float32)


def _pad_to_multiple(flat: torch.Tensor) -> torch.Tensor:
    """A copy in float32, filled up with zeros to a multiple of `_SHORT`."""
    n = flat.shape[0]
    made = flat.new_empty(-(-n // _SHORT) * _SHORT, dtype=torch.float32)
    made[n:].zero_()
    made[:n].copy_(flat)
    return made


def _powers(values: torch.Tensor, rest: torch.Tensor | None, moments: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """First to second or fourth powers: products that are exact, and what is missing in them, [2 or 4, n] each.

    Args:
        rest: what `values` lack of the numbers they stand for; None: nothing, and they have no more than 12 digits.
    """
    made, missing = (values.new_empty((4 if moments else 2, values.shape[0])) for _ in range(2))
    made[0].copy_(values)
    if rest is None:
        head, tail = values, None
        missing[:2].zero_()
    else:
        missing[0].copy_(rest)
        head, tail = split_digits(values)
        tail.add_(rest)
        torch.mul(tail, head + head + tail, out=missing[1])
    torch.mul(head, head, out=made[1])
    if moments:
        square, more = split_digits(made[1])
        more.add_(missing[1])
        torch.mul(square, head, out=made[2])
        torch.mul(more, head, out=missing[2])
        if tail is not None:
            missing[2].add_(tail.mul_(square + more))
        torch.mul(square, square, out=made[3])
        torch.mul(more, square + square + more, out=missing[3])
    return made, missing


def _write_sums(products: torch.Tensor, rests: torch.Tensor, words: torch.Tensor) -> None:
    """Sum up what `_powers` gave (used up) into the row."""
    count = products.shape[0]
    left, rests = products.view(count, _SHORT, -1), rests.view(count, _SHORT, -1)
    total: Any = 0
    for place, unit in zip((17, 35), _UNITS):
        rounded = left.add(unit).sub_(unit)
        left.sub_(rounded)
        total = total * 2**18 + rounded.sum(1).mul_(2.0**place).to(torch.int64).sum(1)
    small = rests.add_(left).sum(1).mul_(2.0**50).round_().to(torch.int64)
    words[_RESTS : _RESTS + count].copy_(small.sum(1))
    words[_rows.SUM : _rows.IMIN].copy_(total[:2])
    if count > 2:
        words[_rows.SUM3 : _rows.BELOW].copy_(total[2:])
