"""What of a pipeline stage's step belongs to the forward and the backward pass of which micro batch.

Stages run the micro batches in an order of their own (1F1B, interleaved, all forward first), so records are told apart by what they are:
the k-th forward call of a module is of micro batch k, a backward call of that of its forward call. What no module encloses (the batch, the
loss, messages, sums of gradients) goes with what stands around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile

from msprobe_engine.align.calls.call_tree import ROOT, Kind, Tree
from msprobe_engine.core.names import backward_twin, forward_twin
from msprobe_engine.formats.dump.dump_table import DumpTable

FORWARD, BACKWARD = 0, 1
Segment = tuple[int, int, int]
"""(micro batch, FORWARD or BACKWARD, chunk of the model)."""
TAIL: Segment = (1 << 40, 0, 0)
"""What comes behind all passes: sums of gradients over ranks and the optimizer."""


def segments(tree: Tree, chunk_of: Callable[[str], int]) -> list[Segment] | None:
    """The segment of each record; None when the records do not tell (no modules, and no numbers of micro batches).

    Args:
        chunk_of: path of a module -> which chunk of the model it is in.
    """
    known = _of_modules(tree, chunk_of) if tree.has_modules else _of_functions(tree)
    return None if known is None else _fill_gaps(tree, known)


def segments_in_turn(tree: Tree, n: int) -> list[Segment] | None:
    """The segment of each record of a step without modules whose `n` micro batches have their forward and backward passes one after the
    other; None when the records do not say so."""
    side = tree.side
    turn: dict[str, int] = {}  # backward record -> the run of backward records that it is in
    turns, forward_since = 0, True
    for op, (name, kind) in enumerate(zip(side.ops, tree.kinds)):
        if kind[0] == "backward":
            turns += forward_since
            turn[name], forward_since = turns - 1, False
        elif _has_backward(tree, op) and not side.tags.get(op, {}).get("is_recompute"):
            forward_since = True
    if n < 2 or turns != n:
        return None
    known: list[Segment | None] = []
    for name in side.ops:
        if name in turn:
            known.append((turn[name], BACKWARD, 0))
        else:
            known.append((turn[twin], FORWARD, 0) if (twin := backward_twin(name)) in turn else None)
    return _fill_gaps(tree, known)


def first_pass(tree: Tree) -> int:
    """The first call that has a backward pass; the number of records when there is none."""
    return next((op for op in range(len(tree.kinds)) if _has_backward(tree, op)), len(tree.kinds))


def _has_backward(tree: Tree, op: int) -> bool:
    """A forward call whose backward call was recorded."""
    return tree.kinds[op][0] == "forward" and backward_twin(tree.side.ops[op]) in tree.index


def whole(_path: str) -> int:
    """`chunk_of` of a model that is not cut into chunks."""
    return 0


def count(segments: Sequence[Segment]) -> int:
    """The number of micro batches."""
    return len({segment[0] for segment in segments if segment != TAIL})


def passes(side: DumpTable) -> int:
    """The number of micro batches of a dump with modules; 1 when it does not tell."""
    tree = Tree(side)
    return max(1, count(segments(tree, whole) or ())) if tree.has_modules else 1


def micro_batches(calls: Counter[str]) -> int:
    """How often most modules were called."""
    return Counter(calls.values()).most_common(1)[0][0] if calls else 1


def _of_modules(tree: Tree, chunk_of: Callable[[str], int]) -> list[Segment | None]:
    """What the module around each record says; of functions in the backward pass only that: what comes next says more."""
    side = tree.side
    tops = _tops(tree)
    order: dict[int, int] = {}  # record -> its number among the calls of its module
    calls: Counter[str] = Counter()
    for op, kind in enumerate(tree.kinds):
        if len(kind) == 4 and kind[0] == "forward" and tree.parents[op] == ROOT and not side.tags.get(op, {}).get("is_recompute"):
            order[op] = calls[kind[2]]
            calls[kind[2]] += 1
    micros = micro_batches(calls)
    per = {path: max(1, n // micros) for path, n in calls.items()}
    gradients = Counter(kind[2] for kind in tree.kinds if kind[0] == "parameters_grad")
    seen: Counter[str] = Counter()
    micro = {side.ops[op]: number // per[tree.kinds[op][2]] for op, number in order.items()}
    segments: list[Segment | None] = []
    back: dict[str, list[int]] = {}  # module -> micro batches in the order of its backward passes: one that looks for shapes may have none
    for op, top in enumerate(tops):
        kind = tree.kinds[op]
        if len(kind) == 4 and kind[0] == "backward" and (number := micro.get(forward_twin(side.ops[top]))) is not None:
            back.setdefault(kind[2], []).append(number)
    for op, top in enumerate(tops):
        kind = tree.kinds[top]
        if tree.kinds[op][0] == "parameters_grad":
            path = tree.kinds[op][2]
            batches = back.get(path) or range(micros)
            if gradients[path] % len(batches) == 0:
                segments.append((batches[seen[path] * len(batches) // gradients[path]], BACKWARD, chunk_of(path)))
                seen[path] += 1
                continue
        if len(kind) != 4 or kind[0] not in ("forward", "backward"):
            segments.append((-1, BACKWARD, -1) if kind[0] == "backward" else None)
            continue
        name = side.ops[top] if kind[0] == "forward" else forward_twin(side.ops[top])
        number = micro.get(name)
        segments.append(None if number is None else (number, FORWARD if kind[0] == "forward" else BACKWARD, chunk_of(kind[2])))
    _resolve(segments)
    return segments


def _of_functions(tree: Tree) -> list[Segment | None] | None:
    """A dump without modules: the numbers of micro batches that its records bear."""
    side = tree.side
    micro = {name: _micro_step(side.tags.get(op)) for op, name in enumerate(side.ops)}
    if not any(micro.values()):
        return None
    segments: list[Segment | None] = []
    for op, (name, kind) in enumerate(zip(side.ops, tree.kinds)):
        if kind[0] == "backward":
            segments.append((micro.get(forward_twin(name), 0), BACKWARD, 0))
        else:
            segments.append((micro[name], FORWARD, 0) if _has_backward(tree, op) else None)
    return segments


def _micro_step(tags: object) -> int:
    inner = tags.get("tags") if isinstance(tags, dict) else None
    number = inner.get("micro_step", 0) if isinstance(inner, dict) else 0
    return number if isinstance(number, int) else 0


def _resolve(segments: list[Segment | None]) -> None:
    """Functions in the backward pass are of the backward pass that goes on behind them, or went on before."""
    for places in (reversed(range(len(segments))), range(len(segments))):
        known: Segment | None = None
        for op in places:
            segment = segments[op]
            if segment is None:
                continue
            if segment[0] >= 0:
                known = segment
            elif known is not None and known[1] == BACKWARD:
                segments[op] = known
    for op, segment in enumerate(segments):
        if segment is not None and segment[0] < 0:
            segments[op] = None


def _tops(tree: Tree) -> list[int]:
    """The outermost record around each one."""
    tops = [-1] * len(tree.parents)
    for op in range(len(tops)):
        path = []
        outer = op
        while tops[outer] < 0 and tree.parents[outer] != ROOT:
            path.append(outer)
            outer = tree.parents[outer]
        top = tops[outer] if tops[outer] >= 0 else outer
        for record in (*path, outer):
            tops[record] = top
    return tops


def _fill_gaps(tree: Tree, known: Sequence[Segment | None]) -> list[Segment]:
    """Records that nothing is said of, between what is known before and behind them."""
    filled = list(known)
    inner = _inside_backward(tree, known)
    places = [op for op, segment in enumerate(known) if segment is not None]
    for before, after in zip((-1, *places), (*places, len(known))):
        if after - before < 2:
            continue
        segment_before = known[before] if before >= 0 else None
        segment_behind = known[after] if after < len(known) else None
        gap = range(before + 1, after)
        cut = _find_gap_boundary(tree, gap, segment_before, segment_behind, inner)
        if segment_before is not None and segment_behind is not None and segment_behind[1] == FORWARD:
            cut = min(cut, gap.stop - _count_batch_preparation(tree.kinds, gap, places[0]))
        for op in gap:
            segment = segment_before if op < cut else segment_behind
            filled[op] = segment if segment is not None else TAIL
    return [segment if segment is not None else TAIL for segment in filled]


def _find_gap_boundary(
    tree: Tree, gap: range, segment_before: Segment | None, segment_behind: Segment | None, inner: set[tuple[str, ...]]
) -> int:
    """Records of a gap before this one are of the segment before it."""
    if segment_before is None:
        return gap.start
    if segment_before == segment_behind or (
        segment_behind is not None and segment_before[1] == FORWARD and (segment_before[0], BACKWARD, segment_before[2]) == segment_behind
    ):
        return gap.stop
    if segment_before[1] == FORWARD:
        last = max((op for op in gap if len(tree.kinds[op]) == 3 and _has_backward(tree, op)), default=gap.start - 1)
        return last + 1 if segment_behind is not None and segment_behind[1] == FORWARD else gap.stop
    return next((op for op in gap if tree.kinds[op] not in inner and tree.kinds[op][0] != "parameters_grad"), gap.stop)


def _count_batch_preparation(kinds: Sequence[Kind], gap: range, start: int) -> int:
    """How many records at the end of a gap are the calls that precede the first pass, too (the batch is made for every micro batch).
    `start`: where the first pass begins."""
    both = zip(reversed(gap), reversed(range(start)))
    return sum(1 for _ in takewhile(lambda pair: kinds[pair[0]] == kinds[pair[1]], both))


def _inside_backward(tree: Tree, known: Sequence[Segment | None]) -> set[tuple[str, ...]]:
    """Kinds of calls without a module between records of one backward pass: gradients are added to their buffers."""
    kinds: set[tuple[str, ...]] = set()
    waiting: list[int] = []
    last: Segment | None = None
    for op, segment in enumerate(known):
        if segment is None:
            waiting.append(op)
            continue
        if segment == last and segment[1] == BACKWARD:
            kinds.update(tree.kinds[waiting_op] for waiting_op in waiting)
        waiting, last = [], segment
    return {kind for kind in kinds if kind[1:2] != ("Distributed",)}
