"""Matches the records of two sides by structure: the same calls in the same order inside of the same module.

Lists of calls are aligned level by level. What is certain comes first (same call, same shapes, inputs from the same kinds of calls), then
what is left in the gaps by fewer and fewer signs; so one call more or less shifts nothing. Modules that are called otherwise on the other
side are matched when their class and what runs inside them agree, and are proposed as a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from msprobe_engine.compare.align import align, gaps
from msprobe_engine.compare.side import INPUT, Side
from msprobe_engine.compare.tree import ROOT, Tree

Key = Callable[["_View", int], Hashable]


@dataclass
class Structure:
    """Which record belongs to which.

    Attributes:
        pairs: (record of the target, record of the golden side), in the order of the target.
        only_target, only_golden: records that nothing matches.
        renamed: module path of the target -> path of the golden side, where they differ.
    """

    pairs: list[tuple[int, int]] = field(default_factory=list)
    only_target: list[int] = field(default_factory=list)
    only_golden: list[int] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)


def match_structure(target: Side, golden: Side) -> Structure:
    """Match two sides; see the module's text."""
    return Matcher(Tree(target), Tree(golden)).run()


class _View:
    """One side seen from one enclosing record."""

    def __init__(self, tree: Tree, parent: int) -> None:
        self.tree, self.parent = tree, parent


def _whole(view: _View, op: int) -> Hashable:
    tree = view.tree
    producers = tuple(
        tree.kinds[tree.producers[row]][-1] if row in tree.producers else "" for row in tree.side.rows(op) if tree.side.role[row] == INPUT
    )
    return (tree.relative(op, view.parent), tree.shapes(op), producers)


def _shaped(view: _View, op: int) -> Hashable:
    return (view.tree.relative(op, view.parent), view.tree.shapes(op))


def _named(view: _View, op: int) -> Hashable:
    return view.tree.relative(op, view.parent)


def _alike(view: _View, op: int) -> Hashable:
    """A module by class, direction, shapes and the calls right inside it; nothing else matches here."""
    tree = view.tree
    kind = tree.kinds[op]
    if len(kind) != 4:
        return ("", id(tree), op)
    inside = tuple(tree.kinds[child][-1] for child in tree.children.get(op, ()))
    return (kind[0], kind[3], tree.shapes(op).outputs, inside)


_KEYS: tuple[Key, ...] = (_whole, _shaped, _named, _alike)


class Matcher:
    """Walks two trees at once."""

    def __init__(self, target: Tree, golden: Tree) -> None:
        self.target, self.golden = target, golden
        self._found: dict[int, int] = {}

    def run(self) -> Structure:
        """Match everything below the roots, then what is left by name, then parameter gradients by the modules they belong to."""
        if self.target.has_modules != self.golden.has_modules:  # compiled, or another level: only calls of functions are on both sides
            self._lists(ROOT, ROOT, self.target.functions, self.golden.functions)
        else:
            work = [(ROOT, ROOT)]
            while work:
                a, b = work.pop()
                inside = self._lists(a, b, self.target.children.get(a, []), self.golden.children.get(b, []))
                work += [(x, y) for x, y in inside if x in self.target.children or y in self.golden.children]
        self._by_name()
        renamed = self._renamed()
        self._gradients(renamed)
        used = set(self._found.values())
        return Structure(
            sorted(self._found.items()),
            [i for i in range(len(self.target.side.ops)) if i not in self._found],
            [j for j in range(len(self.golden.side.ops)) if j not in used],
            renamed,
        )

    def _lists(self, a: int, b: int, first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
        one, other = _View(self.target, a), _View(self.golden, b)
        open_gaps = [(list(first), list(second))]
        pairs: list[tuple[int, int]] = []
        for key in _KEYS:
            left: list[tuple[list[int], list[int]]] = []
            for x, y in open_gaps:
                aligned = align([key(one, i) for i in x], [key(other, j) for j in y])
                pairs += [(x[i], y[j]) for i, j in aligned]
                left += [([x[i] for i in p], [y[j] for j in q]) for p, q in gaps(aligned, len(x), len(y))]
            open_gaps = left
        for i, j in pairs:
            self._found[i] = j
        for x, y in open_gaps:
            pairs += self._opened(a, b, x, y)
        return pairs

    def _opened(self, a: int, b: int, first: list[int], second: list[int]) -> list[tuple[int, int]]:
        """A module around others that only one side has (a wrapper) is taken away, and what is inside is matched in its place."""
        inner = [self.target.children.get(i, [i]) for i in first]
        other = [self.golden.children.get(j, [j]) for j in second]
        x, y = [i for some in inner for i in some], [j for some in other for j in some]
        if len(x) == len(first) and len(y) == len(second) and x == first and y == second:
            return []
        one_sided = x if y == second else first
        if y != second and x != first:
            found = self._lists(a, b, x, second)
            return found or self._lists(a, b, first, y)
        return self._lists(a, b, one_sided, y)

    def _by_name(self) -> None:
        """Records that came in another order (backward passes do), with the same name and shapes on both sides."""
        used = set(self._found.values())
        for i, name in enumerate(self.target.side.ops):
            if i not in self._found and not self.target.is_gradients(i):
                j = self.golden.index.get(name)
                if j is not None and j not in used and self.target.shapes(i) == self.golden.shapes(j):
                    self._found[i] = j
                    used.add(j)

    def _renamed(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for i, j in sorted(self._found.items()):
            x, y = self.target.kinds[i], self.golden.kinds[j]
            if len(x) == 4 and len(y) == 4 and x[2] != y[2]:
                found.setdefault(x[2], y[2])
        return found

    def _gradients(self, renamed: dict[str, str]) -> None:
        """The k-th gradients of a module with the k-th of its partner."""
        places: dict[str, list[int]] = {}
        for j in range(len(self.golden.side.ops)):
            if self.golden.is_gradients(j):
                places.setdefault(self.golden.kinds[j][2], []).append(j)
        for i in range(len(self.target.side.ops)):
            if self.target.is_gradients(i):
                path = self.target.kinds[i][2]
                others = places.get(renamed.get(path, path))
                if others:
                    self._found[i] = others.pop(0)
