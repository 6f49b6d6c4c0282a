"""Which records of two frameworks do the same: one call each, or several calls in the place of others.

Forward calls are aligned list by list, from the top of the model down: modules by name, class, sizes and parameters, functions by meaning,
sizes and numbers (`units`). What computes nothing (views, shapes, casts) comes last. What is left between two pairs on both sides is one
way to write what the other side writes otherwise: it is cut where the numbers agree (the end of a fused call), and each piece is a group.
Backward calls follow their forward calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from msprobe_engine.align.calls.longest_common import align
from msprobe_engine.align.frameworks.alignment_units import LEVELS, Key, Unit, by_name, moved_by_numbers, moved_by_shape, units
from msprobe_engine.align.frameworks.canonical import Terms, near
from msprobe_engine.formats.dump.dump_table import OUTPUT

MOVED = "computes nothing; the other side does without it"
SAME = "gives out what it takes in; the other side does without it"
WRAPPED = "stands around calls that the other side makes without it"

_LARGEST = 40_000
"""Pairs of calls that are held against each other for the place where numbers agree."""


@dataclass(frozen=True)
class Group:
    """Records that do the same.

    Attributes:
        target, golden: of the target and of the golden side, in order.
        mains: of each side the one whose name stands for all.
    """

    target: tuple[int, ...]
    golden: tuple[int, ...]
    mains: tuple[int, int]


@dataclass
class Grouped:
    """The outcome; a record is in one group, quiet, or has no partner.

    Attributes:
        groups: what belongs together.
        quiet: of the target and of the golden side: record -> why it needs no partner.
    """

    groups: list[Group] = field(default_factory=list)
    quiet: tuple[dict[int, str], dict[int, str]] = field(default_factory=lambda: ({}, {}))


class Grouping:
    """Aligns two sides."""

    def __init__(self, target: Terms, golden: Terms) -> None:
        self._sides = (target, golden)
        self._found = Grouped()
        self._used: tuple[set[int], set[int]] = (set(), set())

    def run(self) -> Grouped:
        if all(side.has_forward for side in self._sides):
            self._walk("forward")
            self._backward()
        else:
            self._walk("backward")
        self._gradients()
        return self._found

    def _walk(self, direction: str) -> None:
        work: list[tuple[Sequence[int], Sequence[int]]] = [(self._sides[0].roots, self._sides[1].roots)]
        while work:
            tops = work.pop()
            lists = [units(side, [child for op in ops for child in side.children(op, direction)]) for side, ops in zip(self._sides, tops)]
            before = len(self._found.groups)
            self._lists(lists[0], lists[1], nested=tops[0] != self._sides[0].roots)
            for made in self._found.groups[before:]:
                within = [any(side.children(op, direction) for op in ops) for side, ops in zip(self._sides, (made.target, made.golden))]
                if all(within):
                    work.append((made.target, made.golden))
                elif any(within):
                    self._whole(made, direction)

    def _whole(self, made: Group, direction: str) -> None:
        """One side has recorded what is inside of a call, the other side the call as a whole."""
        for side_index, (side, ops) in enumerate(zip(self._sides, (made.target, made.golden))):
            todo = [child for op in ops for child in side.children(op, direction)]
            for child in todo:
                self._found.quiet[side_index].setdefault(
                    child, f"is a part of {side.side.ops[made.mains[side_index]]}, which is compared as a whole"
                )
                todo += side.children(child, direction)

    def _lists(self, target: list[Unit], golden: list[Unit], nested: bool) -> None:
        """Align two lists; `nested`: they are of one module, where the order of what computes nothing says which is which."""
        spans = [(target, golden)]
        for level in LEVELS:
            spans = [cut for span in spans for cut in self._pair_equal_units(*span, level)]
        self._elsewhere(target, golden)
        spans = [
            ([u for u in target_units if u.main not in self._used[0]], [u for u in golden_units if u.main not in self._used[1]])
            for target_units, golden_units in spans
        ]
        for span in spans:
            parts = list(self._pair_equal_units(*span, moved_by_numbers))
            if nested:
                parts = [cut for part in parts for cut in self._pair_equal_units(*part, moved_by_shape)]
            self._rest([unit for part in parts for unit in part[0]], [unit for part in parts for unit in part[1]], nested)

    def _elsewhere(self, target: list[Unit], golden: list[Unit]) -> None:
        """Modules of one name and class that are called in another order."""
        free: dict[Hashable, list[Unit]] = {}
        for unit in golden:
            if unit.main not in self._used[1] and self._sides[1].is_module(unit.main):
                free.setdefault(by_name(self._sides[1], unit), []).append(unit)
        for unit in target if free else ():
            if unit.main not in self._used[0] and self._sides[0].is_module(unit.main):
                candidates = free.get(by_name(self._sides[0], unit))
                if candidates:
                    self._pair((unit,), (candidates.pop(0),))

    def _pair_equal_units(self, target: list[Unit], golden: list[Unit], level: Key) -> Iterator[tuple[list[Unit], list[Unit]]]:
        """Pair what is the same at a level; what lies between."""
        if not target or not golden:
            yield target, golden
            return
        keys = [
            [level(side, unit) or (side_index, unit.main) for unit in some]
            for side_index, (side, some) in enumerate(zip(self._sides, (target, golden)))
        ]
        i = j = 0
        for next_i, next_j in align(*keys):
            yield target[i:next_i], golden[j:next_j]
            self._pair((target[next_i],), (golden[next_j],))
            i, j = next_i + 1, next_j + 1
        yield target[i:], golden[j:]

    def _pair(self, target: Sequence[Unit], golden: Sequence[Unit]) -> None:
        ops = [tuple(op for unit in some for op in unit.ops) for some in (target, golden)]
        self._found.groups.append(Group(ops[0], ops[1], (_main(self._sides[0], target), _main(self._sides[1], golden))))
        for used, some in zip(self._used, ops):
            used.update(some)

    def _rest(self, target: list[Unit], golden: list[Unit], nested: bool) -> None:
        """What no level has matched between two pairs."""
        if target and golden and self._match_without_wrappers(target, golden, nested):
            return
        moving = [[unit for unit in some if side.moves(unit.main)] for side, some in zip(self._sides, (target, golden))]
        target, golden = self._quiet(0, target), self._quiet(1, golden)
        target, golden = (
            target or self._restore_moving_calls(0, moving[0], golden),
            golden or self._restore_moving_calls(1, moving[1], target),
        )
        if not target or not golden:
            return
        target_start, golden_start = 0, 0
        for i, j in self._find_agreeing_units(target, golden):
            self._pair(target[target_start : i + 1], golden[golden_start : j + 1])
            target_start, golden_start = i + 1, j + 1
        target, golden = target[target_start:], golden[golden_start:]
        if target and golden and self._could_be(target, golden):
            if len(target) == len(golden) and all(
                self._could_be([target_unit], [golden_unit]) for target_unit, golden_unit in zip(target, golden)
            ):
                for target_unit, golden_unit in zip(target, golden):
                    self._pair((target_unit,), (golden_unit,))
            else:
                self._pair(target, golden)

    def _match_without_wrappers(self, target: list[Unit], golden: list[Unit], nested: bool) -> bool:
        """Take away modules around calls that the other side makes without them, if that shows calls that are the same."""
        inner = [self._inner(side, some) for side, some in zip(self._sides, (target, golden))]
        choices = []
        for unwrapped_target, unwrapped_golden in ((inner[0], golden), (target, inner[1])):
            if unwrapped_target is not None and unwrapped_golden is not None:
                words = [
                    {(unit.word, side.sizes(unit.last, OUTPUT)) for unit in some}
                    for side, some in zip(self._sides, (unwrapped_target, unwrapped_golden))
                ]
                choices.append((len(words[0] & words[1]), unwrapped_target, unwrapped_golden))
        known = len({unit.word for unit in target} & {unit.word for unit in golden})
        best = max(choices, key=lambda choice: choice[0], default=None)
        if best is None or best[0] <= known:
            return False
        for side_index, (some, new) in enumerate(((target, best[1]), (golden, best[2]))):
            kept = {unit.main for unit in new}
            for unit in some:
                if unit.main not in kept:
                    self._found.quiet[side_index][unit.main] = WRAPPED
        self._lists(best[1], best[2], nested)
        return True

    @staticmethod
    def _inner(side: Terms, some: list[Unit]) -> list[Unit] | None:
        ops: list[int] = []
        for unit in some:
            within = side.children(unit.main, side.direction(unit.main)) if side.is_module(unit.main) else []
            ops += within or unit.ops
        return units(side, ops) if ops != [op for unit in some for op in unit.ops] else None

    def _quiet(self, side_index: int, some: list[Unit]) -> list[Unit]:
        """Without what computes nothing."""
        side, kept = self._sides[side_index], []
        for unit in some:
            why = MOVED if side.moves(unit.main) else SAME if side.hands_on(unit.main) and len(unit.ops) == 1 else ""
            if why:
                self._found.quiet[side_index][unit.main] = why
            else:
                kept.append(unit)
        return kept

    def _restore_moving_calls(self, side_index: int, some: list[Unit], others: list[Unit]) -> list[Unit]:
        """Calls that only hand on elements, where the other side has a name for just that (an embedding is rows of a table)."""
        restored = []
        for unit in some:
            if any(self._agree(*((unit, other) if side_index == 0 else (other, unit))) for other in others):
                del self._found.quiet[side_index][unit.main]
                restored.append(unit)
                break
        return restored

    def _find_agreeing_units(self, target: list[Unit], golden: list[Unit]) -> list[tuple[int, int]]:
        """Places where both sides have the same numbers, ascending."""
        agreeing: list[tuple[int, int]] = []
        if len(target) * len(golden) > _LARGEST:
            return agreeing
        start = 0
        for i, unit in enumerate(target):
            j = next((j for j in range(start, len(golden)) if self._agree(unit, golden[j])), -1)
            if j >= 0:
                agreeing.append((i, j))
                start = j + 1
        return agreeing

    def _agree(self, target_unit: Unit, golden_unit: Unit) -> bool:
        target, golden = self._sides
        return any(
            target.size(target_row) == golden.size(golden_row) > 1 and near(target.stats[target_row], golden.stats[golden_row])
            for target_row in target.rows(target_unit.last, OUTPUT)
            for golden_row in golden.rows(golden_unit.last, OUTPUT)
        )

    def _could_be(self, target: list[Unit], golden: list[Unit]) -> bool:
        """What comes out at the end is of one size, or all of it together is."""
        ends = [sum(side.sizes(some[-1].last, OUTPUT)) for side, some in zip(self._sides, (target, golden))]
        wholes = [{sum(sum(side.sizes(unit.last, OUTPUT)) for unit in some)} for side, some in zip(self._sides, (target, golden))]
        return ends[0] == ends[1] or bool(wholes[0] & wholes[1])

    def _backward(self) -> None:
        """Backward calls of forward calls that belong together, or that need no partner."""
        for made in list(self._found.groups):
            twins = [
                [twin for op in ops if (twin := side.twin(op)) is not None] for side, ops in zip(self._sides, (made.target, made.golden))
            ]
            if twins[0] and twins[1]:
                mains = [side.twin(main) for side, main in zip(self._sides, made.mains)]
                mains = [some[0] if main is None else main for main, some in zip(mains, twins)]
                self._found.groups.append(Group(tuple(sorted(twins[0])), tuple(sorted(twins[1])), (mains[0] or 0, mains[1] or 0)))
                for used, some in zip(self._used, twins):
                    used.update(some)
        for side, quiet in zip(self._sides, self._found.quiet):
            for op, why in list(quiet.items()):
                twin = side.twin(op)
                if twin is not None:
                    quiet[twin] = why

    def _gradients(self) -> None:
        """Gradients of the parameters of modules that belong together."""
        places: list[dict[str, list[int]]] = [{}, {}]
        for side, ops_by_path in zip(self._sides, places):
            for op in range(len(side.side.ops)):
                if side.tree.is_gradients(op):
                    ops_by_path.setdefault(side.path(op), []).append(op)
        for made in self._partners():
            ops = [[op for path in some for op in ops_by_path.pop(path, ())] for some, ops_by_path in zip(made, places)]
            if ops[0] and ops[1]:
                self._found.groups.append(Group(tuple(ops[0]), tuple(ops[1]), (ops[0][0], ops[1][0])))
                for used, some in zip(self._used, ops):
                    used.update(some)

    def _partners(self) -> Iterator[tuple[list[str], list[str]]]:
        """Paths of modules whose calls belong together, each once; without any call those of equal paths."""
        seen = set()
        for made in list(self._found.groups):
            pair = tuple(
                tuple(dict.fromkeys(side.path(op) for op in ops if side.is_module(op)))
                for side, ops in zip(self._sides, (made.target, made.golden))
            )
            if all(pair) and pair not in seen:
                seen.add(pair)
                yield list(pair[0]), list(pair[1])
        for op in range(len(self._sides[0].side.ops)):
            if self._sides[0].tree.is_gradients(op):
                yield [self._sides[0].path(op)], [self._sides[0].path(op)]


def _main(side: Terms, some: Sequence[Unit]) -> int:
    """Of several calls the first that computes something."""
    return next((unit.main for unit in some if not side.moves(unit.main)), some[0].main)
