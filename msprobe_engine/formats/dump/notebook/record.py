"""One record of a dump and one tensor of a record, as `msprobe_engine.formats.dump.notebook.api` hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msprobe_engine.core import names
from msprobe_engine.core.errors import UsageError
from msprobe_engine.formats.dump.notebook.step_dump import DumpedEntry, DumpedTensor
from msprobe_engine.formats.tensors import saved_file
from msprobe_engine.formats.tensors.decoding import Array

if TYPE_CHECKING:
    from msprobe_engine.formats.dump.notebook.api import Snapshot

KINDS = ("api", "module", "collective", "parameters_grad", "debug")
"""Kinds of records. ``debug`` is what the user saved by name; a name of no known form counts as ``api``."""


def kind_of(name: str) -> str:
    """One of `KINDS`, by the form of the name."""
    parsed = names.parse(name)
    if isinstance(parsed, names.ModuleName):
        return "module"
    if isinstance(parsed, names.ParametersGradName):
        return "parameters_grad"
    if isinstance(parsed, names.DebugName):
        return "debug"
    return "collective" if names.is_collective(name) else "api"


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
