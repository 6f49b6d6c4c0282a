"""What matched records say beside numbers: values of arguments, dtypes and shapes, which tensors require a gradient, the ranks and the
reduction of a collective. The numbers may agree where one of these is another one, and the runs are not the same.

Not held against each other: ``async`` of a collective (when it is waited for), the class of a tensor (``Parameter``), and whatever two
recorders or two frameworks write in their own ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from msprobe_engine.align.calls.alignment import are_of_different_frameworks
from msprobe_engine.core.dtypes import is_bool
from msprobe_engine.core.operator_traits import CASTS, MOVES
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.difference import explain
from msprobe_engine.find.difference.harmless import bookkeeping
from msprobe_engine.find.difference.walk import DifferenceWalk
from msprobe_engine.find.findings import Suspect
from msprobe_engine.find.origin import (
    ARGUMENT,
    DTYPE,
    GRAD_FLAG,
    GROUP,
    MODULE,
    REDUCTION,
    SHAPE,
    DifferenceOrigin,
)
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.collective_record import group_of, reduction_of
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import dump_dialects, factorize, roundoff
from msprobe_engine.measure.distances import Distances, of_other_precision

Bools = npt.NDArray[np.bool_]
_MOST = 20


def find_differing_calls(walker: DifferenceWalk, step: int, rank: int) -> list[Suspect]:
    """Records of a rank of which one side says something else, in the order of the file, the first `_MOST` in words; of two frameworks
    none. Of two layouts only numbers that are no sizes (a learning rate): all else may be each layout's own."""
    if are_of_different_frameworks(walker.side, walker.golden.side):
        return []
    said = [*_of_rows(walker), *_of_collectives(walker), *_of_activations(walker)] if walker.one_layout else [*_numbers(walker)]
    buckets = {op: bookkeeping.comes_to_nothing(walker, op) for op in {origin.op for origin, _ in said if origin.kind in (ARGUMENT, SHAPE)}}
    differing = sorted((item for item in said if not buckets.get(item[0].op)), key=lambda item: item[0].op)
    put = [
        dataclasses.replace(
            explain.suspect(step, rank, origin, walker), why=why, cause=explain.cause(origin, walker) or why, distance=None, limit=None
        )
        for origin, why in differing[:_MOST]
    ]
    return put + [explain.place(step, rank, origin, walker) for origin, _ in differing[_MOST:]]


def other_dtypes(measured: Distances) -> Bools:
    """bool (pairs of rows,): dtypes that differ where most do not; else the runs are of different precision as a whole. What is null on
    one side counts here, too."""
    return measured.dtype & ~measured.argument & (not of_other_precision(measured.dtype, measured.argument))


def one_sided_collectives(walker: DifferenceWalk) -> list[str]:
    """Names of collectives of which only one side says its ranks or its reduction."""
    return [
        walker.side.ops[op] for op, values in _collectives(walker) if any((target is None) != (golden is None) for target, golden in values)
    ]


def _of_rows(walker: DifferenceWalk) -> Iterator[tuple[DifferenceOrigin, Sentence]]:
    side, golden, m = walker.side, walker.golden.side, walker.measured
    target_rows, golden_rows = factorize.columns(walker.rows)
    unlike = dump_dialects.differ(side, golden)
    target_again, golden_again = (
        np.array([table.op[row] in tree.made_again for row in rows.tolist()], bool)
        for table, tree, rows in ((side, walker.target, target_rows), (golden, walker.golden, golden_rows))
    )
    target_flags, golden_flags = (
        factorize.of_each(table.requires_grad, _sign, np.int8)[rows] for table, rows in ((side, target_rows), (golden, golden_rows))
    )
    typed = [factorize.of_each(table.dtype, bool, bool)[rows] for table, rows in ((side, target_rows), (golden, golden_rows))]
    shaped = [
        factorize.of_each(table.shape, lambda shape: shape is not None, bool)[rows]
        for table, rows in ((side, target_rows), (golden, golden_rows))
    ]
    differ = {
        ARGUMENT: m.argument,
        SHAPE: m.shape & shaped[0] & shaped[1] & typed[0] & typed[1] & (not unlike),
        DTYPE: other_dtypes(m) & typed[0] & typed[1] & ~_masks(walker) & ~_cast_elsewhere(walker) & (not unlike),
        GRAD_FLAG: (target_flags != golden_flags)
        & (target_flags >= 0)
        & (golden_flags >= 0)
        & (not unlike)
        & ~(target_again & (target_flags == 0))
        & ~(golden_again & (golden_flags == 0)),
    }
    recomputed = bool(walker.target.recomputed), bool(walker.golden.recomputed)
    if differ[GRAD_FLAG].any() and recomputed[0] != recomputed[1] and _gradients_alike(walker):
        differ[GRAD_FLAG][:] = False
    forms = _of_another_form(walker, differ[ARGUMENT])
    for kind, where in differ.items():
        where[walker.so_far] = False
        for pair in np.flatnonzero(where).tolist():
            row, golden_row = walker.rows[pair]
            if kind in (ARGUMENT, SHAPE) and side.op[row] in forms:
                continue
            if kind == GRAD_FLAG and walker.is_without_graph(side.op[row], golden.op[golden_row]):
                continue
            yield _origin(side.op[row], golden.op[golden_row], kind, row, golden_row), _why(kind, side, row, golden, golden_row)


def _of_another_form(walker: DifferenceWalk, arguments: Bools) -> set[int]:
    """Records with another argument that take in tensors of another shape: the argument says how these are to be read (``enable_gqa``).
    Their results have one shape and were compared."""
    side, golden, known = walker.side, walker.golden.side, walker.measured.known
    found = set()
    for op in {side.op[walker.rows[pair][0]] for pair in np.flatnonzero(arguments).tolist()}:
        span = walker.span_of(op)
        given = [pair for pair in span if side.role[walker.rows[pair][0]] == OUTPUT]
        other = {pair for pair in span if side.shape[walker.rows[pair][0]] != golden.shape[walker.rows[pair][1]]}
        if other and given and all(known[pair] and pair not in other for pair in given):
            found.add(op)
    return found


def _gradients_alike(walker: DifferenceWalk) -> bool:
    """The same parameters require a gradient and have one in both runs: what else requires one because one of them recomputes (a constant
    that a module makes so for the sake of it) trains nothing. False where no gradient of a parameter was recorded."""
    side, golden = walker.side, walker.golden.side
    have = [{name for name, role in zip(table.name, table.role) if role == PARAMETERS_GRAD} for table in (side, golden)]
    target_rows, golden_rows = factorize.columns(walker.rows)
    held = (pair for pair, row in enumerate(target_rows.tolist()) if side.role[row] == PARAMETERS)
    return (
        bool(have[0])
        and have[0] == have[1]
        and all(side.requires_grad[target_rows[pair]] == golden.requires_grad[golden_rows[pair]] for pair in held)
    )


def _masks(walker: DifferenceWalk) -> Bools:
    """Pairs of rows that go in as bool on one side and as numbers on the other: the two forms of a mask."""
    target_rows, golden_rows = factorize.columns(walker.rows)
    bools, floats = (
        [
            factorize.of_each(table.dtype, test, bool)[rows]
            for table, rows in ((walker.side, target_rows), (walker.golden.side, golden_rows))
        ]
        for test in (is_bool, _is_float)
    )
    taken = np.frombuffer(bytes(walker.side.role), np.uint8)[target_rows] == INPUT
    masks: Bools = taken & ((bools[0] & floats[1]) | (floats[0] & bools[1]))
    return masks


def _cast_elsewhere(walker: DifferenceWalk) -> Bools:
    """Pairs of rows of calls that only move elements, where each side makes a cast that the other one makes at another place."""
    kinds, moves = walker.target.kinds, np.zeros(len(walker.rows), bool)
    casts = [
        any(tree.kinds[op][-1] in CASTS for op in alone) for tree, alone in ((walker.target, walker.extra), (walker.golden, walker.missing))
    ]
    if all(casts):
        moves[:] = [len(kinds[op]) == 3 and kinds[op][2] in MOVES for op in (walker.side.op[row] for row, _ in walker.rows)]
    return moves


def _is_float(dtype: str | None) -> bool:
    return roundoff.eps(dtype) > 0


def _numbers(walker: DifferenceWalk) -> Iterator[tuple[DifferenceOrigin, Sentence]]:
    side, golden = walker.side, walker.golden.side
    for pair in np.flatnonzero(walker.measured.argument).tolist():
        row, golden_row = walker.rows[pair]
        are_numbers = isinstance(side.values.get(row), float) and isinstance(golden.values.get(golden_row), float)
        if are_numbers and pair not in walker.carried.explained:
            yield _origin(side.op[row], golden.op[golden_row], ARGUMENT, row, golden_row), _why(ARGUMENT, side, row, golden, golden_row)


def _why(kind: str, side: DumpTable, row: int, golden: DumpTable, other: int) -> Sentence:
    place = explain.place_of(side, row)
    if kind == ARGUMENT:
        return Sentence("{0}; the result does not show it", explain.other_argument(side, row, golden, other))
    if kind == GRAD_FLAG:
        if side.requires_grad[row]:
            return Sentence("{0} requires a gradient here and none in the golden run (frozen or detached there)", place)
        return Sentence("{0} requires no gradient here and one in the golden run (frozen or detached here)", place)
    if kind == SHAPE:
        return Sentence("{0} has shape {1}, in the golden run {2}", place, side.shape[row], golden.shape[other])
    return Sentence("{0} has dtype {1}, in the golden run {2}; no number shows it", place, side.dtype[row], golden.dtype[other])


def _of_collectives(walker: DifferenceWalk) -> Iterator[tuple[DifferenceOrigin, Sentence]]:
    back = dict(walker.structure.pairs)
    for op, (group, reduction) in _collectives(walker):
        for kind, (target, golden) in ((GROUP, group), (REDUCTION, reduction)):
            if target is None or golden is None or target == golden:
                continue
            if kind == GROUP:
                why = Sentence("a collective of {0} ranks, in the golden run of {1}: the groups are not the same", len(target), len(golden))
            else:
                why = Sentence("its reduction is {0}, in the golden run {1}; no number shows it", target, golden)
            yield _origin(op, back[op], kind, -1, -1), why


_GELUS = {
    **dict.fromkeys(("GELUActivation",), "by the error function"),
    **dict.fromkeys(("NewGELUActivation", "FastGELUActivation", "AccurateGELUActivation", "PytorchGELUTanh", "GELUTanh"), "by tanh"),
    "QuickGELUActivation": "by a sigmoid",
}
"""Classes of Transformers -> which GELU they compute: so near each other that few bits do not tell them apart."""


def _of_activations(walker: DifferenceWalk) -> Iterator[tuple[DifferenceOrigin, Sentence]]:
    """Modules at the same place that compute another GELU."""
    for op, golden_op in walker.structure.pairs:
        kind, golden_kind = walker.target.kinds[op], walker.golden.kinds[golden_op]
        target_class, golden_class = kind[-1], golden_kind[-1]
        if len(kind) != 4 or kind[0] != "forward" or not {target_class, golden_class} <= _GELUS.keys():
            continue
        if _GELUS[target_class] != _GELUS[golden_class]:
            why = Sentence(
                "the module is a {0} (GELU {1}), in the golden run a {2} (GELU {3})",
                target_class,
                _GELUS[target_class],
                golden_class,
                _GELUS[golden_class],
            )
            yield _origin(op, golden_op, MODULE, -1, -1), why


Values = tuple[tuple[tuple[int, ...] | None, tuple[int, ...] | None], tuple[str | None, str | None]]


def _collectives(walker: DifferenceWalk) -> Iterator[tuple[int, Values]]:
    """Matched collectives: what both sides say of the ranks, counted from the own one (another part of a cluster is no other group), and of
    the reduction."""
    side, golden = walker.side, walker.golden.side
    if dump_dialects.differ(side, golden):
        return
    own = [layout.rank_of(entry.path.resolve().parent.name) or 0 for entry in (side, golden)]
    for op, golden_op in walker.structure.pairs:
        if op not in side.collectives or golden_op not in golden.collectives:
            continue
        record, golden_record = side.collectives[op], golden.collectives[golden_op]
        groups = [group_of(entry) for entry in (record, golden_record)]
        if own[0] != own[1]:
            groups = [None if group is None else tuple(rank - own_rank for rank in group) for group, own_rank in zip(groups, own)]
        yield op, ((groups[0], groups[1]), (reduction_of(record), reduction_of(golden_record)))


def _origin(op: int, partner: int, kind: str, row: int, other: int) -> DifferenceOrigin:
    return DifferenceOrigin(op, partner, kind, row, other, 0.0, 0.0, 0.0)


def _sign(flag: bool | None) -> int:
    return -1 if flag is None else int(flag)
