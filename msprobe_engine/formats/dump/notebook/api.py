"""A dump as Python objects, for notebooks and scripts: `read` opens it, files are read when they are needed.

>>> from msprobe import dump
>>> out = dump.read("msprobe_output/dump")                 # doctest: +SKIP
>>> snapshot = out[3, 0]                                   # doctest: +SKIP
>>> for record in snapshot.find("*.softmax.*", kind="api"):  # doctest: +SKIP
...     print(record.name, record.tensor("output.0").max)

`docs/guide/read-a-dump.md` is the guide.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from msprobe_engine.core import names
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.tree import nearest
from msprobe_engine.core.text import notebook
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.completeness import warn_of_earlier_runs
from msprobe_engine.formats.dump.notebook.record import KINDS, Record, Tensor, kind_of
from msprobe_engine.formats.dump.notebook.shapes import with_shapes
from msprobe_engine.formats.dump.notebook.step_dump import DumpedEntry, StepDump
from msprobe_engine.formats.dump.reader import DumpDirectory, Rank, open_dump
from msprobe_engine.formats.tensors.reader import not_saved

__all__ = ["KINDS", "Dump", "NoSuchRecord", "Record", "Snapshot", "Tensor", "read"]

T = TypeVar("T")
_KEPT = 4  # snapshots that stay in memory


class NoSuchRecord(UsageError, KeyError):
    """A snapshot has no record of a name; a `KeyError` too, as of every mapping."""

    __str__ = Exception.__str__  # KeyError shows the repr of its text

    def __init__(self, name: Any, snapshot: Snapshot) -> None:
        near = nearest(name, snapshot)
        hint = f"the nearest is '{near}'" if near else 'find("*part*") looks for a part of a name'
        super().__init__(f"{snapshot.source.directory}: no record '{str(name)[:200]}' among {len(snapshot)}; {hint}")


def read(path: Path | str) -> Dump:
    """Open a dump by any of its paths (see `msprobe_engine.formats.dump.reader.open_dump`)."""
    dump = open_dump(path)
    warn_of_earlier_runs(dump)
    return Dump(dump)


class Dump:
    """The steps and ranks of a dump directory. ``dump[step, rank]`` is one `Snapshot`; the last four are kept."""

    def __init__(self, directory: DumpDirectory) -> None:
        self._directory = directory
        self._kept: OrderedDict[tuple[int, Rank], Snapshot] = OrderedDict()

    @property
    def root(self) -> Path:
        """The directory that was opened."""
        return self._directory.root

    @property
    def steps(self) -> list[int]:
        """Dumped steps, ascending."""
        return self._directory.steps

    def ranks(self, step: int) -> list[Rank]:
        """Ranks of a step, ascending; directories that do not say their rank come last, by name.

        Raises:
            UsageError: no such step.
        """
        return self._directory.ranks(step)

    def __getitem__(self, key: int | tuple[int, Rank]) -> Snapshot:
        """``dump[step, rank]``; ``dump[step]`` when the step has one rank.

        Raises:
            UsageError: no such step or rank, or several ranks and none chosen.
            DumpFormatError: a file is damaged.
        """
        step, rank = key if isinstance(key, tuple) else (key, None)
        if rank is None:
            self._directory.path(step)  # raises when there are several
            rank = self.ranks(step)[0]
        snapshot = self._kept[step, rank] = self._load(step, rank)
        self._kept.move_to_end((step, rank))
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return snapshot

    def __iter__(self) -> Iterator[Snapshot]:
        """Every rank of every step, in order, read one after the other."""
        for step in self.steps:
            for rank in self.ranks(step):
                yield self._load(step, rank)

    def frame(self, steps: Sequence[int] | None = None, ranks: Sequence[Rank] | None = None, **wanted: Any) -> Any:
        """A ``pandas.DataFrame`` with one row per tensor; columns: `msprobe_engine.formats.dump.notebook.pandas_table.COLUMNS`.

        Args:
            steps, ranks: only these; None is all.
            wanted: arguments of `Snapshot.find`.

        Raises:
            MissingExtraError: pandas is not installed.
            UsageError: a step that was not dumped.
        """
        from msprobe_engine.formats.dump.notebook import pandas_table

        pandas_table.pandas()  # before a long read, not after it
        chosen = self.steps if steps is None else steps
        rows = (
            (snapshot, snapshot.find(**wanted))
            for step in chosen
            for rank in self.ranks(step)
            if ranks is None or rank in ranks
            for snapshot in [self._load(step, rank)]
        )
        return pandas_table.frame(rows)

    def _load(self, step: int, rank: Rank) -> Snapshot:
        kept = self._kept.get((step, rank))
        if kept is not None:
            return kept
        loaded = self._directory.load(step, rank)
        if loaded.task == "structure" and (loaded.directory / layout.SHAPES).exists():
            loaded, _ = with_shapes(loaded)
        return Snapshot(loaded, step, rank)

    def __repr__(self) -> str:
        steps = self.steps
        shown = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        return f"<Dump {self.root}: {shown}>"

    def _repr_html_(self) -> str:
        rows = ((step, ", ".join(map(str, self.ranks(step)))) for step in self.steps)
        return notebook.table(f"Dump {self.root}", ("step", "ranks"), rows)


class Snapshot(Mapping[str, "Record"]):
    """One rank of one step: a mapping from record name to `Record`, in file order (order of completion).

    Attributes:
        step, rank: where it is from; `rank` is a directory name where that does not say the rank.
        source: what the files hold, as plain data.
    """

    def __init__(self, source: StepDump, step: int, rank: Rank | None) -> None:
        self.source = source
        self.step = step
        self.rank = rank
        self._modules: dict[str, str | None] = {}

    @property
    def task(self) -> str:
        """``statistics``, ``tensor`` or ``structure``."""
        return self.source.task

    @property
    def level(self) -> str:
        """``L0``, ``L1``, ``mix`` or ``debug``."""
        return self.source.level

    @property
    def framework(self) -> str:
        """``pytorch``, ``mindspore`` or ``mindtorch``."""
        return self.source.framework

    @property
    def complete(self) -> bool:
        """False when the step was cut off (killed process, exception)."""
        return self.source.complete

    @property
    def recovered(self) -> bool:
        """True when this was made from the frame log of a killed process."""
        return self.source.recovered

    @property
    def lost(self) -> dict[str, int]:
        """What was observed and could not be kept, reason to count."""
        lost = self.source.header.get("lost")
        return {str(k): v for k, v in lost.items() if isinstance(v, int)} if isinstance(lost, dict) else {}

    @cached_property
    def not_saved(self) -> dict[str, str]:
        """Tensors that were to be saved and have no file, name to reason.

        Raises:
            DumpFormatError: the list is damaged.
        """
        return {item["name"]: str(item.get("reason", "")) for item in not_saved(self.source.directory)}

    def __getitem__(self, name: str) -> Record:
        """The record of this very name.

        Raises:
            NoSuchRecord: there is none (a KeyError too, so ``in`` and ``get`` of other code work).
        """
        try:
            return Record(self, self.source.entries[name])
        except KeyError:
            raise NoSuchRecord(name, self) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.entries)

    def __len__(self) -> int:
        return len(self.source.entries)

    def __repr__(self) -> str:
        state = "" if self.complete else ", not complete"
        return f"<Snapshot step {self.step}, rank {self.rank}: {self.task}, {self.level}, {len(self)} records{state}>"

    def find(
        self,
        pattern: str | None = None,
        *,
        regex: str | None = None,
        kind: str | None = None,
        direction: str | None = None,
        module: str | None = None,
    ) -> list[Record]:
        """Records to which all that is given applies, in file order.

        Args:
            pattern: of the whole record name, with ``*``, ``?`` and ``[abc]``: ``"Functional.linear.*"``. Case counts.
            regex: a regular expression that is found anywhere in the name.
            kind: one of `KINDS`.
            direction: ``forward`` or ``backward``.
            module: path of a module, ``layers.0.mlp``: its own records and everything that ran inside its calls.

        Raises:
            UsageError: an unknown kind or direction, a regular expression that is none.
        """

        def within(node: str) -> bool | None:
            path = _own_module(node)
            return True if path is not None and (path == module or path.startswith(f"{module}.")) else None

        tests: list[Callable[[DumpedEntry], bool]] = []
        if pattern is not None:
            tests.append(lambda e: fnmatchcase(e.name, pattern))
        if regex is not None:
            try:
                found = re.compile(regex)
            except re.error as error:
                raise UsageError(f"find: regex {regex!r} is no regular expression ({error})") from None
            tests.append(lambda e: found.search(e.name) is not None)
        for what, value, allowed in (("kind", kind, KINDS), ("direction", direction, ("forward", "backward"))):
            if value is not None and value not in allowed:
                raise UsageError(f"find: {what} {value!r}; allowed: {', '.join(allowed)}")
        if kind is not None:
            tests.append(lambda e: kind_of(e.name) == kind)
        if direction is not None:
            tests.append(lambda e: names.direction(e.name) == direction)
        if module is not None:
            inside: dict[str, bool | None] = {}
            tests.append(lambda e: self._inherited(e.name, within, inside) is True)
        return [Record(self, e) for e in self.source.entries.values() if all(test(e) for test in tests)]

    def frame(self, pattern: str | None = None, **wanted: Any) -> Any:
        """As `Dump.frame`, of this snapshot."""
        from msprobe_engine.formats.dump.notebook import pandas_table

        pandas_table.pandas()
        return pandas_table.frame([(self, self.find(pattern, **wanted))])

    def module_of(self, name: str) -> str | None:
        """Path of the module that the record is a call of, or ran in; None when that is not known (level L1 writes no modules)."""
        return self._inherited(name, _own_module, self._modules)

    def _inherited(self, name: str, own: Callable[[str], T | None], known: dict[str, T | None]) -> T | None:
        """`own` of the innermost node that has it, from `name` upwards; `known` keeps the answers, so each node is asked once."""
        way: list[str] = []
        answer: T | None = None
        node: str | None = name
        while node is not None:
            if node in known:
                answer = known[node]
                break
            known[node] = None  # parents may go round in a damaged file
            way.append(node)
            answer = own(node)
            if answer is not None:
                break
            node = self.source.construct.get(node)
        known.update(dict.fromkeys(way, answer))
        return answer

    @cached_property
    def children(self) -> Mapping[str | None, list[str]]:
        """Name of a call to the names of the records that ran directly in it, in order of completion; None: those in no call."""
        children: dict[str | None, list[str]] = {}
        for entry in self.source.entries.values():
            children.setdefault(entry.parent, []).append(entry.name)
        return children

    @property
    def roots(self) -> list[Record]:
        """Records that ran in no other one."""
        known = self.source.entries
        return [self[name] for name, entry in known.items() if entry.parent is None or entry.parent not in known]


def _own_module(node: str) -> str | None:
    parsed = names.parse(node)
    return parsed.path if isinstance(parsed, (names.ModuleName, names.ParametersGradName)) else None
