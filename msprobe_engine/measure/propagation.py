"""How far round-off that goes into a call comes out of it, from what the dump says of its tensors.

Two healthy runs differ, element by element, by noise. It comes in two kinds, and both are carried from call to call:

* `Noise.element`: the root mean square of the difference over that of the tensor. In a statistic of n elements it averages out like
  1/sqrt(n);
* `Noise.whole`: what all elements share (a rounded scale, a rounded weight, a statistic of a row); it does not average out.

What a call does to noise follows from its kind and from the sizes of what goes in and comes out: a sum or a product of matrices keeps the
absolute noise of its terms, so that terms that cancel make it larger; a softmax turns absolute noise into relative noise; a normalisation
divides by the spread. The formulas hold for independent noise of elements, to first order; `benchmarks/roundoff.py` measures
them on healthy pairs of trainings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from msprobe_engine.core import operator_traits as traits

MODULE_GAIN, BACKWARD_GAIN, ELEMENTWISE_GAIN = 3.0, 1.5, 1.5
"""By how much elements' noise grows in a module of which nothing inside is known, in a gradient, and in a function of each element."""

_LOSS_GAIN = 4.0
_SOFTMAX_GAIN = 2.0
_OPTIMIZER_PART = 0.1
"""Of a parameter that an optimizer moves in one step, but for one that begins at zero: what noise of the update can be of it."""

_OF_ZEROS = 2.0
"""The same of a parameter that was zero: an element near zero changes its sign, and with it the whole update of that element."""

_MOVED = 0.3
"""Part of the noise of weights that an optimizer has moved and that is aligned with what they are multiplied by."""


_FEW = 0.5
"""Part of the noise of elements that a sum over a row shows, where few of them make most of it (squares)."""


class Noise(NamedTuple):
    """Of one tensor; `absolute` is that of its elements that no mask covers, in units of the tensor."""

    element: float
    whole: float
    absolute: float


NONE = Noise(0.0, 0.0, 0.0)


class Operand(NamedTuple):
    """A tensor that goes in.

    Attributes:
        noise: of it.
        rms: root mean square of its elements; `mean` of them, absolute.
        share: what of its elements' noise a norm shows, `roundoff.share`.
        size: number of elements; `last`: of the last dimension.
        unit: half a unit in the last place of its dtype.
    """

    noise: Noise
    rms: float
    mean: float
    share: float
    size: int
    last: int
    unit: float


class Result(NamedTuple):
    """A tensor that comes out: `rms`, `size` and `unit` as in `Operand`."""

    rms: float
    size: int
    unit: float


class Carried(NamedTuple):
    """Noise of a result because of what went in; `rounds`: the call rounds; `absolute`: None where it is `element` times its size."""

    element: float
    whole: float
    rounds: bool = True
    absolute: float | None = None


def _over_tokens(api: str, operand: Operand) -> float:
    return max(operand.share, math.sqrt(operand.last / operand.size)) if api in traits.LOSSES_OF_CLASSES else operand.share


def through_module(operands: Sequence[Operand]) -> Carried:
    """A module of which nothing inside is known."""
    element, whole = _worst(operands)
    return Carried(MODULE_GAIN * element, MODULE_GAIN * whole)


def forward(api: str, operands: Sequence[Operand], result: Result, moved_weights: bool) -> Carried:
    """Noise of what a function gives out.

    Args:
        api: name of the function.
        operands: tensors of floating point numbers that go in, at least one.
        result: what comes out.
        moved_weights: an optimizer has moved the weights by gradients with noise.
    """
    element, whole = _worst(operands)
    if api in traits.ADDITIONS:
        combined = [math.hypot(*(operand.noise[k] * operand.rms for operand in operands)) / result.rms for k in (0, 1)]
        hidden = max((operand.noise.absolute for operand in operands), default=0.0) if combined[0] < result.unit else 0.0
        return Carried(combined[0], combined[1], absolute=hidden or None)  # a mask that is added leaves it to what it does not cover
    if api in traits.MASKINGS:
        absolute = max(operand.noise.absolute for operand in operands)
        return Carried(absolute / result.rms, whole, False, absolute)
    if traits.is_softmax(api):
        return Carried(_SOFTMAX_GAIN * max(operand.noise.absolute for operand in operands), 0.0)
    if api in traits.LOSSES:
        if result.size > 1:
            return Carried(_SOFTMAX_GAIN * max(operand.noise.absolute for operand in operands) / result.rms, whole)
        # of the classes of a token the loss takes one: noise averages out over tokens only
        loss = max(
            operand.rms * math.hypot(operand.noise.whole, operand.noise.element * _over_tokens(api, operand)) for operand in operands
        )
        return Carried(_LOSS_GAIN * loss / result.rms, _LOSS_GAIN * loss / result.rms)
    if traits.is_product(api) and len(operands) > 1:
        first = 1 if api in traits.PRODUCTS_WITH_ADDEND and len(operands) > 2 else 0
        factors, added = operands[first : first + 2], [*operands[:first], *operands[first + 2 :]]
        product = _product(factors, result, moved_weights)
        element = math.hypot(product.element, *(operand.noise.element * operand.rms / result.rms for operand in added))
        return Carried(element, math.hypot(product.whole, *(operand.noise.whole * operand.rms / result.rms for operand in added)))
    largest = max(operands, key=lambda operand: operand.size)
    if result.size == 1 < largest.size:
        known = max(max(operand.noise.whole, operand.noise.element * operand.share) for operand in operands)
        known = max(known, _of_sum(api, largest, result))
        return Carried(known, known)
    if api in traits.SUMS and largest.size > result.size:
        return Carried(math.hypot(_of_sum(api, largest, result), _FEW * element), whole)
    if api in traits.NORMALISATIONS:
        spread = math.sqrt(max(largest.rms**2 - largest.mean**2, 1e-30))
        gain = ELEMENTWISE_GAIN * max(1.0, largest.rms / spread)
        return Carried(gain * element, gain * whole)
    if api in traits.LOOKUPS:  # all of the noise may be in the rows that are looked up
        gathered = math.sqrt(max(1.0, largest.size / result.size))
        return Carried(gathered * element, gathered * whole, False)
    if api in traits.MOVES or api in traits.HANDS_ON:
        coarser = result.unit > min(operand.unit for operand in operands)
        return Carried(element, whole, coarser, max(operand.noise.absolute for operand in operands))
    if api in traits.OPTIMIZER_UPDATES:
        return _carry_through_update(operands, result, whole)
    gain = ELEMENTWISE_GAIN if api in traits.ELEMENTWISE else MODULE_GAIN
    if api in traits.EXPONENTIALS:  # absolute noise becomes relative noise
        return Carried(max(gain * element, *(operand.noise.absolute for operand in operands)), gain * whole)
    if api in traits.SCALINGS and (len(operands) == 1 or min(operand.size for operand in operands) == 1):
        gain = 1.0
    return Carried(gain * element, gain * whole)


def backward(api: str | None, gradients: Sequence[Operand], kept: Sequence[Operand], result: Result, sums: bool) -> Carried:
    """Noise of a gradient.

    Args:
        api: name of the function; None of a module.
        gradients: what comes back from behind the call, at least one.
        kept: what the call took in and gave out on the way forward.
        result: the gradient.
        sums: the result is that of a parameter, or of a module: a sum over all that comes in.
    """
    element, whole = _worst([*gradients, *kept])
    incoming = max(gradients, key=lambda operand: operand.size)
    rows = incoming.size / result.size
    if api in traits.SWITCHES:  # noise of elements near zero turns them on or off
        switched = math.sqrt(_worst(kept)[0])
        element, whole = _worst(gradients)
        return Carried(math.hypot(element, switched), whole, False)
    if api is not None and (api in traits.MOVES or api in traits.HANDS_ON or api in traits.ADDITIONS or api in traits.MASKINGS):
        grows = max(1.0, math.sqrt(rows) * incoming.rms / result.rms) if rows > 1.5 else 1.0
        element, whole = _worst(gradients)
        coarser = result.unit > min(operand.unit for operand in gradients)
        return Carried(grows * element, grows * whole, rows > 1.5 or coarser or api in traits.ADDITIONS)
    terms = _terms(api, incoming, kept, result, rows, sums)
    grows = (MODULE_GAIN if api is None and not sums else BACKWARD_GAIN) * max(1.0, terms / result.rms)
    return Carried(grows * element, grows * whole)


def update_of_zeros(element: float) -> float:
    """Noise of elements of a parameter that was zero, after an update by gradients with such noise (`element`)."""
    return math.sqrt(min(1.0, element)) * _OF_ZEROS


def _worst(operands: Sequence[Operand]) -> tuple[float, float]:
    return max((operand.noise.element for operand in operands), default=0.0), max(
        (operand.noise.whole for operand in operands), default=0.0
    )


def _product(operands: Sequence[Operand], result: Result, moved_weights: bool) -> Carried:
    """Each element is a sum of `last` terms, which keep their absolute noise when they cancel."""
    a, b = operands
    grows = max(1.0, math.sqrt(a.last) * a.rms * b.rms / result.rms)
    element = grows * max(a.noise.element, b.noise.element)
    whole = math.hypot(a.noise.whole, b.noise.whole)
    if moved_weights and b.noise.whole:
        aligned = b.noise.element * a.last * a.rms * b.rms / result.rms
        element, whole = max(element, aligned), math.hypot(whole, _MOVED * aligned)
    return Carried(element, whole)


def _carry_through_update(operands: Sequence[Operand], result: Result, whole: float) -> Carried:
    """A parameter and what it is moved by, of which an optimizer makes as much where its gradient is nothing but noise."""
    if len(operands) <= 2:  # a parameter of zeros does not go in: what comes out is the update
        return Carried(update_of_zeros(_worst(operands)[0]), whole)
    held, moved_by = operands[0], _worst(operands[1:])[0]
    size = held.rms / result.rms
    part = max(_OPTIMIZER_PART, abs(1.0 - size))
    return Carried(math.hypot(held.noise.element * size, math.sqrt(min(1.0, moved_by)) * part), whole)


def _of_sum(api: str, operand: Operand, result: Result) -> float:
    """A sum or a mean over part of the elements."""
    if api not in traits.SUMS:
        return 0.0
    terms = operand.size / result.size
    noise = operand.noise.element * math.sqrt(terms) * operand.rms / result.rms
    return noise / terms if api == "mean" else noise


def _terms(api: str | None, incoming: Operand, kept: Sequence[Operand], result: Result, rows: float, sums: bool) -> float:
    """Root mean square of a gradient whose terms do not cancel; 0 where that is not known."""
    largest = 0.0
    if rows > 1.5 or sums or (api is not None and traits.sums_products(api)):
        for operand in kept:
            length = math.sqrt(incoming.size * operand.size / result.size)
            if length >= 1 and not operand.size == result.size == incoming.size:
                largest = max(largest, math.sqrt(length) * incoming.rms * operand.rms)
        if rows > 1.5 and result.size <= 1 << 14:
            largest = max(largest, math.sqrt(rows) * incoming.rms)
    elif api is not None and traits.is_softmax(api):
        largest = incoming.rms * max((operand.rms for operand in kept if operand.size == result.size), default=0.0)
    elif api == "scaled_dot_product_attention":
        largest = incoming.rms * math.prod(operand.rms for operand in kept[:3])
    return largest
