"""Rows that are no numbers of the training: results of one side only, buckets of gradients, what masks hide."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.call_tree import Kind, Tree, calls_function
from msprobe_engine.core.names import forward_twin
from msprobe_engine.core.operator_traits import ACCUMULATIONS, of_reducer
from msprobe_engine.find.difference.harmless import bridges
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.measure import distances, factorize, roundoff

Bools = npt.NDArray[np.bool_]
_NULL = str(type(None))
HIDDEN = -9e3
"""Scores of at most this are those that a mask hides: in float16 it is about -1e4."""

_VISIBLE = 0.05
"""The largest visible scores of two runs are this near, in parts of them; a softmax that is given others says so."""

_ROUNDED = 2.0**-6
"""The number that hides scores may be rounded to a dtype of 16 bits, and a score be added to it."""


def results_of_one_side(walker: PairedRank) -> None:
    """A result that one side has none of (the weights of an attention that a fused one does not give) is not compared in a forward
    call: who uses it will be off. In the backward pass it is a gradient that is missing."""
    m = walker.measured
    for pair in np.flatnonzero(np.isinf(m.distance)).tolist():
        if _is_result_of_one_side(walker, pair):
            m.leave_out(pair)


def _is_result_of_one_side(walker: PairedRank, pair: int) -> bool:
    """One side has a tensor for a result of a forward call, and the other has none."""
    row, golden_row = walker.rows[pair]
    if walker.side.role[row] != OUTPUT or walker.target.kinds[walker.side.op[row]][0] != "forward":
        return False
    return isinstance(walker.side.shape[row], list) != isinstance(walker.golden.side.shape[golden_row], list)


def without_effect(walker: PairedRank, alone: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    """Rows without a partner, but for arguments of calls whose results are the same, or stand for different numbers: what one side says
    by an argument the other one says by its default, or in another call; and but for the argument that tells a call to repeat what it is
    given."""

    def tells(side: DumpTable, row: int, op: int) -> bool:
        if row not in side.values or side.role[row] != INPUT:
            return True
        if op in walker.repeating and side.values[row] is True:
            return walker.is_off(op)
        given = walker.result_pairs(op)
        return not given or bool(walker.measured.distance[given].any())

    target_rows, golden_rows = alone
    remaining = [row for row in target_rows if tells(walker.side, row, walker.side.op[row])]
    return remaining, [row for row in golden_rows if tells(walker.golden.side, row, walker.back.get(walker.golden.side.op[row], -1))]


def given_by_one_side(walker: PairedRank, alone: tuple[list[int], list[int]]) -> tuple[Bools, tuple[list[int], list[int]]]:
    """What needs no partner: a result in place of which the other side gives none (the weights of an attention, what a recomputation does
    not come to), beside another result of the call that is compared or where another record of its own side holds it, too, so that who uses
    it is compared; the gradient of such a result. And what a forward call takes in and its partner is not given (a mask, for another kernel
    of attention): what they give is compared.

    Args:
        alone: rows of matched records without a partner, of both sides.

    Returns:
        bool (pairs of rows,): such a one is one of the pair; `alone` without the gradients of such results.
    """
    given = np.zeros(len(walker.rows), bool)
    given[walker.so_far] = True
    holders = cache(lambda in_target: records_by_content(walker.side if in_target else walker.golden.side))
    without: tuple[set[str], set[str]] = set(), set()  # gradients of what the other side does not give
    for pair, (row, golden_row) in enumerate(walker.rows):
        in_target = isinstance(walker.side.shape[row], list)
        op, role = walker.side.op[row], walker.side.role[row]
        if in_target == isinstance(walker.golden.side.shape[golden_row], list) or walker.target.kinds[op][0] != "forward":
            continue
        (side, full), (absent, lost) = ((walker.side, row), (walker.golden.side, golden_row))[:: 1 if in_target else -1]
        if absent.values.get(lost) is not None or absent.dtype[lost] not in (None, _NULL):
            continue
        is_compared = any(walker.measured.compared[result_pair] for result_pair in walker.result_pairs(op))
        tree = walker.target if in_target else walker.golden
        if role == OUTPUT and (is_compared or stands_elsewhere(tree, full, holders(in_target))):
            given[pair] = True
            without[not in_target].add(forward_twin(side.name[full].replace(".output", ".gradient")))
        elif role == INPUT:
            given[pair] = is_compared
    remaining = [
        [row for row in rows if forward_twin(side.name[row]).replace(".input", ".gradient") not in names]
        for rows, side, names in zip(alone, (walker.side, walker.golden.side), without)
    ]
    return given, (remaining[0], remaining[1])


def records_by_content(side: DumpTable) -> dict[Hashable, list[int]]:
    """Digest of a tensor, and its statistics -> the records that hold it."""
    records: dict[Hashable, list[int]] = {}
    numbers = side.stats + 0.0  # -0.0 is 0.0
    is_complete = np.asarray(~np.isnan(numbers).any(1)).tolist()
    for row, (digest, op) in enumerate(zip(side.md5, side.op)):
        if digest:
            records.setdefault(digest, []).append(op)
        if is_complete[row]:
            records.setdefault(numbers[row].tobytes(), []).append(op)
    return records


def content_of(side: DumpTable, row: int) -> Hashable:
    """Key of a row in `records_by_content`."""
    return side.md5[row] or (side.stats[row] + 0.0).tobytes()


def stands_elsewhere(tree: Tree, row: int, holders: Mapping[Hashable, Sequence[int]]) -> bool:
    """The tensor of a row is that of a row of another record, too, other than of modules around it."""
    side, op = tree.side, tree.side.op[row]
    around = {op, *tree.above(op)}
    return any(holder not in around for holder in holders.get(content_of(side, row), ()))


def buckets(walker: PairedRank) -> None:
    """Buckets of gradients of other sizes, and how many there are, say nothing of the numbers of the training."""
    side, m = walker.side, walker.measured
    for op, _ in walker.structure.pairs:
        for pair in walker.span_of(op) if of_reducer(side.ops[op]) else ():
            row = walker.rows[pair][0]
            if m.shape[pair] or not (roundoff.eps(side.dtype[row]) or m.argument[pair]):
                m.leave_out(pair)
                m.shape[pair] = False


def masks_of_scores(walker: PairedRank) -> None:
    """Masks that hide scores by another number on one side than on the other (minus infinity, -1e4), and scores that they have hidden some
    of: the statistics are those of the number, and the softmax behind them tells. Where the runs make the same calls, the numbers are
    those that calls are given, or masks hold."""
    side, golden, m = walker.side, walker.golden.side, walker.measured
    target_rows, golden_rows = factorize.columns(walker.rows)
    (target_top, target_low), (golden_top, golden_low) = side.stats[target_rows, :2].T, golden.stats[golden_rows, :2].T
    hides = (m.distance > 0) & (target_low <= HIDDEN) & (golden_low <= HIDDEN) & (target_low != golden_low)
    given = _find_hiding_numbers(walker)
    for pair in np.flatnonzero(hides & (target_top == 0) & (golden_top == 0) & ~m.argument).tolist():
        target_share, golden_share = (_hidden_share(table, row) for table, row in zip((side, golden), walker.rows[pair]))
        if np.isclose(target_share, golden_share):
            given[pair] = target_low[pair], golden_low[pair]
    if not (given or walker.extra or walker.missing):
        return
    masked = hides & ~m.argument
    if not (walker.extra or walker.missing):
        masked &= np.any([np.isclose(target_low, t, _ROUNDED) & np.isclose(golden_low, g, _ROUNDED) for t, g in given.values()], axis=0)
    for pair in np.flatnonzero(masked).tolist():
        row, golden_row = walker.rows[pair]
        near = abs(target_top[pair] - golden_top[pair]) <= _VISIBLE * max(abs(target_top[pair]), abs(golden_top[pair]))
        if near and row not in side.nans and golden_row not in golden.nans:
            m.leave_out(pair, nonfinite=True)
    for pair, numbers in given.items():
        m.leave_out(pair)
        m.argument[pair] = False
        walker.hidden_by = walker.hidden_by or (side.name[walker.rows[pair][0]], *numbers)


def _hidden_share(side: DumpTable, row: int) -> float:
    """The part of a mask's elements that hide, where the others are 0."""
    _, low, mean, _ = side.stats[row]
    return float(mean / low) if np.isfinite(mean) else side.infs.get(row, np.nan) / distances.elements(side.shape[row])


def _find_hiding_numbers(walker: PairedRank) -> dict[int, tuple[float, float]]:
    """Pair of rows -> another number on either side that a call is given, and that is the least of what it gives, or does not show there:
    a number that stands for what a mask hides."""
    side, golden, given = walker.side, walker.golden.side, dict[int, tuple[float, float]]()
    for pair in np.flatnonzero(walker.measured.argument).tolist():
        row, golden_row = walker.rows[pair]
        numbers = [number for number in (side.values.get(row), golden.values.get(golden_row)) if isinstance(number, (int, float))]
        if (
            len(numbers) == 2
            and max(numbers) <= HIDDEN
            and all(_is_least_result(walker, result, numbers) for result in walker.result_pairs(side.op[row]))
        ):
            given[pair] = float(numbers[0]), float(numbers[1])
    return given


def _is_least_result(walker: PairedRank, pair: int, numbers: Sequence[float]) -> bool:
    """Two numbers are the least ones of a result of either side; or the results are the same."""
    least = [table.stats[row, 1] for table, row in zip((walker.side, walker.golden.side), walker.rows[pair])]
    return not walker.measured.distance[pair] or bool(np.isclose(least, numbers, rtol=_ROUNDED).all())


def finished_by_other_calls(walker: PairedRank) -> None:
    """Where calls of one side alone make of a result what the other side's call gives by itself (a sum, divided afterwards, and a mean),
    the results stand for different numbers, and so do the gradients that come back to them. Likewise in the backward pass: a gradient that
    is divided behind a call on one side, and before it on the other."""
    m = walker.measured
    for pair in np.flatnonzero(m.distance > 0).tolist():
        row, golden_row = walker.rows[pair]
        op = walker.side.op[row]
        kind = walker.target.kinds[op]
        if walker.side.role[row] != OUTPUT or len(kind) != 3 or kind[0] not in ("forward", "backward"):
            continue
        if op > walker.target.last_backward:  # what an update gives goes into copies in another dtype
            continue
        if bridges.near(walker.side.stats[row], walker.golden.side.stats[golden_row], roundoff.eps(walker.side.dtype[row])):
            continue  # they stand for the same number
        finished = [
            bridges.leads_to(tree, users, start, alone, wanted.stats[wanted_row])
            for tree, users, start, alone, wanted, wanted_row in (
                (walker.target, walker.users[0], op, walker.extra, walker.golden.side, golden_row),
                (walker.golden, walker.users[1], walker.golden.side.op[golden_row], walker.missing, walker.side, row),
            )
        ]
        if not any(finished):
            continue
        walker.finished |= finished[0]
        m.leave_out(pair)
        if kind[0] == "backward":
            passed = finished[0] | {walker.back.get(golden_op, -1) for golden_op in finished[1]}
            m.leave_out([other for record in (op, *passed) for other in walker.span_of(record)])
            continue
        given = _made_by_one_side(walker, op)
        shapes = [walker.side.shape[walker.rows[other_pair][0]] for other_pair in given]
        back = [
            other_pair
            for other_pair in walker.span_of_twin(op)
            if walker.side.role[row := walker.rows[other_pair][0]] == INPUT or walker.side.shape[row] in shapes
        ]
        numbers = {walker.side.stats[walker.rows[other_pair][0]].tobytes() for other_pair in (pair, *given, *back)} if given else set()
        for module in walker.target.above(op) if given else ():  # a module takes in what the calls in it do
            spans = (*walker.span_of(module), *walker.span_of_twin(module))
            back += [other_pair for other_pair in spans if walker.side.stats[walker.rows[other_pair][0]].tobytes() in numbers]
        m.leave_out([*given, *back])


def _made_by_one_side(walker: PairedRank, op: int) -> list[int]:
    """Pairs of rows that a record takes in and that a call of one side alone has made (scaled before, where the other side scales the
    result)."""
    made = []
    for pair in walker.span_of(op):
        row, golden_row = walker.rows[pair]
        alone = walker.target.producers.get(row) in walker.extra or walker.golden.producers.get(golden_row) in walker.missing
        if alone and walker.side.role[row] == INPUT and isinstance(walker.side.shape[row], list):
            made.append(pair)
    return made


def shares_of_gradients(walker: PairedRank) -> None:
    """Where one side calls a function of the same tensor several times and the other one once (``x.float()``, kept or not), the backward
    pass of each gives a share of the gradient that the other side has as a whole: their sum goes on to what made the tensor."""
    target_by_op, golden_by_op = (_calls_of_one_tensor(tree) for tree in (walker.target, walker.golden))
    m = walker.measured
    for op, golden_op in walker.structure.pairs:
        target_calls, golden_calls = target_by_op.get(op), golden_by_op.get(golden_op)
        if target_calls is None or golden_calls is None or len(target_calls) == len(golden_calls):
            continue
        m.leave_out(walker.span_of_twin(op), nonfinite=True)


def _calls_of_one_tensor(tree: Tree) -> dict[int, list[int]]:
    """Record of a forward call of a function -> all calls of that function of the same tensors."""
    side, groups = tree.side, dict[tuple[object, ...], list[int]]()
    for op, kind in enumerate(tree.kinds):
        if not calls_function(kind):
            continue
        taken = tree.tensors_in(op)
        sources = [tree.producers.get(row) for row in taken]
        if taken and None not in sources:
            groups.setdefault((kind, *sources, *(side.stats[row].tobytes() for row in taken)), []).append(op)
    return {op: calls for calls in groups.values() for op in calls}


def sums_so_far(walker: PairedRank) -> list[int]:
    """Pairs of rows that stand for different parts of a sum, which are not compared: where two sides add up in different orders (a loop
    over experts), what is there before and after each part; the whole is compared where it is used."""
    groups: dict[tuple[Kind, int], list[tuple[int, int]]] = {}
    for op, other in walker.structure.pairs:
        if walker.target.kinds[op][-1] in ACCUMULATIONS and calls_function(walker.target.kinds[op]):
            groups.setdefault((walker.target.kinds[op], walker.target.parents[op]), []).append((op, other))
    without: list[int] = []
    for group in groups.values():
        if all(earlier[1] < later[1] for earlier, later in pairwise(group)):
            continue
        for op in _find_chained_sums(walker.target, {op for op, _ in group}):
            name, back = walker.side.ops[op], walker.side.ops[walker.target.twin(op) or op]
            places = f"{name}.input.0", f"{name}.output.", f"{back}.output.0"
            spans = (*walker.span_of(op), *walker.span_of_twin(op))
            without += [pair for pair in spans if walker.side.name[walker.rows[pair][0]].startswith(places)]
    walker.measured.leave_out(without)
    return without


def _find_chained_sums(tree: Tree, ops: set[int]) -> list[int]:
    """Those of some calls that add to what another one of them gave, or give what another one adds to."""
    side = tree.side
    links = {op: source for op in ops for row in side.rows(op)[:1] if (source := tree.producers.get(row)) in ops}
    return sorted({*links, *links.values()})
