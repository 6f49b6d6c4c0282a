"""Gradients of which each stage of a pipeline has a share.

The embedding of the first stage and the output layer of the last may hold the same weights. Each stage has gradients of its own use of
them, and adds those of the other only after all micro batches; one process has never seen them apart. What such a sum over stages takes in,
and what it was added up from, is marked.
"""

from __future__ import annotations

from collections.abc import Iterator

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.align.parallel.parameter_owner import Mark, Owner, owner_of
from msprobe_engine.align.parallel.parameter_owner import mark as known_by
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, PARAMETERS_GRAD, DumpTable

SHARE = "share"
"""Key among the facts of a row: it is part of a sum over stages of a pipeline that is still to come."""


def mark(side: DumpTable, ranks: set[int]) -> None:
    """Put `SHARE` among the facts of all such rows.

    Args:
        side: of a whole pipeline, with records in the order of one process.
        ranks: of its stages.
    """
    _by_weights(side)
    for op in reversed(range(len(side.ops))):
        if side.ops[op].startswith("Distributed.all_reduce") and _over_stages(side, op, ranks):
            for row in side.rows(op):
                if side.role[row] == INPUT and (sum_mark := known_by(side, row)) is not None:
                    _back(side, op, sum_mark)
                    break


def _by_weights(side: DumpTable) -> None:
    """Where calls of collectives were not recorded: matrices with the same numbers in modules of two stages are one weight, and the
    gradients of each are its share."""
    stages: dict[Mark, set[int]] = {}
    holders: dict[Mark, set[Owner]] = {}
    kinds = Tree(side).kinds
    for row, shape in enumerate(side.shape):
        if side.role[row] == PARAMETERS and isinstance(shape, list) and len(shape) > 1 and (known := known_by(side, row)) is not None:
            stages.setdefault(known, set()).add(_rank(side, side.op[row]))
            holders.setdefault(known, set()).add(owner_of(side, row, kinds[side.op[row]]))
    shared = {owner for known, owners in holders.items() if len(stages[known]) > 1 for owner in owners}
    gradients = (row for row in range(len(side)) if shared and side.role[row] == PARAMETERS_GRAD)
    _mark_shares(side, (row for row in gradients if owner_of(side, row, kinds[side.op[row]]) in shared))


def _over_stages(side: DumpTable, op: int, ranks: set[int]) -> bool:
    groups = [side.extra.get(row, {}).get("group_ranks") for row in side.rows(op)]
    return any(isinstance(group, list) and len(ranks & set(group)) > 1 for group in groups)


def _back(side: DumpTable, end: int, sum_mark: Mark) -> None:
    """Mark what the tensor was added up from."""
    rank = _rank(side, end)
    marks = {sum_mark}
    for op in reversed(range(end)):
        if _rank(side, op) != rank:
            continue
        rows = side.rows(op)
        if len(rows) and side.role[rows[0]] == PARAMETERS_GRAD:
            _mark_shares(side, (row for row in rows if known_by(side, row) in marks))
        elif _adds(side.ops[op]) and any(side.role[row] == OUTPUT and known_by(side, row) in marks for row in rows):
            marks.update(row_mark for row in rows if (row_mark := known_by(side, row)) is not None and row_mark[1] == sum_mark[1])
            _mark_shares(side, (row for row in rows if known_by(side, row) is not None))


def _adds(name: str) -> bool:
    return name.startswith(("Tensor.", "Torch.")) and name.endswith(".forward")


def _rank(side: DumpTable, op: int) -> int:
    return int(side.tags.get(op, {}).get("origin", {}).get("rank", -1))


def _mark_shares(side: DumpTable, rows: Iterator[int]) -> None:
    for row in rows:
        side.extra[row] = {**side.extra.get(row, {}), SHARE: True}
