"""The records of one side as a tree: which record ran inside which, what kind of call each is, and where its inputs came from."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.core import names
from msprobe_engine.core.operator_traits import PARAMETERS_OF
from msprobe_engine.formats.dump.dump_table import INPUT, OUTPUT, PARAMETERS_GRAD, DumpTable
from msprobe_engine.measure import factorize
from msprobe_engine.measure.comparable_dtypes import plain

ROOT = -1
MOST_LEVELS = 200
"""Of modules within modules; Python cannot call so many."""
Kind = tuple[str, ...]
_FULLY_SHARDED = "FSDP"
"""What `fully_shard` puts before the name of a module's class."""

FOREACH, FUSED = "_foreach_", "_fused_"
_OF_UPDATES = ("addcdiv_", "addcmul_", "lerp_", "add_", "sub_")
"""Calls that optimizers make, of each parameter or (``_foreach_add_``) of several, and that do not clip gradients."""
_OF_SEVERAL = frozenset(FOREACH + api for api in _OF_UPDATES)
_OF_ADAM = "addcdiv_"
"""Nothing but an optimizer divides so, while averages of weights and sums of gradients are made by the other calls, too."""
_DIRECTIONS = ("forward", "backward")
_MIX, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(32)


class Shapes(NamedTuple):
    """What goes in and out of a call: (dtype, shape) of every tensor, by role."""

    inputs: tuple[object, ...]
    outputs: tuple[object, ...]


class Producers:
    """Row -> record; of rows that have none, none. `records` is the column, with -1."""

    def __init__(self, records: array[int]) -> None:
        self.records = records

    def get(self, row: int) -> int | None:
        """The record, or None."""
        record = self.records[row] if row >= 0 else -1
        return None if record < 0 else record

    def __contains__(self, row: int) -> bool:
        return self.get(row) is not None

    def __getitem__(self, row: int) -> int:
        record = self.get(row)
        if record is None:
            raise KeyError(row)
        return record


class Tree:
    """Built once per side; everything is found when it is first asked for.

    Args:
        side: without construct.json all records are children of the root, in the order of the file.
        names: what the records are taken for, one per record; None: what a mapping of the side says (`DumpTable.aliases`).
    """

    def __init__(self, side: DumpTable, names: list[str] | None = None) -> None:
        self.side = side
        self.names = side.aliases if names is None else names
        self.index = {name: i for i, name in enumerate(side.ops)}
        self.known_as = self.index if self.names is side.ops else {name: i for i, name in enumerate(self.names)}

    def share_structure(self, known: dict[str, Any]) -> None:
        """Hold what equal trees have found of names and of what encloses what, in place of what was found here.

        Args:
            known: of trees whose `side` has the same columns but for numbers, by name; what is found here alone is added.
        """
        for name in ("index", "known_as", "parents", "children", "kinds", "gradients", "functions"):
            if name in self.__dict__:
                self.__dict__[name] = known.setdefault(name, self.__dict__[name])

    @cached_property
    def parents(self) -> list[int]:
        """Record index of each record's nearest enclosing record, or `ROOT`."""
        side, index = self.side, self.index
        construct = side.construct
        parents = []
        for name in side.ops:
            if construct.get(name) is None:
                parents.append(ROOT)
                continue
            parent, seen = side.parent(name), {name}
            while parent is not None and parent not in index and parent not in seen:
                seen.add(parent)
                parent = side.parent(parent)
            parents.append(index.get(parent, ROOT) if parent is not None and parent not in seen else ROOT)
        return _without_circles(parents)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Record index (or `ROOT`) -> records directly inside, in the order they were completed. Parameter gradients are not among them:
        what they belong to is in their name."""
        children: dict[int, list[int]] = {}
        for i, (parent, gradients) in enumerate(zip(self.parents, self.gradients)):
            if not gradients:
                children.setdefault(parent, []).append(i)
        return children

    @cached_property
    def has_modules(self) -> bool:
        """At least one call of a module was recorded."""
        return any(len(kind) == 4 and kind[0] in ("forward", "backward") for kind in self.kinds)

    @cached_property
    def functions(self) -> list[int]:
        """Records that are no calls of modules and no parameter gradients."""
        return [i for i, kind in enumerate(self.kinds) if len(kind) != 4]

    @cached_property
    def gradients(self) -> list[bool]:
        """Record -> it is one of parameter gradients, by what it holds and by a name that says of which module."""
        side = self.side
        first_rows = factorize.firsts(side)
        some = first_rows[:-1] < first_rows[1:]
        are_gradients = np.zeros(len(some), bool)
        are_gradients[some] = np.frombuffer(bytes(side.role), np.uint8)[first_rows[:-1][some]] == PARAMETERS_GRAD
        return [holds_gradient and len(kind) == 4 for holds_gradient, kind in zip(are_gradients.tolist(), self.kinds)]

    def is_gradients(self, op: int) -> bool:
        """A record of parameter gradients."""
        return self.gradients[op]

    @cached_property
    def kinds(self) -> list[Kind]:
        """What a record is, without its number: (direction, prefix, function) or (direction, ``Module``, path, class). Equal kinds are one
        object."""
        known: dict[str, Kind] = {}
        kinds: list[Kind] = []
        for name in self.names:
            head, _, last = name.rpartition(".")
            if last in _DIRECTIONS:
                head, _, number = head.rpartition(".")
                key = f"{last} {head}" if number.isdecimal() else name
            else:
                key = head if last.isdecimal() else name
            kind = known.get(key)
            if kind is None:
                kind = known[key] = _kind(name)
            kinds.append(kind)
        return kinds

    @cached_property
    def recomputed(self) -> frozenset[int]:
        """Calls that the backward pass makes again, with collectives inside of them, which say nothing of it."""
        tagged = {op for op, tags in self.side.tags.items() if tags.get("is_recompute")}
        return frozenset(tagged.union(op for op in self.side.collectives if tagged and not tagged.isdisjoint(self.above(op))))

    def tensors_in(self, op: int) -> list[int]:
        """Rows of the tensors that a record takes in, and of the numbers."""
        side = self.side
        return [row for row in side.rows(op) if side.role[row] == INPUT and isinstance(side.shape[row], list)]

    def makes_of_numbers(self, op: int) -> bool:
        """A record takes in no tensor, numbers at most."""
        return all(row in self.side.values for row in self.tensors_in(op))

    def takes_parameter(self, row: int) -> bool:
        """A row is a parameter that a function takes in, where no calls of modules say so."""
        side, kind = self.side, self.kinds[self.side.op[row]]
        place = side.name[row].rpartition(".input.")[2]
        return bool(side.requires_grad[row]) and calls_function(kind) and place in PARAMETERS_OF.get(kind[2], ())

    @cached_property
    def made_again(self) -> frozenset[int]:
        """Calls that the backward pass makes a second time, of the same numbers: the first time they may need no gradients."""
        side = self.side

        def numbers(op: int) -> Hashable:
            return (self.kinds[op], *(side.stats[row].tobytes() for row in self.tensors_in(op)))

        again, kinds = {numbers(op) for op in self.recomputed}, {self.kinds[op] for op in self.recomputed}
        first_time = (op for op in range(len(self.kinds)) if op not in self.recomputed and self.kinds[op] in kinds)
        return frozenset(op for op in first_time if numbers(op) in again)

    def twin(self, op: int) -> int | None:
        """The backward record of a forward record."""
        if self.kinds[op][0] != "forward":
            return None
        head, _, tail = self.names[op].rpartition("forward")
        return self.known_as.get(f"{head}backward{tail}")

    @cached_property
    def last_backward(self) -> int:
        """The last record of a backward pass; the number of records when there is none."""
        return max((op for op, kind in enumerate(self.kinds) if kind[0] == "backward"), default=len(self.kinds))

    @cached_property
    def first_backward(self) -> int:
        """The first record of a backward pass; the number of records when there is none."""
        return next((op for op, kind in enumerate(self.kinds) if kind[0] == "backward"), len(self.kinds))

    @cached_property
    def first_update(self) -> int:
        """The first call of an optimizer behind the backward pass; -1 without one."""
        for op, kind in enumerate(self.kinds[self.last_backward + 1 :], self.last_backward + 1):
            if kind[-1].startswith(FUSED) or kind[-1].removeprefix(FOREACH) in _OF_UPDATES:
                return op
        return -1

    @cached_property
    def way_of_update(self) -> str:
        """How the optimizer makes its calls: ``_foreach_`` or ``_fused_`` of several parameters, or of each by itself ("")."""
        if self._is_fused:
            return FUSED  # it counts its steps by a call of the other kind
        if _OF_ADAM in self._behind and FOREACH + _OF_ADAM not in self._behind:
            return ""  # an average of the weights is made by one call of all of them
        return FOREACH if self.changes_several else ""  # averages of weights are made by a call each before or behind it

    @cached_property
    def changes_several(self) -> bool:
        """A call behind the backward pass, of the optimizer or of an average, changes several parameters or averages at once."""
        return self._is_fused or not _OF_SEVERAL.isdisjoint(self._behind)

    @cached_property
    def _behind(self) -> frozenset[str]:
        return frozenset(kind[-1] for kind in self.kinds[self.last_backward + 1 :])

    @cached_property
    def _is_fused(self) -> bool:
        return any(api.startswith(FUSED) for api in self._behind)

    @cached_property
    def first_of_modules(self) -> int:
        """The first record inside of a module, or of one; the number of records when there is none."""
        inside = (op for op, kind in enumerate(self.kinds) if len(kind) == 4 or self.parents[op] != ROOT)
        return next(inside, len(self.kinds))

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
            item = self.form(side.dtype[row], shape)
            (outputs if side.role[row] == OUTPUT else inputs).append(item)
        return Shapes(tuple(inputs), tuple(outputs))

    def form(self, dtype: str | None, shape: Any) -> Hashable:
        """What two rows that belong together agree in."""
        return plain(dtype), tuple(shape) if isinstance(shape, list) else shape

    def forms(self, numbers: dict[Hashable, int]) -> array[int]:
        """One number per record: equal where `shapes` are equal. `numbers` is shared by the trees that are compared."""
        side = self.side
        (kinds, dtypes), (sizes, shapes) = factorize.number_objects(side.dtype), factorize.number_objects(side.shape)
        both = kinds * max(len(shapes), 1) + sizes
        items: dict[int, int] = {}
        for item in dict.fromkeys(both.tolist()):
            dtype, shape = dtypes[item // len(shapes)], shapes[item % len(shapes)]
            key = ("row", self.form(dtype, shape))
            items[item] = numbers.setdefault(key, len(numbers))
        out = np.frombuffer(bytes(side.role), np.uint8) == OUTPUT
        words = np.fromiter(map(items.__getitem__, both.tolist()), np.int64, len(both)) * 2 + out
        text, ends = words.tobytes(), side.offsets.tolist()
        return array("q", [numbers.setdefault(text[8 * start : 8 * end], len(numbers)) for start, end in pairwise(ends)])

    @cached_property
    def producers(self) -> Producers:
        """Input row -> record that had a tensor with the same numbers and dimensions among its outputs last, before this record.

        The numbers of a tensor are its fingerprint: two tensors with equal extremes, mean and norm are taken for one. A module and the
        last call inside it have the same output; the call is taken, which came first.
        """
        side = self.side
        records = array("q", [-1]) * len(side)
        rows, marks, out = self._marks()
        seen: dict[int, int] = {}
        current = -1
        outputs: list[int] = []
        own: set[int] = set()
        for row, mark, op, gives in zip(rows, marks, np.array(side.op, np.int64)[rows].tolist(), out):
            if op != current:
                self._give(seen, current, outputs, own)
                current, outputs, own = op, [], set()
            if gives:
                outputs.append(mark)
            else:
                own.add(mark)
                before = seen.get(mark, -1)
                if before >= 0:
                    records[row] = before
        self._give(seen, current, outputs, own)
        return Producers(records)

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Record -> records that take in what it gave out."""
        users: dict[int, list[int]] = {}
        for row, source in enumerate(self.producers.records):
            if source >= 0:
                users.setdefault(source, []).append(self.side.op[row])
        return users

    def _give(self, seen: dict[int, int], op: int, outputs: list[int], own: set[int]) -> None:
        for mark in outputs:
            before = seen.get(mark)
            if before is None or (mark not in own and not self._inside(before, op)):
                seen[mark] = op

    def _marks(self) -> tuple[list[int], list[int], list[bool]]:
        """Input and output rows of tensors that are both taken in and given out somewhere: row, 64 bits of its fingerprint, is it an
        output."""
        side = self.side
        role = np.frombuffer(bytes(side.role), np.uint8)
        sizes, shapes = factorize.number_objects(side.shape)
        tensor = np.array([type(shape) is list for shape in shapes] or [False])[sizes] & ((role == INPUT) | (role == OUTPUT))
        for row in side.values:
            tensor[row] &= side.requires_grad[row] is not None
        turned: dict[Hashable, int] = {}  # ``x.mT`` is no call: a matrix and the transposed one have the same numbers
        alike = [
            turned.setdefault(tuple(sorted(map(str, shape))) if type(shape) is list else number, number)
            for number, shape in enumerate(shapes)
        ]
        mark = np.array(alike or [0], np.uint64)[sizes]
        if any(side.md5):
            mark ^= np.fromiter(map(hash, side.md5), np.int64, len(side)).view(np.uint64)
        with np.errstate(over="ignore"):
            for part in side.stats.view(np.uint64).T:
                mark = (mark ^ part) * _MIX
                mark ^= mark >> _HALF
        out = role == OUTPUT
        rows = np.flatnonzero(tensor)
        shared = np.intersect1d(mark[rows[out[rows]]], mark[rows[~out[rows]]])
        rows = rows[np.isin(mark[rows], shared)] if len(shared) else rows[:0]
        return rows.tolist(), mark[rows].tolist(), out[rows].tolist()

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


def calls_function(kind: Kind) -> bool:
    """A forward call of a function, not of a module."""
    return len(kind) == 3 and kind[0] == "forward"


def _kind(name: str) -> Kind:
    parsed = names.parse(name)
    if isinstance(parsed, names.ModuleName):
        return (parsed.direction, parsed.kind, parsed.path, parsed.cls.removeprefix(_FULLY_SHARDED) or parsed.cls)
    if isinstance(parsed, names.ApiName):
        return (parsed.direction, parsed.prefix, parsed.api)
    if isinstance(parsed, names.ParametersGradName):
        return ("parameters_grad", parsed.kind, parsed.path, parsed.cls)
    if isinstance(parsed, names.DebugName):
        return ("debug", parsed.name, "grad" if parsed.is_grad else "")
    return ("", name)


def _without_circles(parents: list[int]) -> list[int]:
    """A construct.json that was edited may say that two records enclose each other, or nest without an end, which would make the work the
    square of the records: such records hang below the root."""
    state = bytearray(len(parents))  # 1: on the way up from here, 2: known to end at the root
    depth = [0] * len(parents)
    for start in range(len(parents)):
        path = []
        op = start
        while op != ROOT and state[op] == 0:
            state[op] = 1
            path.append(op)
            op = parents[op]
        if op != ROOT and state[op] == 1:
            parents[op] = ROOT
        for op in reversed(path):
            state[op] = 2
            depth[op] = 0 if parents[op] == ROOT else depth[parents[op]] + 1
            if depth[op] > MOST_LEVELS:
                parents[op], depth[op] = ROOT, 0
    return parents
