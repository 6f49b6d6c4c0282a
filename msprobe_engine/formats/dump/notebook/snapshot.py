"""One rank of one step of a dump, its records and their tensors, as `msprobe_engine.formats.dump.notebook.api` hands them out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from msprobe_engine.core import names
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.settings.tree import nearest
from msprobe_engine.formats.dump.notebook.step_dump import KINDS, DumpedEntry, DumpedTensor, StepDump, kind_of
from msprobe_engine.formats.dump.reader import Rank
from msprobe_engine.formats.tensors import saved_file
from msprobe_engine.formats.tensors.decoding import Array
from msprobe_engine.formats.tensors.reader import not_saved

T = TypeVar("T")


class Record:
    """One call: of a module, a function or a collective, the gradients of a module's parameters, or a saved variable."""

    __slots__ = ("snapshot", "source")

    def __init__(self, snapshot: Snapshot, source: DumpedEntry) -> None:
        self.snapshot = snapshot
        self.source = source

    @property
    def name(self) -> str:
        """As in dump.json."""
        return self.source.name

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return kind_of(self.name)

    @property
    def direction(self) -> str | None:
        """``forward``, ``backward`` (gradients too) or None (saved variables)."""
        return names.direction(self.name)

    @property
    def module(self) -> str | None:
        """Path of the module this is a call of, or ran in; None when that is not known."""
        return self.snapshot.module_of(self.name)

    @property
    def parent_name(self) -> str | None:
        """Name of the call it ran in; may name a node without a record (``optimizer``, a module that was filtered out)."""
        return self.source.parent

    @property
    def parent(self) -> Record | None:
        """The call it ran in, None at the top and where that has no record."""
        parent = self.source.parent
        return self.snapshot[parent] if parent is not None and parent in self.snapshot else None

    @property
    def children(self) -> list[Record]:
        """The records that ran directly in it, in order of completion."""
        return [self.snapshot[name] for name in self.snapshot.children.get(self.name, ())]

    @property
    def stack(self) -> tuple[str, ...]:
        """Call stack lines, innermost first; () when there are none (backward records, ``extra_info: false``)."""
        return self.source.stack

    @property
    def micro_step(self) -> int | None:
        """Micro batch within the step, None when not known."""
        return None if self.source.micro_step < 0 else self.source.micro_step

    @property
    def is_recompute(self) -> bool | None:
        """Was this forward call made to recompute activations? None when the dump does not tell.

        Versions of the format that do not write it are asked by structure: a forward call inside a backward one."""
        said = self.source.tags.get("is_recompute")
        if isinstance(said, bool):
            return said
        if self.direction != names.FORWARD or self.name not in self.snapshot.source.construct:
            return None
        return self.source.parent is not None and names.direction(self.source.parent) == names.BACKWARD

    @property
    def tags(self) -> Mapping[str, Any]:
        """Further keys of the record."""
        return self.source.tags

    @property
    def arguments(self) -> dict[str, Any]:
        """Section (``input_args``, ``input_kwargs``, ``output``, ``parameters``, ``input``, ...) to nested lists and dicts of
        `DumpedTensor`, `Opaque` (what is no tensor) and None."""
        return self.source.sections

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Place to tensor: ``input.0``, ``kwargs.mask``, ``output.0.1``, ``parameters.weight``, a parameter's name in gradient
        records, ``""`` or ``0.k`` in saved variables."""
        return {place: Tensor.of(self, place, found) for place, found in self.source.tensors()}

    def tensor(self, place: str = "") -> Tensor:
        """The tensor at `place`.

        Raises:
            UsageError: there is none; the places that there are are named.
        """
        tensors = self.tensors
        if place not in tensors:
            raise UsageError(f"{self.name}: no tensor at {place!r}; there are {', '.join(map(repr, list(tensors)[:20])) or 'none'}")
        return tensors[place]

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Of each tensor what `pandas_table.COLUMNS` names."""
        about = self.snapshot.step, self.snapshot.rank, self.name, self.kind, self.direction, self.module
        after = self.parent_name, self.micro_step, self.is_recompute
        for place, t in self.source.tensors():
            numbers = t.max, t.min, t.mean, t.norm, t.nan_count, t.inf_count, t.nonfinite, t.digest, t.md5, t.data_name
            yield (*about, place, t.description.dtype, t.description.shape, *numbers, *after)

    def __repr__(self) -> str:
        return f"<Record {self.name}: {len(self.tensors)} tensors>"


class Tensor(DumpedTensor):
    """One tensor of a record: the statistics of `DumpedTensor`, and its elements where they were saved."""

    record: Record
    place: str

    @classmethod
    def of(cls, record: Record, place: str, found: DumpedTensor) -> Tensor:
        """The tensor at `place` of a record."""
        made = cls._make(found)
        made.record, made.place = record, place
        return made

    @property
    def name(self) -> str:
        """Record name and place, as tensor files are called."""
        return f"{self.record.name}.{self.place}" if self.place else self.record.name

    @property
    def shape(self) -> tuple[int, ...]:
        """As dumped: of the cut with ``slice``, of the local shard of a DTensor."""
        return self.description.shape

    @property
    def dtype(self) -> str:
        """As the framework prints it: ``torch.float32``, ``Float32``."""
        return self.description.dtype

    @property
    def requires_grad(self) -> bool | None:
        """None when the dump does not say."""
        return self.description.requires_grad

    @property
    def extra(self) -> dict[str, Any]:
        """Further facts: ``placements`` and ``device_mesh`` of a DTensor, ..."""
        return dict(self.description.extra)

    @property
    def path(self) -> Path | None:
        """The file that holds it, None when it was not saved. Packed files hold many tensors.

        Raises:
            UsageError, DumpFormatError: it is gone, or the index of packed files is damaged.
        """
        return None if self.data_name is None else self.record.snapshot.source.files.source(self.data_name).path

    def load(self) -> Array:
        """The saved elements as numpy array, read now; torch is not needed. bfloat16 and float8 come as float32, which holds all
        their values.

        Raises:
            UsageError: this tensor was not saved, or its file is gone.
            DumpFormatError: the file is damaged, or the type is one that numpy cannot hold.
        """
        return saved_file.numpy_of(self.record.snapshot.source.files, self._saved_name())

    def torch(self) -> Any:
        """The saved tensor as ``torch.Tensor`` on the CPU, of the very type that was saved.

        Raises:
            UsageError: this tensor was not saved, or its file is gone.
            DumpFormatError: the file is damaged.
            MissingExtraError: torch is not installed.
        """
        return saved_file.torch_of(self.record.snapshot.source.files, self._saved_name())

    def _saved_name(self) -> str:
        if self.data_name is None:
            raise UsageError(f"{self.name}: was not saved{self._reason()}")
        return self.data_name

    def _reason(self) -> str:
        snapshot = self.record.snapshot
        if snapshot.task != "tensor":
            return f": the task of this dump is '{snapshot.task}'; save it with task tensor, or with tensor_list"
        for name, reason in snapshot.not_saved.items():
            if name in (self.name, f"{self.name}.pt"):
                return f": {reason}"
        return ""

    def __repr__(self) -> str:
        return f"<Tensor {self.name}: {self.dtype} {list(self.shape)}, max {self.max}, min {self.min}, norm {self.norm}>"


class NoSuchRecord(UsageError, KeyError):
    """A snapshot has no record of a name; a `KeyError` too, as of every mapping."""

    __str__ = Exception.__str__  # KeyError shows the repr of its text

    def __init__(self, name: Any, snapshot: Snapshot) -> None:
        near = nearest(name, snapshot)
        hint = f"the nearest is '{near}'" if near else 'find("*part*") looks for a part of a name'
        super().__init__(f"{snapshot.source.directory}: no record '{str(name)[:200]}' among {len(snapshot)}; {hint}")


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
            tests.append(lambda e: self._find_inherited(e.name, within, inside) is True)
        return [Record(self, e) for e in self.source.entries.values() if all(test(e) for test in tests)]

    def frame(self, pattern: str | None = None, **wanted: Any) -> Any:
        """As `Dump.frame`, of this snapshot."""
        from msprobe_engine.formats.dump.notebook import pandas_table

        pandas_table.pandas()
        return pandas_table.frame(row for record in self.find(pattern, **wanted) for row in record.rows())

    def module_of(self, name: str) -> str | None:
        """Path of the module that the record is a call of, or ran in; None when that is not known (level L1 writes no modules)."""
        return self._find_inherited(name, _own_module, self._modules)

    def _find_inherited(self, name: str, own: Callable[[str], T | None], known: dict[str, T | None]) -> T | None:
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
