"""Gradients that come to nothing, and what divides by them.

The gradient of a bias in front of a normalisation, or of the keys of an attention, is zero in mathematics: it is the sum of terms that
cancel. What is left of them is round-off, which no two runs have alike. A gradient that is smaller than its terms is measured against them,
and what an optimizer makes of it (Adam divides it by its own size) is no difference either, in this step and in the parameter after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from msprobe_engine.core.names import forward_twin
from msprobe_engine.find.difference.paired_rank import Cancelled, PairedRank, Parameter
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD
from msprobe_engine.measure import distances, factorize, roundoff
from msprobe_engine.measure.distances import Floats

_SMALL = 2.0**-10
"""A sum of this part of its terms, or of two of their rounding units, has cancelled."""

_NEAR = 4.0
"""Averages and moments of such a gradient are at most so many times its size."""

_PART = 2.0**-7
"""Part of an update that some elements without a gradient make; a weight decay of 0.01 makes more of the weights of a norm."""

_ELEMENTS = 2.0**-4
"""The same where an extreme shows that other elements moved, by at least a part of `_REACHED` of the whole, and came out equal: what an
optimizer does otherwise (decay, rate, moments) it does to all of them."""

_REACHED = 0.25

_EQUAL = 2.0**-22
"""Elements that came out equal: two rounding units of float32."""

_SOME, _FEW = 0.5, 0.25
"""Between two frameworks: part of an update that a third of a vector without a gradient makes, when no more than this part of all
parameters is off by so much."""

_HIDDEN = 2.0**-10
"""Part of an update that the statistics of a vector do not show and those of a part of what it goes into do."""

_DIVISIONS = ("div", "truediv", "reciprocal", "rsqrt", "addcdiv", "adam")
_STEEPEST = 1e6


def detect_cancelling(walker: PairedRank) -> Cancelled:
    """Measure gradients that cancelled against their terms, in ``walker.measured``, and find what takes them in."""
    side, golden, m = walker.side, walker.golden.side, walker.measured
    target_rows = factorize.columns(walker.rows)[0]
    cancelled = Cancelled(np.zeros(len(target_rows)))
    role = np.frombuffer(bytes(side.role), np.uint8)[target_rows]
    vector = factorize.of_each(side.shape, lambda shape: isinstance(shape, list) and len(shape) == 1)[target_rows] > 0
    off = vector & (m.distance > 2.0**-20) & np.isfinite(m.distance)
    sizes: dict[int, float] = {}
    for k in np.flatnonzero(off & ((role == OUTPUT) | (role == PARAMETERS_GRAD))).tolist():
        i, j = walker.rows[k]
        op = side.op[i]
        terms, unit, longest = _terms(walker, op)
        target_stats, golden_stats = side.stats[i], golden.stats[j]
        size = float(max(target_stats[3], golden_stats[3]))
        if not size < terms:
            continue
        apart, raw = float(np.nanmax(np.abs(target_stats - golden_stats) * _units(side.shape[i]))) / terms, float(m.distance[k])
        m.distance[k] = min(apart, raw)
        if size < terms * max(_SMALL, 2 * unit) and apart <= roundoff.GROWTH * roundoff.call_limit(unit, longest):
            n = distances.elements(side.shape[i])
            sizes[n] = max(sizes.get(n, 0.0), size)
            if role[k] == PARAMETERS_GRAD:
                cancelled.parameters.add((walker.target.kinds[op][2], side.name[i][len(side.ops[op]) + 1 :].partition(".")[0]))
            else:
                cancelled.vectors.update(_taken_by(walker, golden.op[j], golden.shape[j]))
            cancelled.excused[k] = raw
    for k in np.flatnonzero(off & (role == INPUT)).tolist() if sizes else ():
        i, j = walker.rows[k]
        if max(side.stats[i][3], golden.stats[j][3]) <= _NEAR * sizes.get(distances.elements(side.shape[i]), 0.0):
            cancelled.excused[k] = m.distance[k]
    return cancelled


def carry_over(walker: PairedRank, before: Cancelled) -> None:
    """Parameters whose gradients cancelled in an earlier step are others now: what takes them in is excused."""
    cancelled, m = walker.cancelled, walker.measured
    numbers = _numbers(walker, before.parameters)
    cancelled.parameters |= before.parameters
    cancelled.vectors |= before.vectors
    target_rows = factorize.columns(walker.rows)[0]
    role = np.frombuffer(bytes(walker.side.role), np.uint8)[target_rows]
    for k in np.flatnonzero((m.distance > 0) & np.isfinite(m.distance) & ((role == INPUT) | (role == PARAMETERS))).tolist():
        i, j = walker.rows[k]
        if walker.side.stats[i].tobytes() in numbers or walker.golden.side.name[j] in cancelled.vectors:
            cancelled.excused[k] = m.distance[k]


def tolerate_update(walker: PairedRank, before: PairedRank) -> None:
    """Excuse a vector of parameters that is off by a small part of what the step before has moved it by.

    Some elements of a gradient may come to nothing where others do not (the keys in the bias of a fused projection), and an optimizer that
    divides by their size moves them by as much. How far it moved the whole is at least what its statistics have moved by.
    """
    side, golden, earlier, m = walker.side, walker.golden.side, before.golden.side, walker.measured
    target_rows = factorize.columns(walker.rows)[0]
    vector = factorize.of_each(side.shape, lambda shape: isinstance(shape, list) and len(shape) == 1)[target_rows] > 0
    role = np.frombuffer(bytes(side.role), np.uint8)[target_rows]
    crossed = side.framework != golden.framework
    off = vector & (crossed | (m.distance > 2.0**-20)) & np.isfinite(m.distance) & ((role == INPUT) | (role == PARAMETERS))
    places = {name: row for row, name in enumerate(earlier.name)} if off.any() else {}
    few = crossed and _few(walker, before, places)
    for k in np.flatnonzero(off).tolist():
        i, j = walker.rows[k]
        was = places.get(golden.name[j])
        if was is None or earlier.shape[was] != golden.shape[j] or i in walker.target.producers:
            continue
        flags = side.requires_grad[i], golden.requires_grad[j]  # MindSpore does not say
        if role[k] == INPUT and not (any(flags) if crossed else all(flags)):
            continue
        moved, apart = _measure_movement(walker, before, i, j, was)
        allowed = _SOME if few else _ELEMENTS if _elements_only(walker, before, i, j, was, moved) else _PART
        if apart <= allowed * moved:
            hidden = _HIDDEN * moved / max(float(golden.stats[j][3]), 1e-30) if few else 0.0
            walker.cancelled.excused[k] = max(m.distance[k], hidden)


def _measure_movement(walker: PairedRank, before: PairedRank, i: int, j: int, was: int) -> tuple[float, float]:
    """How far the step before has moved a tensor on the golden side, and how far both sides are apart: the largest of what their extremes,
    the norm and the mean say."""
    golden, earlier = walker.golden.side, before.golden.side
    units = _units(golden.shape[j])
    moved = np.abs(golden.stats[j] - earlier.stats[was]) * units
    return float(moved.max()), float((np.abs(walker.side.stats[i] - golden.stats[j]) * units).max())


def _units(shape: Any) -> Floats:
    """What makes largest, smallest, mean and norm of a tensor of this shape as large as the difference of its elements makes the norm."""
    return np.array((1.0, 1.0, np.sqrt(distances.elements(shape)), 1.0))


def _elements_only(walker: PairedRank, before: PairedRank, i: int, j: int, was: int, moved: float) -> bool:
    """Does the largest or the smallest element of a tensor say that its update was the same on both sides?"""
    target_extremes, golden_extremes, earlier = walker.side.stats[i][:2], walker.golden.side.stats[j][:2], before.golden.side.stats[was][:2]
    equal = np.abs(target_extremes - golden_extremes) <= _EQUAL * np.abs(golden_extremes)
    return bool((equal & (np.abs(golden_extremes - earlier) >= _REACHED * moved)).any())


def _few(walker: PairedRank, before: PairedRank, places: Mapping[str, int]) -> bool:
    """Hardly a parameter is off by more than a small part of its update: an optimizer that works otherwise moves all of them otherwise."""
    parts = []
    for k in np.flatnonzero(walker.measured.known).tolist():
        i, j = walker.rows[k]
        was = places.get(walker.golden.side.name[j])
        trained = walker.golden.side.requires_grad[j] or walker.side.requires_grad[i]
        held = walker.side.role[i] == PARAMETERS or (walker.side.role[i] == INPUT and trained)
        if held and was is not None and i not in walker.target.producers and before.golden.side.shape[was] == walker.golden.side.shape[j]:
            moved, apart = _measure_movement(walker, before, i, j, was)
            if moved > 0:
                parts.append(apart > _PART * moved)
    return bool(parts) and sum(parts) <= _FEW * len(parts)


def _taken_by(walker: PairedRank, op: int, shape: Any) -> list[str]:
    """Names of what the forward call of a backward call of the golden side takes in, of this shape and made by no call."""
    tree, side = walker.golden, walker.golden.side
    twin = tree.index.get(forward_twin(side.ops[op]), -1)
    if twin in (-1, op) or len(tree.kinds[op]) == 4:
        return []
    rows = (row for row in side.rows(twin) if side.role[row] == INPUT and side.shape[row] == shape)
    return [side.name[row] for row in rows if row not in tree.producers]


def _terms(walker: PairedRank, op: int) -> tuple[float, float, int]:
    """(norm, rounding unit, terms of the longest sum) of what is summed up to a gradient of one dimension: what came back from behind the
    call; zeros if unknown."""
    tree, side = walker.target, walker.side
    calls = [op] if tree.kinds[op][0] == "backward" else walker.backward_calls.get(tree.kinds[op][2], []) if tree.gradients[op] else []
    norm = unit = 0.0
    longest = 1
    for call in calls:
        for row in side.rows(call):
            shape = side.shape[row]
            if side.role[row] == INPUT and isinstance(shape, list) and len(shape) > 1 and side.stats[row][3] > norm:
                norm, unit, longest = float(side.stats[row][3]), roundoff.eps(side.dtype[row]), roundoff.longest_sum(shape)
    return norm, unit, longest


def _numbers(walker: PairedRank, names: set[Parameter]) -> set[bytes]:
    """The numbers of these parameters, as rows of the target have them."""
    side, tree = walker.side, walker.target
    if not names:
        return set()
    numbers = set()
    for row in np.flatnonzero(np.frombuffer(bytes(side.role), np.uint8) == PARAMETERS).tolist():
        op = side.op[row]
        if len(tree.kinds[op]) == 4 and (tree.kinds[op][2], side.name[row].rpartition(".parameters.")[2]) in names:
            numbers.add(side.stats[row].tobytes())
    return numbers


def steepness(walker: PairedRank, op: int) -> float:
    """By how much a division may raise a difference: the largest over the smallest number of what it takes in, where all are of one sign.

    Statistics show the difference of the large elements; the small ones, which a division raises, differ by more.
    """
    side = walker.side
    name = side.ops[op].lower()
    if not any(word in name for word in _DIVISIONS):
        return 1.0
    most = 1.0
    for row in side.rows(op):
        high, low = side.stats[row][:2]
        if side.role[row] == INPUT and high * low > 0 and isinstance(side.shape[row], list):
            most = max(most, high / low, low / high)
    return min(most, _STEEPEST)
