"""Records of several ranks in one side, each under a name of its own that fits the whole model."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msprobe_engine.align.parallel import micro_batches
from msprobe_engine.core import names
from msprobe_engine.formats.dump.dump_table import OUTPUT, DumpTable

ORIGIN = "origin"
"""Key among a record's tags: ``{"rank": ..., "record": ...}``, where it was dumped and under which name."""


def origin_of(side: DumpTable, op: int) -> tuple[int, str] | None:
    """(rank, name) that a record has in its dump, where it was put together with others; None of any other record."""
    origin = side.tags.get(op, {}).get(ORIGIN)
    return (origin["rank"], origin["record"]) if origin else None


@dataclass(frozen=True)
class Source:
    """Where records come from.

    Attributes:
        rank: of the dump.
        counter: sources of one counter number their calls of functions together (chunks of a model on one rank).
        side: the records.
        path: a module's path -> its path in the whole model.
    """

    rank: int
    counter: int
    side: DumpTable
    path: Callable[[str], str]


class RecordMerger:
    """Puts records of several sources into one side, in any order.

    Args:
        sources: the first one gives the header.
        across: paths (of the whole model) of modules that several sources hold a part of: their calls with one number are one call.
    """

    def __init__(self, sources: Sequence[Source], across: Container[str] = ()) -> None:
        self._sources, self._across = sources, across
        first_side = sources[0].side
        self._side = DumpTable(first_side.path, header=first_side.header, recovered=any(source.side.recovered for source in sources))
        for source in sources:
            for problem in source.side.problems:
                self._side.add_problem(problem)
        self._numbers: dict[tuple[object, ...], int] = {}
        self._next: dict[tuple[str, ...], int] = {}

    def append_record(
        self, source_index: int, op: int, name: str, begun: tuple[DumpTable, int] | None = None, backward: bool = False
    ) -> None:
        """Add a record at the end.

        Args:
            source_index: which source.
            name: as `rename_record` gives it.
            begun: another record that has what went in; None: this one.
            backward: made in a backward pass. A gradient that another rank has sent is said to require one; that tells nothing.
        """
        source, whole = self._sources[source_index], self._side
        side = source.side
        start, place = len(whole.name), len(whole.ops)
        input_side, input_op = begun or (side, op)
        micro_batches.append_record(whole, side, op)
        micro_batches.add_rows(whole, input_side, range(input_side.rows(input_op).start, _first_output(input_side, input_op)))
        middle = len(whole.name)
        micro_batches.add_rows(whole, side, range(_first_output(side, op), side.rows(op).stop))
        whole.ops[place] = name
        tags = whole.tags.get(place, {})
        whole.tags[place] = {ORIGIN: {"rank": source.rank, "record": side.ops[op]}, **tags}
        for row in range(start, len(whole.name)):
            old = input_side.ops[input_op] if row < middle else side.ops[op]
            whole.name[row] = name + whole.name[row][len(old) :]
            whole.data_name[row] = ""  # saved tensors lie in the directories of several ranks
            if backward:
                whole.requires_grad[row] = None

    def rename_record(self, source_index: int, name: str) -> str:
        """The name of a record in the whole: path of the whole model, calls counted over all sources."""
        source = self._sources[source_index]
        parsed = names.parse(name)
        if isinstance(parsed, names.ModuleName):
            path = source.path(parsed.path)
            owner = -1 if path in self._across else source_index
            return str(parsed._replace(path=path, number=self._number(owner, ("module", path, parsed.cls), parsed.number)))
        if isinstance(parsed, names.ParametersGradName):
            path, number = source.path(parsed.path), parsed.number
            return str(
                parsed._replace(path=path, number=None if number is None else self._number(source_index, ("gradients", path), number))
            )
        if isinstance(parsed, names.ApiName):
            return str(parsed._replace(number=self._number(source.counter, ("call", parsed.prefix, parsed.api), parsed.number)))
        return name

    def _number(self, owner: int, kind: tuple[str, ...], number: int) -> int:
        """Calls of one owner keep their order; numbers are given as they come."""
        key = (owner, number, *kind)
        if key not in self._numbers:
            self._numbers[key] = self._next.get(kind, 0)
            self._next[kind] = self._numbers[key] + 1
        return self._numbers[key]

    def finish_table(self, owns: Callable[[int, str], bool], around: Mapping[str, str] | None = None) -> DumpTable:
        """The side, with call stacks and places in the tree under the new names.

        Args:
            owns: does a source give the record of this name (of the dump)?
            around: record -> the record around it, where construct.json has another one.
        """
        side = self._side
        stacks: dict[str, list[str]] = {}
        construct: dict[str, Any] = {}
        for source_index, source in enumerate(self._sources):
            for name, node in source.side.construct.items():
                if owns(source_index, name):
                    parent = node[0] if isinstance(node, list) and node else node
                    new = self.rename_record(source_index, parent) if isinstance(parent, str) else parent
                    construct.setdefault(
                        self.rename_record(source_index, name), [new, *node[1:]] if isinstance(node, list) and node else new
                    )
            for name, lines in source.side.stacks.items():
                if owns(source_index, name):
                    stacks.setdefault(self.rename_record(source_index, name), lines)
        construct.update(around or {})
        side.construct, side.stacks = construct, stacks
        known: dict[Any, Any] = {}
        for row, shape in enumerate(side.shape):  # equal shapes are one object on a side
            side.shape[row] = known.setdefault(tuple(shape) if isinstance(shape, list) else shape, shape)
        return side


def _first_output(side: DumpTable, op: int) -> int:
    rows = side.rows(op)
    return next((row for row in rows if side.role[row] == OUTPUT), rows.stop)
