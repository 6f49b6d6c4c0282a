"""What round-off may do: the one place that is asked how far apart two numbers may be when nothing is wrong.

The limit of one call follows from the coarser dtype of the two runs: half a unit in the last place, times 8 plus the square root of the
longest sum that can stand behind an element (rounding errors of a sum of n terms grow like sqrt(n): N. Higham and T. Mary, "A New Approach
to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019). Types of 16 bits and less round their result to a few bits and
are summed in float32, so four units count there.

Three things move that limit: a difference grows on its way through a call (`GROWTH`), a calibration has measured how far round-off moves
each row (`CALIBRATED`), and some devices compute products with fewer bits of mantissa (`product_noise`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from msprobe_engine.core.dtypes import FLOATS, plain_name
from msprobe_engine.core.operator_traits import PRODUCTS

EPS: Mapping[str, float] = {name: kind.eps for name, kind in FLOATS.items()}
"""Distance of 1.0 to the next number, by dtype."""


GROWTH = 50.0
"""By how much a difference may grow in one call: norms and softmax do that, and differences of nearly equal numbers."""

CALIBRATED, CALIBRATED_GROWTH = 20.0, 4.0
"""Limit and growth in multiples of what a row was seen to move."""

_WIDE = 2.0**-20
_SHORT = (EPS["bfloat16"], EPS["float16"])
_PRODUCTS = (*PRODUCTS, "conv", "einsum", "dot", "attention", "gemm")
"""Parts of the names of calls that devices compute with fewer bits of mantissa unless they are told not to."""

_NOISIEST = 2.0**-10
"""Two units of a mantissa of ten bits (TF32), which is what the inputs of a float32 product are rounded to on many devices."""

_AVERAGED = 6.0
"""Round-off of the norm of n elements, in units of their type over sqrt(n): products summed in another order show up to 1.5."""

_MANY = 256
"""Elements over which rounding averages out."""


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


def is_short(limit: float) -> bool:
    """The limit of a call, of one of the types of 16 bits: one unit of them is a large part of a number, and defects are smaller."""
    return limit / 4 in _SHORT


def averaged_limit(limit: float, count: int) -> float:
    """Round-off of the norm of `count` elements of a type of 16 bits: rounding moves them up as often as down.

    Args:
        limit: of the call.
        count: of the elements; inf for so few that nothing averages out.
    """
    return _AVERAGED * (limit / 4) / math.sqrt(count) if count >= _MANY else math.inf


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
