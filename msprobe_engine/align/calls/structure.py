"""Matches the records of two sides by structure: the same calls in the same order inside of the same module.

Lists of calls are aligned level by level. What is certain comes first (same call, same shapes, inputs from the same kinds of calls), then
what is left in the gaps by fewer and fewer signs; so one call more or less shifts nothing. Modules that are called otherwise on the other
side are matched when their class and what runs inside them agree, and are proposed as a mapping.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.align.calls import pieces, reordered, strangers
from msprobe_engine.align.calls.call_pairs import CallPairs
from msprobe_engine.align.calls.call_tree import ROOT, Tree, calls_function
from msprobe_engine.align.calls.longest_common import align, gaps
from msprobe_engine.align.parameters.prefixes import strip_wrappers
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, DumpTable
from msprobe_engine.measure import distances, dump_dialects

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
        target_paths, golden_paths = ({kind[2] for kind in tree.kinds if len(kind) == 4} for tree in (target, golden))
        self._paths = target_paths & golden_paths

    def run(self, one_batch: bool = True) -> Structure:
        """Match level by level; then see to it that backward calls follow their forward calls, and match what that leaves over.

        What is left then is matched by name, and parameter gradients by the modules they belong to.

        Args:
            one_batch: the sides are of whole runs, not pieces of two layouts, which have different parts of the batch.
        """
        self._trees()
        if self._twins():
            self._trees()
        if self._by_name(modules=True) | self._by_path():
            self._trees()
        self._by_name()
        reordered.match_by_argument(self)
        pieces.part_pieces(self)
        strangers.part_modules_of_parts(self)
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
            [j for j in range(len(self.golden.side.ops)) if j not in self.back],
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
            target_parent, golden_parent = work.pop()
            target_calls, golden_calls = self.target.children.get(target_parent, ()), self.golden.children.get(golden_parent, ())
            if target_calls or golden_calls:
                new = [pair for pair in self._lists(target_calls, golden_calls) if pair not in seen]
                seen.update(new)
                work += new

    def _twins(self) -> bool:
        """Backward calls of forward calls that belong together belong together, whatever order autograd ran them in, when shapes agree.
        Returns True when that took a partner away from others."""
        target_forms, golden_forms = self.forms
        moved = False
        for i, j in list(self.found.items()):
            target_twin, golden_twin = self.target.twin(i), self.golden.twin(j)
            if (
                target_twin is None
                or golden_twin is None
                or self.found.get(target_twin) == golden_twin
                or target_forms[target_twin] != golden_forms[golden_twin]
            ):
                continue
            moved = True
            self.pair(target_twin, golden_twin)
        return moved

    def _keys(self, tree: Tree, ops: Sequence[int], level: int) -> list[int]:
        """What must agree for two calls to be matched. Level 0: call, shapes, kinds of the calls its inputs come from (not of single
        numbers, which others have by chance), the numbers of a constant; 1: call and shapes; 2: call; 3: a module that the other side has
        no namesake of, by class, direction, shapes of its results and the calls right inside of it. What the backward pass makes again
        belongs to what it makes again on the other side."""
        number, forms, repeats = self._numbers, self.forms[tree is self.golden], self._repeats[tree is self.golden]
        keys = []
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
                    for source in (
                        None if _is_single(tree.side.shape[row]) else tree.producers.get(row)
                        for row in tree.side.rows(op)
                        if tree.side.role[row] == INPUT
                    )
                )
                key = (level, tree.relative(op, tree.parents[op]), forms[op], sources, _constant(tree, op))
            keys.append(number.setdefault((key, op in repeats), len(number)))
        return keys

    def _lists(self, target_calls: Sequence[int], golden_calls: Sequence[int]) -> list[tuple[int, int]]:
        """Align two lists of calls. Those that are matched already stay so, and what lies between them is aligned."""
        anchors = self._anchors(target_calls, golden_calls)
        pairs = [(target_calls[i], golden_calls[j]) for i, j in anchors]
        open_gaps = []
        for p, q in gaps(anchors, len(target_calls), len(golden_calls)):
            target_open, golden_open = (
                [target_calls[i] for i in p if target_calls[i] not in self.found],
                [golden_calls[j] for j in q if golden_calls[j] not in self.back],
            )
            if target_open and golden_open:
                open_gaps.append((target_open, golden_open))
        if len(open_gaps) == 1 and len(open_gaps[0][0]) == len(open_gaps[0][1]):
            target_open, golden_open = open_gaps[0]
            if self._keys(self.target, target_open, 1) == self._keys(self.golden, golden_open, 1):
                pairs += zip(target_open, golden_open)  # the same program: where its inputs come from is not asked
                open_gaps = []
        for level in range(4):
            remaining: list[tuple[list[int], list[int]]] = []
            for target_open, golden_open in open_gaps:
                aligned = align(self._keys(self.target, target_open, level), self._keys(self.golden, golden_open, level))
                pairs += [(target_open[i], golden_open[j]) for i, j in aligned]
                remaining += [
                    ([target_open[i] for i in p], [golden_open[j] for j in q]) for p, q in gaps(aligned, len(target_open), len(golden_open))
                ]
            open_gaps = remaining
        for i, j in pairs:
            self.pair(i, j)
        for target_open, golden_open in open_gaps:
            pairs += self._match_without_wrappers(target_open, golden_open)
        return pairs

    def _anchors(self, target_calls: Sequence[int], golden_calls: Sequence[int]) -> list[tuple[int, int]]:
        """Positions of calls that are matched with each other already, as many as cross nothing (longest increasing subsequence)."""
        if not any(i in self.found for i in target_calls):
            return []
        places = {j: position for position, j in enumerate(golden_calls)}
        known = [(position, places[j]) for position, i in enumerate(target_calls) if (j := self.found.get(i, -1)) in places]
        ends: list[int] = []  # of the increasing sequence of each length: the smallest last place
        chain: list[int] = []
        for _, place in known:
            position = bisect_left(ends, place)
            ends[position : position + 1] = [place]
            chain.append(position)
        kept = []
        length = len(ends) - 1
        for pair, position in zip(reversed(known), reversed(chain)):
            if position == length:
                kept.append(pair)
                length -= 1
        return kept[::-1]

    def _match_without_wrappers(self, target_calls: list[int], golden_calls: list[int]) -> list[tuple[int, int]]:
        """A module around others that only one side has (a wrapper) is taken away, and what is inside is matched in its place."""
        target_inner = [self._inside(self.target, i) for i in target_calls]
        golden_inner = [self._inside(self.golden, j) for j in golden_calls]
        unwrapped_target, unwrapped_golden = [i for some in target_inner for i in some], [j for some in golden_inner for j in some]
        if (
            len(unwrapped_target) == len(target_calls)
            and len(unwrapped_golden) == len(golden_calls)
            and unwrapped_target == target_calls
            and unwrapped_golden == golden_calls
        ):
            return []
        if unwrapped_golden == golden_calls:
            return self._lists(unwrapped_target, golden_calls)
        if unwrapped_target == target_calls:
            return self._lists(target_calls, unwrapped_golden)
        choices = [(unwrapped_target, golden_calls), (target_calls, unwrapped_golden)]
        choices.sort(key=lambda choice: -len(set(self._keys(self.target, choice[0], 2)) & set(self._keys(self.golden, choice[1], 2))))
        return self._lists(*choices[0]) or self._lists(*choices[1])

    def _inside(self, tree: Tree, op: int) -> list[int]:
        """The calls in a module that has no namesake on the other side; the call itself where it has, or is no module."""
        kind = tree.kinds[op]
        return tree.children.get(op, [op]) if len(kind) != 4 or kind[2] not in self._paths else [op]

    def _by_name(self, modules: bool = False) -> bool:
        """Records that came in another order, with the same name and shapes on both sides: those of modules, which may lack a result (a
        recomputation ends where nothing more is needed), else those whose modules do not belong to others. Returns True when there are."""
        target_forms, golden_forms = self.forms
        before = len(self.found)
        for i, name in enumerate(self.target.names):
            if i in self.found or self.target.is_gradients(i) or (modules and len(self.target.kinds[i]) != 4):
                continue
            j = self.golden.known_as.get(name)
            if j is None or j in self.back or (i in self._repeats[0]) != (j in self._repeats[1]):
                continue
            if self._cut_short(i, j) if modules else target_forms[i] == golden_forms[j] and self._around_alike(i, j):
                self.pair(i, j)
        return len(self.found) > before

    def _by_path(self) -> bool:
        """Modules at the same place of the model that take in and give out tensors of the same shapes, though one is of another class: a
        fused norm, an embedding with positions of its own. Calls of one class without a partner have none for another reason (the backward
        pass makes them again). Returns True when there are."""
        target_forms, golden_forms = self.forms
        known = {*self.golden.kinds}
        places: dict[tuple[str, ...], list[int]] = {}
        for j, kind in enumerate(self.golden.kinds):
            if len(kind) == 4 and j not in self.back and not self.golden.is_gradients(j):
                places.setdefault(kind[:3], []).append(j)
        before = len(self.found)
        for i, kind in enumerate(self.target.kinds):
            other_class = len(kind) == 4 and kind not in known and not self.target.is_gradients(i)
            if other_class and i not in self.found and (others := places.get(kind[:3])):
                j = others.pop(0)
                if target_forms[i] == golden_forms[j]:
                    self.pair(i, j)
        return len(self.found) > before

    def _cut_short(self, i: int, j: int) -> bool:
        """The same but for results that one side has none of."""
        target_shapes, golden_shapes = self.target.shapes(i), self.golden.shapes(j)
        return target_shapes.inputs == golden_shapes.inputs and (
            target_shapes.outputs == golden_shapes.outputs or not (_gives(self.target.side, i) and _gives(self.golden.side, j))
        )

    def _around_alike(self, i: int, j: int) -> bool:
        """The calls around two records belong to each other; or to none, and are not of two modules at other places of the model."""
        target_parent, golden_parent = self.target.parents[i], self.golden.parents[j]
        if target_parent in self.found or golden_parent in self.back:
            return self.found.get(target_parent) == golden_parent
        around = [tree.kinds[op] for tree, op in ((self.target, target_parent), (self.golden, golden_parent)) if op != ROOT]
        paths = {strip_wrappers(kind[2]) for kind in around if len(kind) == 4}
        return len(paths) < 2

    def _additions(self) -> None:
        """A call that adds a gradient to a buffer belongs to the one that adds the gradient of the same place, in whatever order a run does
        it (one that recomputes has another one), and inside of whatever module."""
        target_additions, golden_additions = _find_gradient_accumulations(self.target), _find_gradient_accumulations(self.golden)
        for (source, place), i in target_additions.items():
            j = golden_additions.get((self.found.get(source, -1), place))
            if j is not None:
                self.pair(i, j)

    def _find_renamed_modules(self) -> dict[str, str]:
        renamed: dict[str, str] = {}
        for i, j in sorted(self.found.items()):
            target_kind, golden_kind = self.target.kinds[i], self.golden.kinds[j]
            if len(target_kind) == 4 and len(golden_kind) == 4 and target_kind[2] != golden_kind[2]:
                renamed.setdefault(target_kind[2], golden_kind[2])
        return renamed

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
    side, accumulations = tree.side, dict[tuple[int, int], int]()
    for op, kind in enumerate(tree.kinds):
        if kind[0] != "forward" or kind[-1] not in ADDING:
            continue
        for row in side.rows(op):
            source = tree.producers.get(row)
            if source is None or side.role[row] != INPUT or tree.kinds[source][0] != "backward":
                continue
            given = [output for output in side.rows(source) if side.role[output] == OUTPUT]
            place = next((position for position, output in enumerate(given) if side.stats_of(output) == side.stats_of(row)), -1)
            if place >= 0:
                accumulations.setdefault((source, place), op)
    return accumulations


def _constant(tree: Tree, op: int) -> tuple[bytes, ...]:
    """The numbers that a function gives out which takes in nothing: it makes several of one shape."""
    side = tree.side
    if not calls_function(tree.kinds[op]) or not tree.makes_of_numbers(op):
        return ()
    return tuple(side.stats[row].tobytes() for row in side.rows(op) if side.role[row] == OUTPUT)


def _is_single(shape: Any) -> bool:
    return isinstance(shape, list) and distances.elements(shape) == 1


def _gives(side: DumpTable, op: int) -> bool:
    """The call has a tensor for a result."""
    return any(side.role[row] == OUTPUT and isinstance(side.shape[row], list) for row in side.rows(op))
