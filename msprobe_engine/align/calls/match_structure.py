"""Rows of records that belong together by structure, by role and place; what one side only has is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from msprobe_engine.align.calls.alignment import align_trees
from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.calls.row_order import Pairs
from msprobe_engine.align.calls.structure import Aligned
from msprobe_engine.align.frameworks.common_terms import several
from msprobe_engine.align.mapping.api import ApiMapping, functions
from msprobe_engine.align.mapping.cell import CellMapping
from msprobe_engine.align.mapping.data import DataMapping, module_place
from msprobe_engine.formats.dump.dump_table import INPUT, DumpTable
from msprobe_engine.measure import factorize

BY_PLACE = "One side was given this argument by position, the other by name."


def match_rows(
    target: DumpTable, golden: DumpTable, cell: CellMapping | None, api: ApiMapping | None, data: DataMapping | None, layered: bool
) -> tuple[Pairs, dict[str, str], Aligned | None]:
    """Match.

    Args:
        target, golden: the sides.
        cell, api: how records of the target are called on the golden side.
        data: rows that belong together whatever the structure says.
        layered: `data` is all there is: rows that it leaves without a partner have none.

    Returns:
        Rows in the order of execution of the target, each row of the golden side without a partner behind its predecessor; modules
        (``path.Class``) that are called otherwise on the golden side; and which records belong together, when the structure said so.
    """
    names, places = taken_for(target, golden, cell, api)
    tree, other = Tree(target, names), Tree(golden)
    renamed: dict[str, str] = {}
    order = np.array(execution_order(tree), np.int64)
    ops = np.column_stack((order, np.full_like(order, -1)))
    aligned = None
    if not layered:
        aligned = align_trees(tree, other)
        partners = np.full(len(order), -1)
        for op, match in aligned.structure.pairs:
            partners[op] = match
        renamed = renamed_modules(aligned)
        ops[:, 1] = partners[order]
    pairs = _rows(target, golden, ops, places, _find_mapped_rows(target, golden, data))
    return pairs.with_rest(_in_order(golden, other)), renamed, aligned


def renamed_modules(aligned: Aligned) -> dict[str, str]:
    """``path.Class`` of modules of the target -> what their partners are called, where that differs."""
    renamed: dict[str, str] = {}
    target, golden = aligned.target.side, aligned.golden.side
    for op, match in aligned.structure.pairs:
        if target.ops[op] == golden.ops[match] or several(target, op) or several(golden, match):
            continue
        target_place, golden_place = module_place(target.ops[op]), module_place(golden.ops[match])
        if target_place is not None and golden_place is not None and target_place != golden_place:
            renamed.setdefault(target_place, golden_place)
    return renamed


def aligned_rows(aligned: Aligned, data: DataMapping | None) -> Pairs:
    """Rows of two sides in common terms, in the order of execution of the target; rows that a data mapping names go where it says."""
    target, golden = aligned.target.side, aligned.golden.side
    fixed = _find_mapped_rows(target, golden, data)
    taken = {row for row in fixed.values() if row >= 0}
    partners = dict(aligned.structure.pairs)
    pairs = Pairs()
    for op in execution_order(aligned.target):
        other = partners.get(op, -1)
        free = {golden.positions[row]: row for row in golden.rows(other) if row not in taken} if other >= 0 else {}
        for row in target.rows(op):
            pairs.add(row, fixed[row] if row in fixed else free.get(target.positions[row], -1))
    return pairs.with_rest(_in_order(golden, aligned.golden))


def _rows(target: DumpTable, golden: DumpTable, ops: factorize.Integers, places: dict[int, str] | None, fixed: dict[int, int]) -> Pairs:
    """Rows of all records in their order; `ops` has -1 for those that nothing matches."""
    simple = ops[:, 1] >= 0 if not places and not fixed else np.zeros(len(ops), bool)
    target_rows, golden_rows, starts, apart = factorize.pair_rows(target, golden, ops[simple])
    begins = np.zeros(len(ops) + 1, np.int64)
    begins[1:][simple] = np.diff(starts)
    begins = np.cumsum(begins)
    simple[simple] = ~apart
    pairs = Pairs()
    taken = set(fixed.values())
    written = 0
    for position in np.flatnonzero(~simple).tolist():
        start = int(begins[position])
        pairs.extend(target_rows[written:start], golden_rows[written:start])
        written = start
        _record(pairs, target, golden, int(ops[position, 0]), int(ops[position, 1]), places, fixed, taken)
    pairs.extend(target_rows[written:], golden_rows[written:])
    return pairs


def execution_order(tree: Tree) -> list[int]:
    """Records in the order of execution: parameter gradients stand where their module's last backward call ends, not where the file has
    a place for them; gradients of single saved tensors behind all of these, those of the last first."""
    saved = [op for op, kind in enumerate(tree.kinds) if kind[0] == "debug" and kind[2] == "grad"]
    if saved:
        behind = set(saved)
        return [op for op in range(len(tree.kinds)) if op not in behind] + saved[::-1]
    if not any(tree.gradients):
        return list(range(len(tree.gradients)))
    ends = {kind[2]: op for op, kind in enumerate(tree.kinds) if len(kind) == 4 and kind[0] == "backward"}
    keys = []
    for op, (kind, gradients) in enumerate(zip(tree.kinds, tree.gradients)):
        keys.append((max(ends.get(kind[2], op), op) if gradients else op, gradients, op))
    return [op for _, _, op in sorted(keys)]


def _in_order(side: DumpTable, tree: Tree) -> factorize.Integers:
    order = np.array(execution_order(tree), np.int64)
    first_rows = factorize.firsts(side)
    return factorize.spread(first_rows[order], first_rows[order + 1] - first_rows[order])


def taken_for(
    target: DumpTable, golden: DumpTable, cell: CellMapping | None, api: ApiMapping | None
) -> tuple[list[str] | None, dict[int, str] | None]:
    """Names of the target's records on the golden side (None: their own), and places of the rows that an api mapping moves."""
    if api is not None:
        known = functions(golden)
        names = [api.record_name(name, known) for name in target.ops]
        places = {}
        if api.entries:
            rows = [row for row in range(len(target)) if ".".join(target.ops[target.op[row]].split(".", 2)[:2]) in api.entries]
            records = [target.ops[target.op[row]] for row in rows]
            keys = api.row_names([target.name[row] for row in rows], records, golden)
            places = {row: key[len(names[target.op[row]]) :] for row, key in zip(rows, keys)}
        if cell is not None:
            names = [cell.record_name(name) for name in names]
        return names, places
    return (None if cell is None else [cell.record_name(name) for name in target.ops]), None


def _find_mapped_rows(target: DumpTable, golden: DumpTable, data: DataMapping | None) -> dict[int, int]:
    """Rows of the target that a data mapping names -> their rows of the golden side, -1 when that has no such row."""
    if data is None:
        return {}
    index = {name: row for row, name in enumerate(golden.name)}
    mapped = {}
    for row, name in enumerate(target.name):
        golden_name = data.row_name(name, "")
        if golden_name:
            mapped[row] = index.get(golden_name, -1)
    return mapped


def _record(
    pairs: Pairs,
    target: DumpTable,
    golden: DumpTable,
    op: int,
    match: int,
    places: dict[int, str] | None,
    fixed: dict[int, int],
    taken: set[int],
) -> None:
    target_rows = target.rows(op)
    if match < 0:
        for row in target_rows:
            pairs.add(row, fixed.get(row, -1))
        return
    target_cut, golden_cut = len(target.ops[op]), len(golden.ops[match])
    golden_rows = golden.rows(match)
    target_places = [places[row] if places and row in places else target.name[row][target_cut:] for row in target_rows]
    golden_places = [golden.name[row][golden_cut:] for row in golden_rows]
    if not fixed and target_places == golden_places:
        pairs.extend(np.arange(target_rows.start, target_rows.stop), np.arange(golden_rows.start, golden_rows.stop))
        return
    free = {(golden.role[row], place): row for row, place in zip(golden_rows, golden_places) if row not in taken}
    matches = {
        row: fixed[row] if row in fixed else free.pop((target.role[row], place), -1) for row, place in zip(target_rows, target_places)
    }
    by_place = _arguments(target, golden, [row for row in target_rows if matches[row] < 0 and row not in fixed], sorted(free.values()))
    for row in target_rows:
        pairs.add(row, by_place.get(row, matches[row]), BY_PLACE if row in by_place else "")


def _arguments(target: DumpTable, golden: DumpTable, target_rows: Sequence[int], golden_rows: Sequence[int]) -> dict[int, int]:
    """Inputs that are left on both sides, when they are as many and of the same shapes in the same order: the same arguments, given by
    position on one side and by name on the other."""
    target_inputs = [row for row in target_rows if target.role[row] == INPUT]
    golden_inputs = [row for row in golden_rows if golden.role[row] == INPUT]
    if len(target_inputs) != len(golden_inputs) or [target.shape[row] for row in target_inputs] != [
        golden.shape[row] for row in golden_inputs
    ]:
        return {}
    return dict(zip(target_inputs, golden_inputs))
