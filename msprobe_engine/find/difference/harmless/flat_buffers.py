"""Flat buffers of gradients that one run handles in other pieces than the other one: buckets of another size."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from msprobe_engine.align.calls.call_tree import Kind, Tree, calls_function
from msprobe_engine.align.calls.structure import Structure
from msprobe_engine.align.parallel import merge_statistics
from msprobe_engine.align.parallel.merge_statistics import AGREES
from msprobe_engine.core.operator_traits import MOVES, SCALINGS
from msprobe_engine.formats.dump.dump_table import DumpTable
from msprobe_engine.measure import distances, roundoff


def without_pieces(structure: Structure, target: Tree, golden: Tree) -> Structure:
    """Calls that scale or sum up as many elements, of the same statistics together, in pieces of other sizes are no pairs, and none of
    them is missing; nor are those that move gradients into such pieces and out of them."""
    pieces = [dict[Kind, list[int]](), dict[Kind, list[int]]()]
    for tree, rows_by_kind in zip((target, golden), pieces):
        for op, row in _flat(tree):
            rows_by_kind.setdefault(tree.kinds[op], []).append(row)
    apart: tuple[set[int], set[int]] = set(), set()
    for kind in pieces[0].keys() & pieces[1].keys():
        rows = [rows_by_kind[kind] for rows_by_kind in pieces]
        sides = [
            (tree.side, some, [distances.elements(tree.side.shape[row]) for row in some]) for tree, some in zip((target, golden), rows)
        ]
        if sorted(sides[0][2]) == sorted(sides[1][2]):
            continue
        target_whole, golden_whole = (_whole(side.stats[some], sizes) for side, some, sizes in sides)
        if sum(sides[0][2]) == sum(sides[1][2]) and merge_statistics.close(target_whole, golden_whole, AGREES):
            for known, (side, some, _) in zip(apart, sides):
                known.update(side.op[row] for row in some)
    if not apart[0]:
        return structure
    for tree, known in zip((target, golden), apart):
        known.update(_moves(tree))
    return dataclasses.replace(
        structure,
        pairs=[(op, golden_op) for op, golden_op in structure.pairs if op not in apart[0] and golden_op not in apart[1]],
        only_target=[op for op in structure.only_target if op not in apart[0]],
        only_golden=[op for op in structure.only_golden if op not in apart[1]],
    )


def _flat(tree: Tree) -> Iterator[tuple[int, int]]:
    """(call, the vector that it takes in), of functions of no module, behind where the backward pass begins."""
    side = tree.side
    for op in range(min(tree.first_backward, len(tree.kinds)), len(tree.kinds)):
        kind = tree.kinds[op]
        if not calls_function(kind) or not (kind[-1] in SCALINGS or kind[1] == "Distributed"):
            continue
        row = next(iter(tree.tensors_in(op)), -1)
        if row >= 0 and _is_vector(side, row):
            yield op, row


def _moves(tree: Tree) -> Iterator[int]:
    """Calls that put gradients into such buffers, or take them out, up to the update."""
    side = tree.side
    end = tree.first_update if tree.first_update >= 0 else len(tree.kinds)
    for op in range(min(tree.first_backward, end), end):
        if not calls_function(tree.kinds[op]) or tree.kinds[op][2] not in MOVES:
            continue
        made_again = any(len(tree.kinds[above]) == 4 and tree.kinds[above][0] == "forward" for above in tree.above(op))
        if not made_again and any(_is_vector(side, row) for row in side.rows(op)):
            yield op


def _is_vector(side: DumpTable, row: int) -> bool:
    return len(side.shape[row] or ()) == 1 and side.shape[row] != [0] and roundoff.eps(side.dtype[row]) > 0


def _whole(stats: merge_statistics.Floats, sizes: list[int]) -> merge_statistics.Floats:
    """The statistics of pieces of some sizes together."""
    merged = merge_statistics.merge_pieces(stats)
    merged[2] = sum(mean * size for mean, size in zip(stats[:, 2], sizes)) / max(1, sum(sizes))
    return merged
