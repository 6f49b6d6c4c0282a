"""The tensor directory of one step: what is kept for it, the files in it, and what could not be saved."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.io.file_batches import send_off
from msprobe_engine.core.io.output_files import write_all, write_file
from msprobe_engine.core.io.regular_files import DIRECTORY_MODE, FILE_MODE, NEW_FILE, open_regular, require_directory
from msprobe_engine.core.records import Entry, TensorRef
from msprobe_engine.formats.dump import layout

if TYPE_CHECKING:
    from msprobe_engine.formats.dump.writing.host_memory import Slab

Flags = npt.NDArray[np.bool_]
WAITING, WRITTEN, LOST = 0, 1, 2
OVER_QUOTA = "tensors over max_disk_gb"
NO_MEMORY = "tensors without host memory"
NOT_COPIED = "tensors not copied"
NOT_WRITTEN = "tensor files not written"
REDACTED = "tensors redacted"
NO_NAME = "tensor names that cannot be file names"


class Ready(Protocol):
    """Says when a copy that a device makes is there."""

    def wait(self) -> None:
        """Return when the bytes have arrived. Called on a writer thread."""
        ...


class Format(Protocol):
    """How the tensors of one step become files. All methods run on writer threads."""

    def contents(self, payloads: list[Payload]) -> None:
        """The bytes of these payloads are there."""
        ...

    def add_name(self, payload: Payload, name: str) -> None:
        """One more name of a payload; the caller holds the lock of the step."""
        ...

    def withdraw(self, payload: Payload, name: str) -> None:
        """`name` belongs to another payload now; the caller holds the lock of the step."""
        ...

    def flush(self) -> None:
        """Memory is short: write what is held back."""
        ...

    def finish(self) -> None:
        """All bytes and names of the step are here."""
        ...


class Payload:
    """The bytes of one tensor, keyed by its statistics row.

    Attributes:
        row: statistics row of the step.
        dtype: as dump files have it, ``torch.float32``.
        shape, nbytes: of the contiguous bytes, in C order.
        slab, offset: where they are; None when they are not in memory (any more).
        ready: waits for a copy that is under way, None when the bytes are there.
        reserved: bytes of the disk quota taken for it.
        names: file names it was asked for.
        state: WAITING, WRITTEN or LOST.
        where: files: the name (or temporary name) of its file; packed: the name of its shard.
        key: packed: its name in the shard.
        why: reason in the list when it is LOST. lost: what it is counted as when it found no room.
    """

    __slots__ = ("dtype", "key", "lost", "names", "nbytes", "offset", "ready", "reserved", "row", "shape", "slab", "state", "where", "why")

    def __init__(self, row: int, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        self.row, self.dtype, self.shape, self.nbytes = row, dtype, shape, nbytes
        self.slab: Slab | None = None
        self.offset = self.reserved = 0
        self.ready: Ready | None = None
        self.names: list[str] = []
        self.state = WAITING
        self.where: str | None = None
        self.key = ""
        self.why = self.lost = ""

    @property
    def view(self) -> memoryview:
        assert self.slab is not None
        return self.slab.view[self.offset : self.offset + self.nbytes]

    @property
    def address(self) -> int:
        """Where the bytes are."""
        assert self.slab is not None
        return self.slab.address + self.offset


class NotSaved(NamedTuple):
    """A tensor that has no file although it was asked for."""

    name: str
    nbytes: int
    reason: str


class Saved(NamedTuple):
    """What of a step is saved.

    Attributes:
        rows: [n] bool by statistics row, the last one False.
        lost_names: file names that were not written although their row was kept.
        late: losses that hooks did not count, reason to count.
        waited: seconds that the training waited for memory, and for files of earlier steps.
    """

    rows: Flags
    lost_names: frozenset[str]
    late: dict[str, int]
    waited: float


NOTHING = Saved(np.zeros(1, np.bool_), frozenset(), {}, 0.0)


class StepFiles:
    """One step of one rank. Fields without a note are guarded by `lock`.

    Attributes:
        kept: row to payload; written by hooks only.
        batch: what was not given to the writer threads yet; guarded by the store.
        pending: batches that writer threads have not finished; guarded by the store.
        closed: no more payloads and entries come. finishing: nor anything else for the writer threads; guarded by the store.
        complete: the index and the list of what is not saved are written, or their turn has come.
        names: file name to (number of the entry that asked for it, payload).
        again: further claims on a name, each with the number of its entry.
        unsaved: what is listed in ``not_saved.json``.
        lost_names: names without a file although the tensor is saved under others.
        late: losses that the hooks did not know of, reason to count.
        waited: seconds that the training waited for memory, and for files of earlier steps. clock: how many all steps before had waited.
    """

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path
        self.tensors = f"{path}/{layout.TENSORS}"
        self.kept: dict[int, Payload] = {}
        self.batch: list[Payload | tuple[int, Entry]] = []
        self.batch_bytes = 0
        self.pending = 0
        self.closed = self.finishing = self.complete = False
        self.order = itertools.count()
        self.handed: set[int] = set()
        self.names: dict[str, tuple[int, Payload]] = {}
        self.again: list[tuple[int, str, Payload]] = []
        self.unsaved: list[NotSaved] = []
        self.lost_names: set[str] = set()
        self.late: dict[str, int] = {}
        self.clock = self.waited = 0.0
        self.format: Format
        self.lock = threading.RLock()
        self._fd = -1

    def lose(self, name: str, nbytes: int, reason: str, kind: str = "") -> None:
        """Note that `name` gets no file. With a `kind` it is the name that is lost, and counted; without one all of the tensor is."""
        with self.lock:
            self.unsaved.append(NotSaved(name, nbytes, reason))
            if kind:
                self.lost_names.add(name)
                self.count(kind)

    def count(self, kind: str) -> None:
        """Count one loss that the hooks do not know of."""
        with self.lock:
            self.late[kind] = self.late.get(kind, 0) + 1

    def name(self, order: int, wanted: Sequence[tuple[str, str | None, TensorRef]]) -> None:
        """A record is complete. `order`: its number among those of the step; `wanted`: see `tensor_names.tensor_files`."""
        with self.lock:
            for wish, name, ref in wanted:
                payload = self.kept.get(ref.row)
                if payload is None:
                    continue
                known = self.names.get(name or wish)
                if known is not None:
                    if known[1] is not payload and name is not None:
                        self.again.append((order, name, payload))
                    continue
                self.names[name or wish] = (order, payload)
                if name is None:
                    self.lose(wish, payload.nbytes, "its file name would be longer than 255 bytes or have characters that it cannot have")
                    self.count(NO_NAME)
                else:
                    self._give_name(payload, name)

    def resolve_repeated_names(self) -> None:
        """All records and bytes are here: names that were given twice go to the record that came last."""
        with self.lock:
            again, self.again = sorted(self.again, key=lambda item: item[0]), []
            for order, name, payload in again:
                before, other = self.names[name]
                if order > before and other is not payload:
                    if other.state != LOST:
                        self.format.withdraw(other, name)
                    self.names[name] = (order, payload)
                    self._give_name(payload, name)

    def _give_name(self, payload: Payload, name: str) -> None:
        if payload.state == LOST:
            self.lose(name, payload.nbytes, payload.why)
        else:
            self.format.add_name(payload, name)

    def find_saved(self) -> Saved:
        """What is saved, as far as is known now."""
        rows = np.zeros(max(self.kept, default=-1) + 2, np.bool_)
        rows[[row for row, payload in list(self.kept.items()) if payload.state != LOST]] = True
        with self.lock:
            return Saved(rows, frozenset(self.lost_names), dict(self.late), self.waited)

    def move(self, path: str) -> None:
        """The directory was renamed; a descriptor of it goes on."""
        with self.lock:
            self.path, self.tensors = path, f"{path}/{layout.TENSORS}"

    def directory(self) -> int:
        """Descriptor of the tensor directory, which is created when it is needed first.

        Raises:
            OSError: it cannot be made.
        """
        with self.lock:
            if self._fd < 0:
                try:
                    os.mkdir(self.tensors, DIRECTORY_MODE)
                except FileExistsError:
                    require_directory(self.tensors)
                self._fd = os.open(self.tensors, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            return self._fd

    def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Write a file of this name in the tensor directory.

        Raises:
            OSError: it cannot be written; nothing of it stays.
        """
        directory = self.directory()
        fd = os.open(name, NEW_FILE, FILE_MODE, dir_fd=directory)
        try:
            write_all(fd, list(parts))
            send_off(fd)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
            raise
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file its name. A file that has it is replaced."""
        directory = self.directory()
        os.rename(old, new, src_dir_fd=directory, dst_dir_fd=directory)

    def link(self, old: str, new: str) -> None:
        """Give a file one more name."""
        directory = self.directory()
        os.link(old, new, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)

    def copy(self, old: str, new: str) -> None:
        """Copy a file, where links do not work. It is there whole or not at all."""
        directory, temporary = self.directory(), f".{threading.get_ident()}.tmp"
        source = open_regular(old, dir_fd=directory)
        try:
            target = os.open(temporary, NEW_FILE, FILE_MODE, dir_fd=directory)
            try:
                while piece := os.read(source, 1 << 20):
                    write_all(target, [piece])
                self.rename(temporary, new)
            except BaseException:
                self.unlink(temporary)
                raise
            finally:
                os.close(target)
        finally:
            os.close(source)

    def unlink(self, name: str) -> None:
        """Remove a file; nothing happens when it is not there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.directory())

    def write_not_saved(self) -> None:
        """List what could not be saved, when there is something to list.

        Raises:
            OSError: the list cannot be written.
        """
        if self.unsaved:
            listed = [{"name": name, "bytes": nbytes, "reason": reason} for name, nbytes, reason in self.unsaved]
            text = json.dumps({"not_saved": listed}, indent=1)
            write_file(f"{self.path}/{layout.NOT_SAVED}", [text.encode()])

    def close(self) -> None:
        with self.lock:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)
