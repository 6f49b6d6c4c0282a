"""Matches the records of two sides by structure: the same calls in the same order inside of the same module.

Lists of calls are aligned level by level. What is certain comes first (same call, same shapes, inputs from the same kinds of calls), then
what is left in the gaps by fewer and fewer signs; so one call more or less shifts nothing. Modules that are called otherwise on the other
side are matched when their class and what runs inside them agree, and are proposed as a mapping.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from msprobe_engine.align.calls import reordered, strangers
from msprobe_engine.align.calls.call_pairs import CallPairs
from msprobe_engine.align.calls.call_tree import ROOT, Tree
from msprobe_engine.align.calls.longest_common import align, gaps
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.measure import dump_dialects

ADDING = ("add_", "__iadd__")
"""Calls that accumulate gradients in the backward pass."""


@dataclass
class Structure:
    """Which record belongs to which.

    Attributes:
        pairs: (record of the target, record of the golden side), in the order of the target.
        only_target, only_golden: records that nothing matches.
        renamed: module path of the target -> path of the golden side, where they differ.
        behind_cut: records of the target and of the golden side behind the place where the other one was cut off (`cut_off`).
    """

    pairs: list[tuple[int, int]] = field(default_factory=list)
    only_target: list[int] = field(default_factory=list)
    only_golden: list[int] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    behind_cut: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())


@dataclass
class Aligned:
    """Two sides as trees, and which records of them belong together."""

    target: Tree
    golden: Tree
    structure: Structure


def match_structure(target: DumpTable, golden: DumpTable) -> Structure:
    """Match two sides; see the module's text."""
    return Matcher(Tree(target), Tree(golden)).run()


class Matcher(CallPairs):
    """Walks two trees at once."""

    def __init__(self, target: Tree, golden: Tree) -> None:
        super().__init__(target, golden)
        one_recorder = not dump_dialects.differ(target.side, golden.side)  # else one of them may not say what is a recomputation
        self._repeats = tuple(tree.recomputed if one_recorder else frozenset[int]() for tree in (target, golden))
        mine, theirs = ({kind[2] for kind in tree.kinds if len(kind) == 4} for tree in (target, golden))
        self._paths = mine & theirs

    def run(self, one_batch: bool = True) -> Structure:
        """Match level by level; then see to it that backward calls follow their forward calls, and match what that leaves over.

        What is left then is matched by name, and parameter gradients by the modules they belong to.

        Args:
            one_batch: the sides are of whole runs, not pieces of two layouts, which have different parts of the batch.
        """
        self._trees()
        if self._twins():
            self._trees()
        if self._by_name(modules=True):
            self._trees()
        self._by_name()
        reordered.match_by_argument(self)
        strangers.part_strangers(self)
        strangers.part_other_forms(self)
        strangers.part_between_strangers(self)
        strangers.match_by_numbers(self, one_batch)
        self._additions()
        renamed = self._find_renamed_modules()
        self._gradients(renamed)
        return Structure(
            sorted(self.found.items()),
            [i for i in range(len(self.target.side.ops)) if i not in self.found],
            [j for j in range(len(self.golden.side.ops)) if j not in self.used],
            renamed,
        )

    def _trees(self) -> None:
        """Match everything below the roots, and below every pair that was matched."""
        if self.target.has_modules != self.golden.has_modules:  # compiled, or another level: only calls of functions are on both sides
            self._lists(self.target.functions, self.golden.functions)
            return
        seen = {(ROOT, ROOT), *self.found.items()}
        work = list(seen)
        while work:
            a, b = work.pop()
            first, second = self.target.children.get(a, ()), self.golden.children.get(b, ())
            if first or second:
                new = [pair for pair in self._lists(first, second) if pair not in seen]
                seen.update(new)
                work += new

    def _twins(self) -> bool:
        """Backward calls of forward calls that belong together belong together, whatever order autograd ran them in, when shapes agree.
        Returns True when that took a partner away from others."""
        first, second = self.forms
        back = {j: i for i, j in self.found.items()}
        moved = False
        for i, j in list(self.found.items()):
            x, y = self.target.twin(i), self.golden.twin(j)
            if x is None or y is None or self.found.get(x) == y or first[x] != second[y]:
                continue
            moved = True
            lost = self.found.pop(x, None)
            if lost is not None:
                self.used.discard(lost)
                back.pop(lost, None)
            owner = back.get(y)
            if owner is not None:
                self.found.pop(owner, None)
            back[y] = x
            self.pair(x, y)
        return moved

    def _keys(self, tree: Tree, ops: Sequence[int], level: int) -> list[int]:
        """What must agree for two calls to be matched. Level 0: call, shapes, kinds of the calls its inputs come from; 1: call and shapes;
        2: call; 3: a module that the other side has no namesake of, by class, direction, shapes of its results and the calls right inside
        of it. What the backward pass makes again
        belongs to what it makes again on the other side."""
        number, forms, repeats = self._numbers, self.forms[tree is self.golden], self._repeats[tree is self.golden]
        found = []
        for op in ops:
            key: Hashable
            if level == 3:
                kind = tree.kinds[op]
                if len(kind) == 4 and kind[2] not in self._paths:
                    inside = tuple(tree.kinds[child][-1] for child in tree.children.get(op, ()))
                    key = (level, kind[0], kind[3], tree.shapes(op).outputs, inside)
                else:
                    key = (level, tree is self.golden, op)
            elif level == 2:
                key = (level, tree.relative(op, tree.parents[op]))
            elif level == 1:
                key = (level, tree.relative(op, tree.parents[op]), forms[op])
            else:
                update = op > tree.last_backward  # a weight has the numbers of what it was cast to on the way forward
                sources = tuple(
                    "" if source is None or (update and source < tree.first_backward) else tree.kinds[source][-1]
                    for source in (tree.producers.get(row) for row in tree.side.rows(op) if tree.side.role[row] == INPUT)
                )
                key = (level, tree.relative(op, tree.parents[op]), forms[op], sources)
            found.append(number.setdefault((key, op in repeats), len(number)))
        return found

    def _lists(self, first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
        """Align two lists of calls. Those that are matched already stay so, and what lies between them is aligned."""
        anchors = self._anchors(first, second)
        pairs = [(first[i], second[j]) for i, j in anchors]
        open_gaps = []
        for p, q in gaps(anchors, len(first), len(second)):
            x, y = [first[i] for i in p if first[i] not in self.found], [second[j] for j in q if second[j] not in self.used]
            if x and y:
                open_gaps.append((x, y))
        if len(open_gaps) == 1 and len(open_gaps[0][0]) == len(open_gaps[0][1]):
            x, y = open_gaps[0]
            if self._keys(self.target, x, 1) == self._keys(self.golden, y, 1):
                pairs += zip(x, y)  # the same program: where its inputs come from is not asked
                open_gaps = []
        for level in range(4):
            left: list[tuple[list[int], list[int]]] = []
            for x, y in open_gaps:
                aligned = align(self._keys(self.target, x, level), self._keys(self.golden, y, level))
                pairs += [(x[i], y[j]) for i, j in aligned]
                left += [([x[i] for i in p], [y[j] for j in q]) for p, q in gaps(aligned, len(x), len(y))]
            open_gaps = left
        for i, j in pairs:
            self.pair(i, j)
        for x, y in open_gaps:
            pairs += self._match_without_wrappers(x, y)
        return pairs

    def _anchors(self, first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
        """Positions of calls that are matched with each other already, as many as cross nothing (longest increasing subsequence)."""
        if not any(i in self.found for i in first):
            return []
        places = {j: at for at, j in enumerate(second)}
        known = [(at, places[j]) for at, i in enumerate(first) if (j := self.found.get(i, -1)) in places]
        ends: list[int] = []  # of the increasing sequence of each length: the smallest last place
        chain: list[int] = []
        for _, place in known:
            at = bisect_left(ends, place)
            ends[at : at + 1] = [place]
            chain.append(at)
        found = []
        length = len(ends) - 1
        for pair, at in zip(reversed(known), reversed(chain)):
            if at == length:
                found.append(pair)
                length -= 1
        return found[::-1]

    def _match_without_wrappers(self, first: list[int], second: list[int]) -> list[tuple[int, int]]:
        """A module around others that only one side has (a wrapper) is taken away, and what is inside is matched in its place."""
        inner = [self._inside(self.target, i) for i in first]
        other = [self._inside(self.golden, j) for j in second]
        x, y = [i for some in inner for i in some], [j for some in other for j in some]
        if len(x) == len(first) and len(y) == len(second) and x == first and y == second:
            return []
        if y == second:
            return self._lists(x, second)
        if x == first:
            return self._lists(first, y)
        ways = [(x, second), (first, y)]
        ways.sort(key=lambda way: -len(set(self._keys(self.target, way[0], 2)) & set(self._keys(self.golden, way[1], 2))))
        return self._lists(*ways[0]) or self._lists(*ways[1])

    def _inside(self, tree: Tree, op: int) -> list[int]:
        """The calls in a module that has no namesake on the other side; the call itself where it has, or is no module."""
        kind = tree.kinds[op]
        return tree.children.get(op, [op]) if len(kind) != 4 or kind[2] not in self._paths else [op]

    def _by_name(self, modules: bool = False) -> bool:
        """Records that came in another order, with the same name and shapes on both sides: those of modules, which may lack a result (a
        recomputation ends where nothing more is needed), else those whose modules do not belong to others. Returns True when there are."""
        first, second = self.forms
        before = len(self.found)
        for i, name in enumerate(self.target.names):
            if i in self.found or self.target.is_gradients(i) or (modules and len(self.target.kinds[i]) != 4):
                continue
            j = self.golden.known_as.get(name)
            if j is None or j in self.used or (i in self._repeats[0]) != (j in self._repeats[1]):
                continue
            if self._cut_short(i, j) if modules else first[i] == second[j] and self._around_alike(i, j):
                self.pair(i, j)
        return len(self.found) > before

    def _cut_short(self, i: int, j: int) -> bool:
        """The same but for results that one side has none of."""
        x, y = self.target.shapes(i), self.golden.shapes(j)
        return x.inputs == y.inputs and (x.outputs == y.outputs or not (_gives(self.target.side, i) and _gives(self.golden.side, j)))

    def _around_alike(self, i: int, j: int) -> bool:
        """The calls around two records do not belong to others than each other."""
        a, b = self.target.parents[i], self.golden.parents[j]
        return self.found.get(a, b) == b and (b not in self.used or self.found.get(a) == b)

    def _additions(self) -> None:
        """A call that adds a gradient to a buffer belongs to the one that adds the gradient of the same place, in whatever order a run does
        it (one that recomputes has another one), and inside of whatever module."""
        mine, theirs = _find_gradient_accumulations(self.target), _find_gradient_accumulations(self.golden)
        back = {j: i for i, j in self.found.items()}
        for (source, place), i in mine.items():
            j = theirs.get((self.found.get(source, -1), place))
            if j is None or self.found.get(i) == j:
                continue
            owner = back.pop(j, None)
            if owner is not None:
                self.drop(owner)
            if i in self.found:
                back.pop(self.found[i], None)
                self.drop(i)
            self.pair(i, j)
            back[j] = i

    def _find_renamed_modules(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for i, j in sorted(self.found.items()):
            x, y = self.target.kinds[i], self.golden.kinds[j]
            if len(x) == 4 and len(y) == 4 and x[2] != y[2]:
                found.setdefault(x[2], y[2])
        return found

    def _gradients(self, renamed: dict[str, str]) -> None:
        """The k-th gradients of a module with the k-th of its partner, counted from the last: what FSDP2 sums up over ranks after several
        micro batches is the gradient of all of them."""
        places: dict[str, list[int]] = {}
        for j in range(len(self.golden.side.ops)):
            if self.golden.is_gradients(j):
                places.setdefault(self.golden.kinds[j][2], []).append(j)
        for i in reversed(range(len(self.target.side.ops))):
            if self.target.is_gradients(i):
                path = self.target.kinds[i][2]
                others = places.get(renamed.get(path, path))
                if others:
                    self.pair(i, others.pop())


def _find_gradient_accumulations(tree: Tree) -> dict[tuple[int, int], int]:
    """(backward record, place among what it gives out) -> the call that adds that gradient to a buffer."""
    side, found = tree.side, dict[tuple[int, int], int]()
    for op, kind in enumerate(tree.kinds):
        if kind[0] != "forward" or kind[-1] not in ADDING:
            continue
        for row in side.rows(op):
            source = tree.producers.get(row)
            if source is None or side.role[row] != INPUT or tree.kinds[source][0] != "backward":
                continue
            given = [other for other in side.rows(source) if side.role[other] == OUTPUT]
            place = next((at for at, other in enumerate(given) if side.stats_of(other) == side.stats_of(row)), -1)
            if place >= 0:
                found.setdefault((source, place), op)
    return found


def _gives(side: DumpTable, op: int) -> bool:
    """The call has a tensor for a result."""
    return any(side.role[row] == OUTPUT and isinstance(side.shape[row], list) for row in side.rows(op))
