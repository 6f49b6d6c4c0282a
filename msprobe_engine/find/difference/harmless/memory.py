"""Memory whose content is no number of the training: nobody has written it, or a call writes over it before it is read."""

from __future__ import annotations

import numpy as np

from msprobe_engine.align.calls.call_tree import calls_function
from msprobe_engine.core import names
from msprobe_engine.core.operator_traits import CASTS, HANDS_ON, MOVES, OVERWRITES, UNINITIALISED
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT
from msprobe_engine.measure import distances

_DEEPEST = 8
"""So many parts of parts are looked through."""

_PARTS = frozenset(("narrow", "view", "view_as", "reshape", "__getitem__", "split", "chunk", "unbind", "as_strided"))
"""Calls that give a part of a tensor, or another form of it, in the same memory."""


def unwritten_memory(walker: PairedRank) -> None:
    """NaN and Inf of one side that stand in parts of buffers and in copies of them only are memory that nobody has written, where calls
    behind them go on with numbers that are finite on both sides. A row with a NaN and a finite norm is damage."""
    m, op = walker.measured, walker.side.op
    bad = np.flatnonzero(m.bad_target ^ m.bad_golden).tolist()
    if not bad or not all(_may_be_unwritten(walker, op[walker.rows[pair][0]]) for pair in bad):
        return
    rows = np.asarray(walker.rows)[bad]
    norms = np.where(m.bad_target[bad], walker.side.stats[rows[:, 0], 3], walker.golden.side.stats[rows[:, 1], 3])
    if np.isfinite(norms).any():
        return
    last = max(op[walker.rows[pair][0]] for pair in bad)
    behind = (pair for pair, (row, _) in enumerate(walker.rows) if op[row] > last and m.known[pair] and walker.side.role[row] == OUTPUT)
    if any(not hands_on(walker, op[walker.rows[pair][0]]) for pair in behind):
        m.leave_out(bad, nonfinite=True)


def _may_be_unwritten(walker: PairedRank, op: int) -> bool:
    """A buffer, or what was copied from one; not what was made of a number."""
    function = _function_of(walker, op)
    moves = function in MOVES or function in CASTS  # a table of embeddings is no buffer
    return moves and (function in UNINITIALISED or not walker.target.makes_of_numbers(op))


def is_written_over(walker: PairedRank, op: int, depth: int = 0) -> bool:
    """A part of a buffer, which whoever takes it in writes over: what stands in it says nothing."""
    if not gives_part(walker, op):
        return False
    users = walker.users[0].get(op, ())
    if not users:
        return _is_filled_by_collective(walker, op)
    return all(_first_input(walker, user, op) and _writes_over(walker, user, depth) for user in users)


def _is_filled_by_collective(walker: PairedRank, op: int, depth: int = 0) -> bool:
    """The call right behind this one is a collective that writes what it brings into a tensor that it is given, which its record leaves
    out, and what it brings has this shape; or another part of this one comes between. The buffer that Megatron keeps for all gathered
    tensors holds the last one until then."""
    side, behind = walker.side, op + 1
    first = next(iter(side.rows(behind)), -1) if behind < len(side.ops) else -1
    given = next((row for row in side.rows(op) if side.role[row] == OUTPUT), -1)
    if min(first, given) < 0 or side.role[first] != INPUT:
        return False
    if gives_part(walker, behind) and side.stats[first].tobytes() == side.stats[given].tobytes():
        return depth < _DEEPEST and _is_filled_by_collective(walker, behind, depth + 1)
    filled = next((row for row in side.rows(behind) if side.role[row] == OUTPUT), -1)
    if not names.is_collective(side.ops[behind]) or isinstance(side.shape[first], list) or filled < 0:
        return False
    return (side.shape[given], side.dtype[given]) == (side.shape[filled], side.dtype[filled])


def _writes_over(walker: PairedRank, op: int, depth: int) -> bool:
    return walker.target.kinds[op][-1] == "copy_" or (depth < _DEEPEST and is_written_over(walker, op, depth + 1))


def is_destination(walker: PairedRank, row: int) -> bool:
    """What a tensor held before a call that writes over all of it (``out=`` of any call) goes nowhere."""
    function, name = _function_of(walker, walker.side.op[row]), walker.side.name[row]
    if walker.side.role[row] != INPUT:
        return False
    return function in OVERWRITES or name.endswith(".input.out") or (function == "copy_" and name.endswith(".input.0"))


def is_moved_or_written_over(walker: PairedRank, row: int) -> bool:
    """A call that computes nothing takes the row in or gives it out."""
    return _function_of(walker, walker.side.op[row]) in MOVES or is_destination(walker, row)


def gives_less(walker: PairedRank, op: int) -> bool:
    """All that a record gives has fewer elements than what it takes in."""
    side = walker.side
    sizes: tuple[list[int], list[int]] = [], []
    for row in side.rows(op):
        if isinstance(side.shape[row], list):
            sizes[side.role[row] == OUTPUT].append(distances.elements(side.shape[row]))
    return bool(sizes[0]) and bool(sizes[1]) and max(sizes[1]) < max(sizes[0])


def hands_on(walker: PairedRank, op: int) -> bool:
    function = _function_of(walker, op)
    return function in MOVES or function in HANDS_ON


def gives_part(walker: PairedRank, op: int) -> bool:
    return _function_of(walker, op) in _PARTS


def _function_of(walker: PairedRank, op: int) -> str:
    """Name of the function that a record is a forward call of; "" of any other record."""
    kind = walker.target.kinds[op]
    return kind[2] if calls_function(kind) else ""


def _first_input(walker: PairedRank, user: int, source: int) -> bool:
    """What a record takes in of another one is its first tensor, and nothing else."""
    taken = [row for row in walker.side.rows(user) if walker.target.producers.get(row) == source]
    return [walker.side.name[row].rpartition(".input.")[2] for row in taken] == ["0"]
