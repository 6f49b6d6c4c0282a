"""Gradients on their way to the update, in buffers of this run's own making: buckets, flat copies, parts of them, and copies back.

Which of them there are, how large they are and in which order they are filled is no number of the training. Where what the update computes
with is the same, a difference in the copies before it comes to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from msprobe_engine.align.calls.call_tree import calls_function
from msprobe_engine.core.names import is_collective
from msprobe_engine.core.operator_traits import MOVES, SCALINGS, of_reducer
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.formats.dump.dump_table import INPUT
from msprobe_engine.measure import roundoff

_WRITES = "__setitem__"

_LEAST = 0.5
"""Of the calls of an update that compute, this part has to be compared for the update to be called the same."""


def comes_to_nothing(walker: PairedRank, op: int) -> bool:
    """A copy or a buffer of gradients, of which everything that computes with it, or the update as a whole, is the same on both sides."""
    if of_reducer(walker.side.ops[op]) and gives_the_same(walker, op):
        return True  # what each rank puts in may have been summed with some of the others before
    if not walker.one_layout and _is_table_of_rank(walker, op):
        return True
    scales = walker.target.kinds[op][-1] in SCALINGS  # the decay of a weight is no copy, whether it could be compared or not
    if not _is_copy(walker, op) or (scales and not any(walker.measured.shape[pair] for pair in walker.span_of(op))):
        return False
    users = list(_that_compute(walker, op))
    if users:
        return all(_agrees(walker, user) for user in users)
    update = [call for call in _update(walker) if call > op]
    known = [call for call in update if _is_known(walker, call)]
    return len(known) > 0 and len(known) >= _LEAST * len(update) and all(_agrees(walker, call) for call in known)


def _is_table_of_rank(walker: PairedRank, op: int) -> bool:
    """Entries that a rank writes into a table that nothing computes with (losses of its layers, for the log): ranks of another layout have
    others to write."""
    if walker.target.kinds[op][-1] != _WRITES:
        return False
    side = walker.side
    written = side.stats[side.rows(op)[0]].tobytes()
    users = (row for row in range(side.rows(op).stop, len(side)) if side.role[row] == INPUT and side.stats[row].tobytes() == written)
    return all(walker.target.kinds[side.op[row]][-1] in (_WRITES, "__getitem__") for row in users)


def _is_copy(walker: PairedRank, op: int) -> bool:
    """A call that moves elements of a tensor, or scales or sums a buffer that the other side has not got in this size, and that no module
    makes."""
    tree = walker.target
    kind = tree.kinds[op]
    if not calls_function(kind) or op < tree.first_backward or tree.makes_of_numbers(op):
        return False
    if any(len(tree.kinds[enclosing]) == 4 and tree.kinds[enclosing][0] == "forward" for enclosing in tree.above(op)):
        return False
    if kind[2] in MOVES:
        return True
    m = walker.measured
    if op not in walker.extra and not any(m.shape[pair] or not m.known[pair] for pair in _find_input_pairs(walker, op)):
        return False
    if not is_collective(walker.side.ops[op]):
        return kind[2] in SCALINGS
    # of a buffer of another size the result has another size, too
    return all(m.shape[pair] or not m.known[pair] for pair in walker.result_pairs(op))


def _that_compute(walker: PairedRank, op: int) -> Iterator[int]:
    """What is computed from the result of a copy, through further copies."""
    users, seen = [op], {op}
    while users:
        for user in walker.users[0].get(users.pop(), ()):
            if user in seen:
                continue
            seen.add(user)
            if _is_copy(walker, user):
                users.append(user)
            else:
                yield user


def _update(walker: PairedRank) -> list[int]:
    """Calls behind the backward pass that compute with tensors."""
    tree, side = walker.target, walker.side
    behind = range(tree.last_backward + 1, len(tree.kinds))
    compute = (op for op in behind if len(tree.kinds[op]) == 3 and tree.kinds[op][2] not in MOVES)
    return [op for op in compute if any(side.role[row] == INPUT and roundoff.eps(side.dtype[row]) for row in side.rows(op))]


def _is_known(walker: PairedRank, op: int) -> bool:
    """Tensors that a call takes in could be compared."""
    taken = _find_input_pairs(walker, op)
    return bool(taken) and all(walker.measured.known[pair] for pair in taken)


def gives_the_same(walker: PairedRank, op: int) -> bool:
    """All that a record gives out could be compared, and agrees."""
    given = walker.result_pairs(op)
    return bool(given) and all(walker.measured.known[pair] for pair in given) and not walker.is_off(op)


def _find_input_pairs(walker: PairedRank, op: int) -> list[int]:
    """Pairs of rows of the tensors of floating point numbers that a call takes in."""
    side = walker.side
    return [
        pair for pair in walker.span_of(op) if side.role[walker.rows[pair][0]] == INPUT and roundoff.eps(side.dtype[walker.rows[pair][0]])
    ]


def _agrees(walker: PairedRank, op: int) -> bool:
    return _is_known(walker, op) and all(walker.carried.ratio[pair] <= 1 for pair in walker.span_of(op)) and not walker.is_off(op)
