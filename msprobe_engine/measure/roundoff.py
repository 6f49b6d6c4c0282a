"""What round-off may do: the one place that is asked how far apart two numbers may be when nothing is wrong.

`fresh` is what one call adds to the noise of elements, `share` what a statistic shows of it; what calls make of noise that goes in is
`propagation`. `call_limit` is for numbers of which nothing else is known (one call, saved variables, rows that only a table pairs): half a
unit in the last place, times 8 plus the square root of the longest sum that can stand behind an element (rounding errors of a sum of n
terms grow like sqrt(n): N. Higham and T. Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019);
types of 16 bits and less round their result to a few bits and are summed in float32, so four units count there.

A calibration has measured how far round-off moves each row (`CALIBRATED`), and some devices compute products with fewer bits of mantissa
(`product_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import FLOATS, plain_name
from msprobe_engine.core.operator_traits import PRODUCTS

Floats = npt.NDArray[np.float64]

EPS: Mapping[str, float] = {name: kind.eps for name, kind in FLOATS.items()}
"""Distance of 1.0 to the next number, by dtype."""


FORWARD, LATER = 4.0, 8.0
"""So many times the predicted noise is no round-off any more: in the forward pass of the first step, and everywhere else, where weights are
moved by gradients with noise and terms cancel."""

FLOOR = 5e-7
"""Of statistics that are summed in float32."""

BIAS, BIAS_OF_SUMS = 0.06, 0.01
"""Part of the noise of one call that does not average out: rounding is not quite symmetric; hardly that of sums and products."""

JUDGED = 0.3
"""A tensor with more noise than this is round-off itself: no fault can be told from it."""

EVIDENCE = 12.0
"""Noise of many elements is at most so many times what their statistics show of it."""

MANY = 256
"""Elements over which rounding averages out, and from which statistics tell the noise."""

_SHORT_ROUNDING, _WIDE_ROUNDING, _OF_TERMS = 1.2, 6.0, 0.15
"""Noise of one call in half units of its dtype: of 16 bits and less (summed in float32 and rounded once), of float32 and more, and there by
the square root of the terms of a product."""

_FEW_VALUES = 8.0
"""Half units between the extremes of a tensor that is one value: its elements are rounded alike."""

GROWTH = 50.0
"""By how much a difference may grow on its way through any number of calls (`find.saved_variables`), or from numbers to integers."""

CALIBRATED = 20.0
"""So many times what a calibration has moved a row by is round-off, too."""

_WIDE = 2.0**-20
_PRODUCTS = (*PRODUCTS, "conv", "einsum", "dot", "attention", "gemm")
"""Parts of the names of calls that devices compute with fewer bits of mantissa unless they are told not to."""

_NOISIEST = 2.0**-10
"""Two units of a mantissa of ten bits (TF32), which is what the inputs of a float32 product are rounded to on many devices."""


def fresh(unit: float, terms: int = 1) -> float:
    """Noise of elements that one call adds, relative to them.

    Args:
        unit: half a unit in the last place of the dtype of the result (`eps` / 2).
        terms: of the sum behind an element of a product.
    """
    return _SHORT_ROUNDING * unit if unit > _WIDE else max(_WIDE_ROUNDING, _OF_TERMS * math.sqrt(terms)) * unit


def share(count: Floats, norm: Floats, top: Floats, spread: Floats, unit: Floats) -> Floats:
    """What part of its elements' noise the norm of a tensor shows: 1/sqrt(elements), more where a few elements make most of it, and all
    of it where all elements are one value.

    Args:
        count: elements, at least 1; `norm` of the tensor, `top`: its largest magnitude, `spread`: between its extremes; `unit`: as in
            `fresh`.
    """
    few = np.nan_to_num(0.5 * top / norm, nan=1.0, posinf=1.0)
    part = np.minimum(1.0, np.maximum(count**-0.5, few))
    return np.where(np.nan_to_num(spread) < _FEW_VALUES * unit * top, 1.0, part)


MOST_TIMES = 1e9
"""More of it is not put into words: the number has no round-off (an integer)."""


def times_exact(distance: float) -> float:
    """How many times what an exact call may do a result differs."""
    return distance / call_limit(EPS["float64"], 1)


@lru_cache(maxsize=4096)
def eps(dtype: str | None) -> float:
    """`EPS` of a dtype as dump files have it (``torch.bfloat16``, ``BFloat16``); 0 for integers, bool and what is no tensor."""
    return EPS.get(plain_name(str(dtype)), 0.0)


def call_limit(units: float, longest: int) -> float:
    """Round-off of one call in a dtype whose `eps` is `units`, when sums have at most `longest` terms."""
    return 4 * units if units > _WIDE else units / 2 * (8 + math.sqrt(longest))


def longest_sum(shape: Any) -> int:
    """Terms of the longest sum that an element of a result may have, from the shape of one operand: a product sums over the last
    dimension, its weight gradient over all the others."""
    return _longest(tuple(shape)) if isinstance(shape, list) and shape else 1


@lru_cache(maxsize=65536)
def _longest(shape: tuple[Any, ...]) -> int:
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        return 1
    last = max(1, int(shape[-1]))
    return max(last, int(math.prod(shape)) // last, 1)


def product_noise(name: str, dtype: str | None, distance: float) -> float:
    """Distances up to this one are accepted everywhere when this call is the first that is off: its product was computed with fewer bits of
    mantissa (TF32). 0 when that is no explanation.

    Args:
        name: of the record.
        dtype: of the result that is off.
        distance: of that result.
    """
    return 4 * distance if distance <= _NOISIEST and is_wide_product(name, dtype) else 0.0


def is_wide_product(name: str, dtype: str | None) -> bool:
    """A result of this dtype is one of a product that many devices compute with fewer bits of mantissa than float32 has."""
    return eps(dtype) == EPS["float32"] and any(product in name.lower() for product in _PRODUCTS)
