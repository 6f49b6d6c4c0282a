"""The records of one side as a tree: which record ran inside which, what kind of call each is, and where its inputs came from."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from msprobe_engine import names
from msprobe_engine.compare.side import INPUT, OUTPUT, PARAMETERS_GRAD, Side

ROOT = -1
Kind = tuple[str, ...]


class Shapes(NamedTuple):
    """What goes in and out of a call: (dtype, shape) of every tensor, by role."""

    inputs: tuple[object, ...]
    outputs: tuple[object, ...]


class Tree:
    """Built once per side; everything is found when it is first asked for.

    Args:
        side: without construct.json all records are children of the root, in the order of the file.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self.index = {name: i for i, name in enumerate(side.ops)}

    @cached_property
    def parents(self) -> list[int]:
        """Record index of each record's nearest enclosing record, or `ROOT`."""
        found = []
        for name in self.side.ops:
            parent, seen = self.side.parent(name), {name}
            while parent is not None and parent not in self.index and parent not in seen:
                seen.add(parent)
                parent = self.side.parent(parent)
            found.append(self.index.get(parent, ROOT) if parent is not None and parent not in seen else ROOT)
        return _without_circles(found)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Record index (or `ROOT`) -> records directly inside, in the order they were completed. Parameter gradients are not among them:
        what they belong to is in their name."""
        found: dict[int, list[int]] = {}
        for i, parent in enumerate(self.parents):
            if not self.is_gradients(i):
                found.setdefault(parent, []).append(i)
        return found

    @cached_property
    def has_modules(self) -> bool:
        """At least one call of a module was recorded."""
        return any(len(kind) == 4 and kind[0] in ("forward", "backward") for kind in self.kinds)

    @cached_property
    def functions(self) -> list[int]:
        """Records that are no calls of modules and no parameter gradients."""
        return [i for i, kind in enumerate(self.kinds) if len(kind) != 4]

    def is_gradients(self, op: int) -> bool:
        """A record of parameter gradients."""
        rows = self.side.rows(op)
        return len(rows) > 0 and self.side.role[rows[0]] == PARAMETERS_GRAD

    @cached_property
    def kinds(self) -> list[Kind]:
        """What a record is, without its number: (direction, prefix, function) or (direction, ``Module``, path, class)."""
        found: list[Kind] = []
        for name in self.side.ops:
            parsed = names.parse(name)
            if isinstance(parsed, names.ModuleName):
                found.append((parsed.direction, parsed.kind, parsed.path, parsed.cls))
            elif isinstance(parsed, names.ApiName):
                found.append((parsed.direction, parsed.prefix, parsed.api))
            elif isinstance(parsed, names.ParametersGradName):
                found.append(("parameters_grad", parsed.kind, parsed.path, parsed.cls))
            elif isinstance(parsed, names.DebugName):
                found.append(("debug", parsed.name, "grad" if parsed.is_grad else ""))
            else:
                found.append(("", name))
        return found

    def relative(self, op: int, parent: int) -> Kind:
        """`kinds`, with a module's path below that of the enclosing record, so that renaming a model renames nothing inside it."""
        kind = self.kinds[op]
        if parent == ROOT or len(kind) != 4:
            return kind
        above = self.kinds[parent]
        if len(above) == 4 and kind[2].startswith(above[2] + "."):
            return (kind[0], kind[1], kind[2][len(above[2]) + 1 :], kind[3])
        return kind

    def shapes(self, op: int) -> Shapes:
        """dtypes and shapes of the record's tensors."""
        side = self.side
        inputs: list[object] = []
        outputs: list[object] = []
        for row in side.rows(op):
            shape = side.shape[row]
            item = (side.dtype[row], tuple(shape) if isinstance(shape, list) else shape)
            (outputs if side.role[row] == OUTPUT else inputs).append(item)
        return Shapes(tuple(inputs), tuple(outputs))

    @cached_property
    def producers(self) -> dict[int, int]:
        """Input row -> record that had a tensor with the same numbers and shape among its outputs last, before this record.

        The numbers of a tensor are its fingerprint: two tensors with equal extremes, mean and norm are taken for one. A module and the
        last call inside it have the same output; the call is taken, which came first.
        """
        side = self.side
        seen: dict[bytes, int] = {}
        found: dict[int, int] = {}
        raw = memoryview(side.numbers).cast("B")
        for op in range(len(side.ops)):
            outputs: list[bytes] = []
            own: set[bytes] = set()
            for row in side.rows(op):
                if side.requires_grad[row] is None and row in side.values:
                    continue
                shape = side.shape[row]
                if not isinstance(shape, list):
                    continue
                mark = bytes(raw[32 * row : 32 * row + 32]) + repr(shape).encode() + (side.md5[row] or "").encode()
                if side.role[row] == OUTPUT:
                    outputs.append(mark)
                elif side.role[row] == INPUT:
                    own.add(mark)
                    if mark in seen:
                        found[row] = seen[mark]
            for mark in outputs:
                if mark not in own or mark not in seen:
                    before = seen.get(mark)
                    if before is None or not self._inside(before, op):
                        seen[mark] = op
        return found

    def _inside(self, op: int, outer: int) -> bool:
        """Is `op` a descendant of `outer`?"""
        while op != ROOT:
            op = self.parents[op]
            if op == outer:
                return True
        return False

    def above(self, op: int) -> Iterator[int]:
        """The records that enclose this one, innermost first."""
        op = self.parents[op]
        while op != ROOT:
            yield op
            op = self.parents[op]


def _without_circles(parents: list[int]) -> list[int]:
    """A construct.json that was edited may say that two records enclose each other: such records hang below the root."""
    state = bytearray(len(parents))  # 1: on the way up from here, 2: known to end at the root
    for start in range(len(parents)):
        way = []
        op = start
        while op != ROOT and state[op] == 0:
            state[op] = 1
            way.append(op)
            op = parents[op]
        if op != ROOT and state[op] == 1:
            parents[op] = ROOT
        for op in way:
            state[op] = 2
    return parents
