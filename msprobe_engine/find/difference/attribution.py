"""From the record that shows a difference to the call that is to blame for it.

A walk finds the record whose numbers part first. What made them part may be a call that only one side has, a call that was made with
another order of dimensions, a collective whose result nobody uses, or a tensor that was cut off from its gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Set

from msprobe_engine.align.calls.call_tree import Tree
from msprobe_engine.core.dtypes import is_bool, is_not_float
from msprobe_engine.core.names import forward_twin
from msprobe_engine.core.operator_traits import ACCUMULATIONS
from msprobe_engine.find.difference.paired_rank import PairedRank
from msprobe_engine.find.origin import (
    ARGUMENT,
    CHANGED,
    DEFAULT,
    EXTRA,
    GRADIENT,
    GRADLESS,
    INSIDE,
    MISSING,
    RESULT,
    TAKEN,
    UNUSED,
    DifferenceOrigin,
)
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS, DumpTable
from msprobe_engine.measure import distances

_VIEWS = frozenset((
    "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "alias",
    "contiguous", "data", "__get__", "requires_grad_", "transpose", "permute", "movedim", "swapaxes", "t", "expand",
    "expand_as", "chunk", "split", "unbind", "narrow", "select", "__getitem__", "diagonal", "unfold",
))  # fmt: skip
"""Calls that hand on the elements they are given, or some of them."""

_IN_ORDER = frozenset((
    "view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "contiguous", "clone", "to",
    "requires_grad_", "alias", "type_as",
))  # fmt: skip
"""Calls that cannot change the order of elements."""

_SHUFFLES = frozenset(("flip", "roll", "sort", "argsort", "gather", "index_select", "take", "randperm", "repeat", "tile", "rot90"))
"""Calls that are there to change the order of elements: to blame also from afar, through all calls that treat positions alike."""

_INNERMOST = 2
"""Modules around a call, in each other, whose code is the same in all layouts."""

_FAR, _FARTHEST = 8, 2000
"""Calls to go back through when elements have changed places: from one to the next, and in all."""


def attribute_to_unmatched_call(walker: PairedRank, origin: DifferenceOrigin) -> None:
    """What takes in the output of a call that only one side has: that call is the origin."""
    if origin.kind not in (TAKEN, RESULT):
        return
    target, golden = walker.target, walker.golden
    for row in (origin.row,) if origin.kind == TAKEN else walker.side.rows(origin.op):
        source = target.producers.get(row) if walker.side.role[row] == INPUT else None
        if source is not None and source in walker.extra and not _of_layout(walker, row, source):
            if (forward := _forward(walker, source)) in walker.finished:  # what it does is right; what came back to it is not
                blamed = _forward(walker, _first_extra(walker, source, origin))
            else:
                blamed = _first_extra(walker, forward, origin)
            origin.op, origin.partner, origin.kind = blamed, -1, EXTRA
            return
    if origin.kind == RESULT:
        _attribute_to_rearrangement(walker, origin)
    elif origin.other >= 0:
        writer = _writer(walker, origin)
        if writer is not None:
            origin.op, origin.partner, origin.kind = writer, -1, EXTRA
            return
        lost = golden.producers.get(origin.other)
        if lost is not None and lost in walker.missing and not adds_micro_batch(walker, lost):
            origin.partner, origin.kind = _first(golden, lost, walker.missing), MISSING
        elif lost is not None:
            _attribute_to_unused_collective(walker, origin, lost)
            call = walker.back.get(lost)
            tensor = isinstance(walker.side.shape[origin.row], list)  # else the call was made without what the other one was given
            call = None if call is not None and call > origin.op else call  # this run takes in what that call has yet to change
            if origin.kind == TAKEN and tensor:
                _own_code(walker, origin)
            if origin.kind == TAKEN and tensor and call is not None and origin.row not in target.producers and not walker.is_off(call):
                origin.op, origin.partner, origin.kind = call, lost, CHANGED
        elif golden.kinds[origin.partner][0] == "backward":
            _missing_gradient(walker, origin)
    if origin.kind == TAKEN or (origin.kind == RESULT and _takes_rearranged(walker, origin.op)):
        _own_code(walker, origin)


def adds_micro_batch(walker: PairedRank, lost: int) -> bool:
    """A call of the golden side that adds up gradients: another layout, with fewer micro batches on each rank, has none of it."""
    return not walker.one_layout and walker.golden.kinds[lost][-1] in ACCUMULATIONS


def _of_layout(walker: PairedRank, row: int, source: int) -> bool:
    """A call that one of two layouts makes, and that has changed no number."""
    pair = walker.pair_of(row)
    unchanged = pair >= 0 and walker.carried.ratio[pair] <= 1
    return not walker.one_layout and unchanged and not _shuffles(walker.side, source)


def without_gradient(walker: PairedRank, origin: DifferenceOrigin) -> None:
    """A gradient that is missing, or lacks a part: the first tensor that requires a gradient on one side only is to blame, or the call
    that only this run makes and that cut it off (``detach``)."""
    if origin.kind not in (RESULT, TAKEN, GRADIENT, MISSING) or not _is_backward(walker.target, origin.op):
        return
    side, golden = walker.side, walker.golden.side
    for position, (op, golden_op) in enumerate(walker.structure.pairs):
        if op >= origin.op:
            return
        if walker.is_without_graph(op, golden_op):
            continue
        for row, golden_row in walker.rows[walker.starts[position] : walker.starts[position + 1]]:
            target_flag, golden_flag = side.requires_grad[row], golden.requires_grad[golden_row]
            if target_flag is None or golden_flag is None or target_flag == golden_flag or side.shape[row] != golden.shape[golden_row]:
                continue
            if side.role[row] == INPUT:
                cut = _same_output(walker, row, op)
                if cut is not None:
                    origin.op, origin.partner, origin.kind = cut, -1, EXTRA
                    return
            elif side.role[row] != PARAMETERS and walker.target.children.get(op):
                continue  # the call inside of it that did this is there too, and came before
            origin.op, origin.partner, origin.kind, origin.row, origin.other = op, golden_op, GRADLESS, row, golden_row
            if side.role[row] == INPUT:
                _own_code(walker, origin)
            return


def _is_backward(tree: Tree, op: int) -> bool:
    return tree.gradients[op] or tree.kinds[op][0] == "backward"


def _attribute_to_rearrangement(walker: PairedRank, origin: DifferenceOrigin) -> None:
    """The same numbers went in and others came out, though the call was made alike: elements that go in have changed places, or are other
    truth values.

    Statistics do not see that. The last call behind them that only one side makes, or makes with another argument, did it.
    """
    if origin.inside > origin.limit:
        return
    todo = deque((row, 0) for row in walker.side.rows(origin.op) if walker.side.role[row] == INPUT)
    seen: set[int] = set()
    while todo and len(seen) < _FARTHEST:
        row, far = todo.popleft()
        extra = _same_output(walker, row, origin.op)
        source = walker.target.producers.get(row) if extra is None else extra
        if source is None or source in seen or _api(walker.side, source) is None:
            continue
        seen.add(source)
        shuffles = _shuffles(walker.side, source)
        near = far <= _FAR
        if source in walker.extra:
            if shuffles or (near and _may_rearrange(walker, walker.target, source, origin.op)):
                origin.op, origin.partner, origin.kind = source, -1, EXTRA
                return
        elif near or shuffles:
            arguments = (pair for pair in walker.span_of(source) if walker.measured.argument[pair])
            pair = next((pair for pair in arguments if walker.side.role[walker.rows[pair][0]] != OUTPUT), -1)
            if pair >= 0 and _hands_on(walker, source):
                origin.op, origin.partner = walker.structure.pairs[walker.position(source)]
                origin.row, origin.other = walker.rows[pair]
                origin.kind = ARGUMENT
                return
            if source in walker.lone_arguments and walker.not_compared(source, given=True):
                origin.op, origin.partner = walker.structure.pairs[walker.position(source)]
                origin.kind = DEFAULT
                return
            lost = _lost_before(walker, source, origin.partner)
            if lost is not None:
                origin.partner, origin.kind = lost, MISSING
                return
        if source in walker.extra or not walker.is_off(source):
            further = far + 1 if _hands_on(walker, source) else _FAR + 1
            todo += [(r, max(far, further)) for r in walker.side.rows(source) if walker.side.role[r] == INPUT]


def lone_shuffle(walker: PairedRank, tree: Tree, calls: Set[int], op: int) -> int | None:
    """The first of `calls`, which one side alone makes, that is there to change the order of elements, of as many as a tensor has that a
    record of the target takes in. Batches are often made ready before the first call that is recorded: the flow of elements is not known.
    """
    side = walker.side
    taken = {distances.elements(side.shape[row]) for row in side.rows(op) if side.role[row] == INPUT and row not in side.values}
    for call in sorted(calls):
        if _shuffles(tree.side, call):
            given = {distances.elements(tree.side.shape[row]) for row in tree.side.rows(call) if tree.side.role[row] == OUTPUT}
            if given & taken - {0, 1}:
                return call
    return None


def changes_places(walker: PairedRank, op: int) -> bool:
    """A call that is there to change the order of elements: another argument gives another order, which statistics do not show."""
    return _shuffles(walker.side, op)


def _hands_on(walker: PairedRank, op: int) -> bool:
    """What a call gives out are the elements it was given, the extremes being among those that went in; or nothing of it was compared."""
    unknown = walker.one_layout and bool(walker.not_compared(op, given=True))
    return (unknown or _api(walker.side, op) in _VIEWS | _IN_ORDER) and not walker.is_off(op)


def _may_rearrange(walker: PairedRank, tree: Tree, call: int, used: int) -> bool:
    """A call may be to blame for elements in another place: of two layouts each has its own calls, but for views inside of the innermost
    modules in which the numbers part."""
    name = _api(tree.side, call)
    if walker.one_layout:
        return name not in _IN_ORDER
    return name in _VIEWS - _IN_ORDER and tree.parents[call] in [*tree.above(used)][:_INNERMOST]


def _lost_before(walker: PairedRank, op: int, used: int) -> int | None:
    """A call of the golden side only, that changes the order of elements and whose output goes into the partner of this call. `used`: the
    record of the golden side whose result is other."""
    position = walker.position(op)
    golden = walker.golden
    for row in golden.side.rows(walker.structure.pairs[position][1]) if position >= 0 else ():
        lost = golden.producers.get(row) if golden.side.role[row] == INPUT else None
        if lost is not None and lost in walker.missing and _may_rearrange(walker, golden, lost, used):
            return lost
    return None


def _same_output(walker: PairedRank, row: int, before: int) -> int | None:
    """The last call of the target only that gave out a tensor with the numbers of this row. Where it hands on what it was given, it is no
    producer: the numbers were there before."""
    side = walker.side
    for other in reversed(walker.outputs_by_numbers.get(side.stats[row].tobytes(), ())):
        if side.op[other] < before and side.shape[other] == side.shape[row] and side.requires_grad[other] == side.requires_grad[row]:
            return side.op[other]
    return None


def _api(side: DumpTable, op: int) -> str | None:
    """Name of the function of a forward record; None of a module or a backward record."""
    parts = side.ops[op].split(".")
    called = len(parts) >= 4 and parts[-1] == "forward" and parts[-2].isdecimal() and parts[0] not in ("Module", "Cell")
    return parts[-3] if called else None


def _shuffles(side: DumpTable, op: int) -> bool:
    """A call that is there to change the order of elements; an index that is a tensor of whole numbers (``x[order]``) does it, too."""
    name = _api(side, op)
    if name != "__getitem__":
        return name in _SHUFFLES
    taken = [row for row in side.rows(op) if side.role[row] == INPUT and row not in side.values]
    return any(side.shape[row] and is_not_float(str(side.dtype[row])) and not is_bool(side.dtype[row]) for row in taken[1:])


def _attribute_to_unused_collective(walker: PairedRank, origin: DifferenceOrigin, lost: int) -> None:
    """What the golden side takes in comes out of a collective, maybe divided afterwards; here it ran too and is right, and nothing uses
    it."""
    golden = walker.golden
    for _ in range(4):
        if is_collective(golden.side.ops[lost]):
            call = walker.back.get(lost)
            if call is not None and call < origin.op and not _uses(walker, origin.op, call):
                origin.op, origin.partner, origin.kind = call, lost, UNUSED
            return
        rows = golden.side.rows(lost)
        sources = [golden.producers[r] for r in rows if golden.side.role[r] == INPUT and r in golden.producers]
        if len(sources) != 1:
            return
        lost = sources[0]


def _takes_rearranged(walker: PairedRank, op: int) -> bool:
    """What goes in are the same numbers in another order: their mean, a sum in another order, is off by a rounding unit of float64."""
    role, distance = walker.side.role, walker.measured.distance
    return any(0 < distance[pair] < distances.REARRANGED and role[walker.rows[pair][0]] == INPUT for pair in walker.span_of(op))


def _own_code(walker: PairedRank, origin: DifferenceOrigin) -> None:
    """Where only modules are recorded, the code of a module itself is not: it made what a module in it takes in, if what it takes in
    itself is the same on both sides. Where it is given something else that no record has made (a mask), the code around it made that."""
    tree = walker.target
    if any(len(kind) == 3 for kind in tree.kinds):
        return
    while (around := walker.position(tree.parents[origin.op])) >= 0:
        span = range(walker.starts[around], walker.starts[around + 1])
        taken = [pair for pair in span if walker.side.role[walker.rows[pair][0]] != OUTPUT]
        if all(walker.measured.distance[pair] <= origin.limit for pair in taken):
            origin.op, origin.partner = walker.structure.pairs[around]
            origin.kind = origin.kind if origin.kind == GRADLESS else INSIDE
            return
        given = [pair for pair in taken if walker.carried.ratio[pair] > 1 and walker.side.role[walker.rows[pair][0]] == INPUT]
        if origin.kind == GRADLESS or not given or any(walker.rows[pair][0] in tree.producers for pair in given):
            return
        walker.move(origin, around, given[0])


def for_own_use(walker: PairedRank, op: int, golden_op: int) -> bool:
    """A view of what both sides have, or a constant, that only calls of one side take in: that is another way to write what those
    calls do, and what lies behind them tells whether it comes to the same. Their backward calls go with them."""
    tree, golden = walker.target, walker.golden
    if tree.kinds[op][0] == "backward":
        op, golden_op = (t.index.get(forward_twin(t.side.ops[call]), -1) for t, call in ((tree, op), (golden, golden_op)))
    api = _api(walker.side, op) if op >= 0 and golden_op >= 0 else None
    if api is None:
        return False
    made = not walker.target.tensors_in(op)
    if not made and api not in _VIEWS | _IN_ORDER:
        return False
    target_users, golden_users = walker.users[0].get(op, ()), walker.users[1].get(golden_op, ())
    return bool(target_users or golden_users) and walker.extra.issuperset(target_users) and walker.missing.issuperset(golden_users)


def _uses(walker: PairedRank, op: int, call: int) -> bool:
    """Something that a call gave out goes into a record, at whatever place."""
    side = walker.side
    given = {side.stats[row].tobytes() for row in side.rows(call) if side.role[row] == OUTPUT}
    return any(side.role[row] == INPUT and side.stats[row].tobytes() in given for row in side.rows(op))


def _missing_gradient(walker: PairedRank, origin: DifferenceOrigin) -> None:
    """A sum of gradients that no record has: the backward calls that are missing just before it did not add their part."""
    run = origin.partner
    while run - 1 >= 0 and run - 1 in walker.missing:
        run -= 1
    calls = [op for op in range(run, origin.partner) if not walker.golden.is_gradients(op)]
    if calls:
        origin.partner, origin.kind = calls[0], MISSING


def _first_extra(walker: PairedRank, source: int, origin: DifferenceOrigin) -> int:
    """The first of a chain of calls that only the target has; where NaN or Inf comes out of it, the first that gives some."""
    pair = walker.pair_of(origin.row)
    if pair < 0 or not walker.measured.bad_target[pair] or walker.measured.bad_golden[pair]:
        return _first(walker.target, source, walker.extra)
    side = walker.side
    while True:
        sources = [walker.target.producers.get(row) for row in side.rows(source) if side.role[row] == INPUT]
        more = [s for s in sources if s is not None and s in walker.extra and _gives_nonfinite(side, s)]
        if not more:
            return source
        source = more[0]


def _forward(walker: PairedRank, op: int) -> int:
    """Of a backward call that only the target has, its forward call, when only the target has that too and that came before."""
    twin = walker.target.index.get(forward_twin(walker.side.ops[op]), op)
    return twin if twin in walker.extra else op


def _gives_nonfinite(side: DumpTable, op: int) -> bool:
    rows = [row for row in side.rows(op) if side.role[row] == OUTPUT and row not in side.values]
    return bool(rows) and bool(distances.nonfinite(side, rows).any())


def _writer(walker: PairedRank, origin: DifferenceOrigin) -> int | None:
    """A call that only the target has, and that got what the golden side goes on with: it has written into it, or one that writes into
    the part of it that it gave out."""
    golden, side = walker.golden.side, walker.side
    wanted, shape = golden.stats_of(origin.other), golden.shape[origin.other]
    for op in sorted(walker.extra):
        if op >= origin.op:
            break
        for row in side.rows(op):
            if side.role[row] == INPUT and side.shape[row] == shape and side.stats_of(row) == wanted:
                return _writes(walker, op, origin.op)
    return None


def _writes(walker: PairedRank, op: int, end: int) -> int:
    """The call in place behind a chain of views that begins with `op`; `op` when there is none."""
    if (_api(walker.side, op) or "") not in _VIEWS:
        return op
    side = walker.side
    given = {side.stats[row].tobytes() for row in side.rows(op) if side.role[row] == OUTPUT}
    for later in range(op + 1, end):
        if later in walker.extra and any(side.role[row] == INPUT and side.stats[row].tobytes() in given for row in side.rows(later)):
            if _in_place(_api(side, later) or ""):
                return later
            given |= {side.stats[row].tobytes() for row in side.rows(later) if side.role[row] == OUTPUT}
    return op


def _in_place(api: str) -> bool:
    """The function writes into what it is given."""
    return api == "__setitem__" or (api.startswith("__i") and api.endswith("__")) or (api.endswith("_") and not api.endswith("__"))


def _first(tree: Tree, op: int, among: set[int]) -> int:
    """The first of a chain of calls of one side only; views before a call that makes new numbers are only its way to its input."""
    chain = list(_chain(tree, op, among))
    made = [call for call in chain if (_api(tree.side, call) or "") not in _VIEWS]
    return made[-1] if made else chain[-1]


def _chain(tree: Tree, op: int, among: set[int]) -> Iterator[int]:
    """A call and those of one side only that its inputs come from, the last one first."""
    while True:
        yield op
        sources = [tree.producers.get(row) for row in tree.side.rows(op) if tree.side.role[row] == INPUT]
        more = [s for s in sources if s is not None and s in among]
        if not more:
            return
        op = more[0]


def is_collective(name: str) -> bool:
    """A record of a collective call."""
    return name.startswith("Distributed.")
