"""Gradients that are all as many times those of the golden run, where what is made of them is not: they were recorded at another scale,
and that is no difference. Three scales are known, each by something that only it leaves behind:

* another loss scale that both runs have written, a power of two from the first step on;
* a loss scale that nobody has written, a power of two, or as many ranks as the mean is over: gradients of activations have the factor,
  those of parameters have not;
* clipping: one run takes its gradients to the optimizer as they were recorded, the other one clips them in between. A first moment says it
  that begins at zero: it is 1 - beta1 times what the optimizer was given.

The factor is taken out, and what is left is compared. A factor that also shows behind it stays a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.monitor.number_pairs import Number
from msprobe_engine.formats.monitor.alert_order import Moment

_NAME = "loss_scale"
_EXACT = 1e-6
_UNCLIPPED = frozenset((Moment.ACCUMULATED, Moment.REDUCED, Moment.UNSCALED))
_OF_PARAMETERS = _UNCLIPPED | {Moment.CLIPPED}
_NORM = "grad_norm"
_MOMENT, _DECAY = "exp_avg", "beta1"

Step = tuple[int, int]
"""Rank and step."""


def without_scale(items: Iterable[Number], floor: float, ranks: float = 1.0) -> tuple[list[Number], list[str]]:
    """The numbers as they would be at the golden run's scale, and what is to be said of it.

    Args:
        floor: what round-off may do to the norm of a gradient.
        ranks: how many times the golden run's ranks those of the target are.
    """
    items = list(items)
    declared = any(number.key.name.endswith(_NAME) for number in items)
    items, said = _without_loss_scale(items)
    by_step: dict[Step, list[Number]] = {}
    for number in items:
        by_step.setdefault((number.rank, number.step), []).append(number)
    clipped = _clipped_between(by_step, floor)
    rescaled, backward = [], set()
    for numbers in by_step.values():
        of_parameters = _factor((number for number in numbers if number.order[2] in _OF_PARAMETERS), floor)
        if clipped and of_parameters and of_parameters != 1.0 and _factor(_first_moments(numbers), floor) == 1.0:
            numbers = [_without_clipping(number, of_parameters) for number in numbers]
        of_parameters = _factor((number for number in numbers if number.order[2] in _UNCLIPPED), floor)  # clipping takes any factor off
        of_activations = _factor((number for number in numbers if number.order[2] == Moment.BACKWARD), floor)
        scaled = of_activations != 1.0 and any(_is_power_of_two(of_activations / number, floor) for number in (1.0, ranks))
        if not declared and scaled and of_parameters == 1.0:
            numbers = [_divide_by_scale(number, of_activations, number.order[2] == Moment.BACKWARD) for number in numbers]
            backward.add(of_activations)
        rescaled += numbers
    if clipped:
        said.append(Sentence("Gradients were recorded before clipping in one run and after it in the other; the factor was taken out."))
    if backward:
        template = "Gradients of activations are {0} times the golden run's and those of parameters are not: the loss scale was taken out."
        said.append(Sentence(template, f"{max(backward):.3g}"))
    return rescaled, said


def _factor(numbers: Iterable[Number], floor: float) -> float:
    """How many times the golden run's norms those of the target are, all of them; 1 where they are about the same, 0 where there are
    not two norms and where they have no factor in common."""
    norms = [(number.target, number.golden) for number in numbers if number.op == "norm" and number.target and number.golden]
    ratios = [target / golden for target, golden in norms if math.isfinite(target) and math.isfinite(golden)]
    if len(ratios) < 2:
        return 0.0
    middle = median(ratios)
    if median(abs(ratio / middle - 1) for ratio in ratios) > floor:
        return 0.0
    return 1.0 if abs(middle - 1) <= floor else middle


def _is_power_of_two(factor: float, exactly: float) -> bool:
    return 0 < factor < math.inf and abs(math.log2(factor) - round(math.log2(factor))) <= exactly


def _divide_by_scale(number: Number, factor: float, is_scaled: bool) -> Number:
    return number._replace(target=number.target / factor) if is_scaled and number.distance < math.inf else number


def _without_clipping(number: Number, factor: float) -> Number:
    """A norm of all gradients is the one before clipping, or the one behind it, as the framework has it."""
    if number.key.name == _NORM and number.order[2] not in _OF_PARAMETERS:
        return _nearer(number, factor)
    return _divide_by_scale(number, factor, number.order[2] in _OF_PARAMETERS)


def _nearer(number: Number, factor: float) -> Number:
    """Without the factor, where that is nearer to the golden run's."""
    scaled = number._replace(target=number.target / factor)
    return scaled if scaled.distance < number.distance else number


def _first_moments(numbers: Iterable[Number]) -> list[Number]:
    return [number for number in numbers if number.family == _MOMENT]


def _clipped_between(by_step: Mapping[Step, Sequence[Number]], floor: float) -> bool:
    """One run has recorded what its optimizer was given, and the other one has not: by the first moments of the first step."""
    for place in sorted(by_step, key=lambda place: (place[1], place[0])):
        numbers = by_step[place]
        moments = {number.key.name: number for number in _first_moments(numbers) if number.op == "norm"}
        decay = [number for number in numbers if number.key.name == _DECAY]
        last = max((number.order[2] for number in numbers if number.order[2] in _OF_PARAMETERS), default=None)
        pairs = [
            (number, moments[number.key.name])
            for number in numbers
            if number.order[2] == last and number.op == "norm" and number.key.name in moments
        ]
        pairs = [
            (number, moment) for number, moment in pairs if number.target and number.golden and math.isfinite(number.target + number.golden)
        ]
        if not decay or not pairs:
            continue
        target = median(moment.target / number.target for number, moment in pairs) / (1 - decay[0].target)
        golden = median(moment.golden / number.golden for number, moment in pairs) / (1 - decay[0].golden)
        return (abs(target - 1) <= floor) != (abs(golden - 1) <= floor)
    return False


def _without_loss_scale(items: list[Number]) -> tuple[list[Number], list[str]]:
    """With the golden run's loss scale, where both have written theirs."""
    scales = {
        (number.rank, number.step): number.target / number.golden
        for number in items
        if number.key.name.endswith(_NAME) and number.golden and number.target
    }
    if not scales:
        return items, []
    first = scales[min(scales, key=lambda place: (place[1], place[0]))]
    if first == 1.0 or not _is_power_of_two(first, _EXACT):
        return items, []
    rescaled = []
    for number in items:
        scale = scales.get((number.rank, number.step), 1.0)
        if number.key.name.endswith(_NAME) and scale == first:
            continue
        rescaled.append(_nearer(number, scale) if "grad" in number.family and number.order[2] < Moment.UNSCALED else number)
    return rescaled, [Sentence("The loss scale is {0} times the golden run's; that was taken out.", f"{first:g}")]
