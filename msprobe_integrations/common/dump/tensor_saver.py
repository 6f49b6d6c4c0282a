"""Takes copies of tensors in the hook: the bytes as they are at this moment, without waiting for the disk. What a tensor is, and how its
bytes are reached, the frameworks' own keepers know."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from msprobe_engine.core import redaction
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.formats.dump.writing.loose_files import Maker, Template
from msprobe_engine.formats.dump.writing.step_files import StepFiles
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.selection.patterns import NamePatterns
from msprobe_engine.probe.writer import Writer

NO_DIRECTORY = "tensors of a step whose directory cannot be made"
_GIL_BYTES = 64 << 10  # a smaller copy takes less time than another thread that is let in
_copy_large = ctypes.memmove  # lets other threads run meanwhile
_copy = ctypes.PyDLL(None).memmove
_copy.argtypes, _copy.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_void_p


K = TypeVar("K", bound="BaseTensorSaver")


class BaseTensorSaver(ABC):
    """What is saved of one dump.

    Args:
        store: makes files of the copies.
        lose: counts what could not be saved.
    """

    suffix: ClassVar[str] = ".pt"
    """Of the files."""

    @classmethod
    def of_dump(
        cls: type[K],
        dump: DumpSettings,
        backend: Any,
        pipeline: Pipeline,
        writer: Writer,
        faults: Faults,
        before: K | None = None,
        **more: Any,
    ) -> K | None:
        """What saves tensors as `dump` asks for; None when it does not.

        Args:
            before: what the same run used until now, see `_build_store`.
            more: of the framework's keeper.
        """
        store = _build_store(dump, cls.template, faults, writer.lose, None if before is None else before.store, suffix=cls.suffix)
        make: Any = cls
        keeper: K | None = None if store is None else make(backend, store, faults, pipeline.lose, **more)
        return keeper

    @staticmethod
    @abstractmethod
    def template(dtype: str, shape: tuple[int, ...]) -> Template:
        """What files of such tensors are made with, see `TensorStore`."""

    def __init__(self, store: TensorStore, faults: Faults, lose: Callable[[str], None]) -> None:
        self.store = store
        self._faults = faults
        self._lose = lose
        self._files: StepFiles | None = None
        self._step_open = False
        sections = store.options.sections(Entry("Module.m.M.forward.0", {"parameters": {}}))
        self.parameters = bool(sections)
        """Parameters are written, and so saved."""

    @abstractmethod
    def reduce(self, tensor: Any) -> TensorRef:
        """Statistics and a copy of a tensor. A tensor without a kernel for its type has a row without statistics. Never raises but in
        strict mode."""

    def begin_step(self, number: int) -> None:
        """A step begins whose directory was made by the sink, or could not be made."""
        self._files, self._step_open = self.store.step(number), True

    def is_wanted(self, name: str) -> bool:
        """Are the tensors of this record saved?"""
        saves = self.store.options.saves
        return saves is not None and self._step_open and saves(name)

    def _redact_tensor(self, files: StepFiles, ref: TensorRef) -> bool:
        """Must no file of this tensor be made? Then it is noted as not saved."""
        about = ref.description
        if redaction.active() is None or not redaction.is_integer(about.dtype):
            return False
        if ref.row >= 0:
            self.store.redact(files, ref.row, about.dtype, about.shape)
        return True

    def _copy_bytes(self, files: StepFiles, row: int, dtype: str, shape: tuple[int, ...], address: int, nbytes: int) -> None:
        """Keep the `nbytes` bytes at `address` as the tensor of `row`."""
        payload = self.store.place(files, row, dtype, shape, nbytes)
        if payload.slab is None:
            self._lose(payload.lost)
            return
        if nbytes:
            (_copy if nbytes < _GIL_BYTES else _copy_large)(payload.slab.address + payload.offset, address, nbytes)
        self.store.add(files, payload)

    def hand_over(self, entry: Entry) -> None:
        """A record is complete: its tensors get their file names. Doing so twice is harmless; records that are not handed over get
        them when the step ends."""
        if self._files is not None and self.is_wanted(entry.name):
            self.store.hand_over(self._files, entry)

    def end_step(self, entries: Sequence[Entry]) -> None:
        """Everything of the step was seen; `entries` are its records."""
        files, self._files, self._step_open = self._files, None, False
        if files is not None:
            self.store.end_step(files, entries)

    def rest(self) -> None:
        """The next step is not dumped."""
        self.store.rest()


# From dump settings to what makes files of tensors.
def _build_store(
    dump: DumpSettings,
    make: Maker,
    faults: Faults,
    count: Callable[..., None],
    before: TensorStore | None = None,
    *,
    suffix: str = ".pt",
) -> TensorStore | None:
    """What makes files of tensors as `dump` asks for; None when it asks for none.

    Args:
        make: templates of files, see `TensorStore`.
        count: told of what is lost.
        before: what the same run used until now, under other settings: the disk it took counts on.
    """
    saves = _saves(dump)
    if saves is None:
        return None
    store = TensorStore(
        Options(dump.data_mode, saves, suffix),
        make,
        faults,
        packed=dump.tensor_format == "packed",
        budget=dump.memory_budget_mb << 20,
        quota=int(dump.max_disk_gb * 1e9),
        count=count,
    )
    if before is not None:
        store.quota.used = before.quota.used
    return store


def _saves(dump: DumpSettings) -> Callable[[str], bool] | None:
    if dump.task in ("tensor", "overflow_check"):
        return lambda _: True
    if dump.task == "statistics" and dump.tensor_list and dump.level != "debug":
        return NamePatterns(dump.tensor_list)
    return None
