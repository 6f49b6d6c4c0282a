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
from msprobe_engine.core.names import forward_twin
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
    told = _of_modules(tree, chunk_of) if tree.has_modules else _of_functions(tree)
    return None if told is None else _fill_gaps(tree, told)


def whole(_path: str) -> int:
    """`chunk_of` of a model that is not cut into chunks."""
    return 0


def count(told: Sequence[Segment]) -> int:
    """The number of micro batches."""
    return len({segment[0] for segment in told if segment != TAIL})


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
    found: list[Segment | None] = []
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
                found.append((batches[seen[path] * len(batches) // gradients[path]], BACKWARD, chunk_of(path)))
                seen[path] += 1
                continue
        if len(kind) != 4 or kind[0] not in ("forward", "backward"):
            found.append((-1, BACKWARD, -1) if kind[0] == "backward" else None)
            continue
        name = side.ops[top] if kind[0] == "forward" else forward_twin(side.ops[top])
        number = micro.get(name)
        found.append(None if number is None else (number, FORWARD if kind[0] == "forward" else BACKWARD, chunk_of(kind[2])))
    _resolve(found)
    return found


def _of_functions(tree: Tree) -> list[Segment | None] | None:
    """A dump without modules: the numbers of micro batches that its records bear."""
    side = tree.side
    micro = {name: _micro_step(side.tags.get(op)) for op, name in enumerate(side.ops)}
    if not any(micro.values()):
        return None
    found: list[Segment | None] = []
    for name, kind in zip(side.ops, tree.kinds):
        if kind[0] == "backward":
            found.append((micro.get(forward_twin(name), 0), BACKWARD, 0))
        else:
            found.append((micro[name], FORWARD, 0) if f"{name.removesuffix('forward')}backward" in tree.index else None)
    return found


def _micro_step(tags: object) -> int:
    inner = tags.get("tags") if isinstance(tags, dict) else None
    number = inner.get("micro_step", 0) if isinstance(inner, dict) else 0
    return number if isinstance(number, int) else 0


def _resolve(found: list[Segment | None]) -> None:
    """Functions in the backward pass are of the backward pass that goes on behind them, or went on before."""
    for places in (reversed(range(len(found))), range(len(found))):
        known: Segment | None = None
        for at in places:
            here = found[at]
            if here is None:
                continue
            if here[0] >= 0:
                known = here
            elif known is not None and known[1] == BACKWARD:
                found[at] = known
    for at, here in enumerate(found):
        if here is not None and here[0] < 0:
            found[at] = None


def _tops(tree: Tree) -> list[int]:
    """The outermost record around each one."""
    found = [-1] * len(tree.parents)
    for op in range(len(found)):
        way = []
        at = op
        while found[at] < 0 and tree.parents[at] != ROOT:
            way.append(at)
            at = tree.parents[at]
        top = found[at] if found[at] >= 0 else at
        for one in (*way, at):
            found[one] = top
    return found


def _fill_gaps(tree: Tree, told: Sequence[Segment | None]) -> list[Segment]:
    """Records that nothing is said of, between what is known before and behind them."""
    found = list(told)
    inner = _inside_backward(tree, told)
    places = [at for at, here in enumerate(told) if here is not None]
    for before, after in zip((-1, *places), (*places, len(told))):
        if after - before < 2:
            continue
        first = told[before] if before >= 0 else None
        then = told[after] if after < len(told) else None
        gap = range(before + 1, after)
        cut = _find_gap_boundary(tree, gap, first, then, inner)
        if first is not None and then is not None and then[1] == FORWARD:
            cut = min(cut, gap.stop - _count_batch_preparation(tree.kinds, gap, places[0]))
        for at in gap:
            here = first if at < cut else then
            found[at] = here if here is not None else TAIL
    return [here if here is not None else TAIL for here in found]


def _find_gap_boundary(tree: Tree, gap: range, first: Segment | None, then: Segment | None, inner: set[tuple[str, ...]]) -> int:
    """Records of a gap before this one are of the segment before it."""
    if first is None:
        return gap.start
    if first == then or (then is not None and first[1] == FORWARD and (first[0], BACKWARD, first[2]) == then):
        return gap.stop
    if first[1] == FORWARD:
        last = max((at for at in gap if f"{tree.side.ops[at].removesuffix('forward')}backward" in tree.index), default=gap.start - 1)
        return last + 1 if then is not None and then[1] == FORWARD else gap.stop
    return next((at for at in gap if tree.kinds[at] not in inner and tree.kinds[at][0] != "parameters_grad"), gap.stop)


def _count_batch_preparation(kinds: Sequence[Kind], gap: range, start: int) -> int:
    """How many records at the end of a gap are the calls that precede the first pass, too (the batch is made for every micro batch).
    `start`: where the first pass begins."""
    both = zip(reversed(gap), reversed(range(start)))
    return sum(1 for _ in takewhile(lambda pair: kinds[pair[0]] == kinds[pair[1]], both))


def _inside_backward(tree: Tree, told: Sequence[Segment | None]) -> set[tuple[str, ...]]:
    """Kinds of calls without a module between records of one backward pass: gradients are added to their buffers."""
    found: set[tuple[str, ...]] = set()
    waiting: list[int] = []
    last: Segment | None = None
    for op, here in enumerate(told):
        if here is None:
            waiting.append(op)
            continue
        if here == last and here[1] == BACKWARD:
            found.update(tree.kinds[at] for at in waiting)
        waiting, last = [], here
    return {kind for kind in found if kind[1:2] != ("Distributed",)}
