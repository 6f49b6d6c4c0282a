"""Saves tensors while the training runs: hooks put copies here, writer threads make files of them.

A hook asks for room (`TensorStore.place`), copies the bytes of a tensor there and gives the payload back (`add`). When the record it
belongs to is complete its name follows (`hand_over`). Neither waits for the disk as long as the memory budget lasts. Payloads are
keyed by their statistics row: one tensor seen at many places is one payload with many names.

At the end of a step the training waits until the files of the steps before it are whole, so that a process that is killed loses the tensors
of one finished step at most. The threads have had a whole step for them, so there is nothing to wait for where the disk keeps up.

What does not fit or cannot be written is listed in ``not_saved.json``, counted, and gets no ``data_name``; the training goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Entry
from msprobe_engine.core.redaction import NOT_SAVED
from msprobe_engine.formats.dump.writing import packed_files
from msprobe_engine.formats.dump.writing.host_memory import PATIENCE_SECONDS, PLAIN
from msprobe_engine.formats.dump.writing.loose_files import LooseFiles, Maker, Templates
from msprobe_engine.formats.dump.writing.step_files import (
    LOST,
    NO_MEMORY,
    NOT_COPIED,
    NOT_WRITTEN,
    NOTHING,
    OVER_QUOTA,
    REDACTED,
    WRITTEN,
    Format,
    Payload,
    Saved,
    StepFiles,
)
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.formats.dump.writing.tensor_writer import TensorWriter

_BATCH, _BATCH_BYTES = 64, 4 << 20
_MOST_STEPS = 64
EARLIER_SECONDS = 5.0
"""How long the end of a step waits for the files of earlier steps while nothing at all is written (a hanging file system)."""
_log = get_logger()


class TensorStore(TensorWriter):
    """Tensor files of one rank.

    Args:
        options: which sections and records have files, and their suffix.
        make: gives the template for one dtype and shape (format ``files``).
        packed: format ``packed`` instead of ``files``.
        budget: bytes of host memory for copies that wait.
        quota: bytes of disk over the whole run, 0: no limit.
        count: told how many tensors were lost by the writer threads.
        threads: writer threads; they end by themselves when there is nothing to do.
        patience: see `msprobe_engine.formats.dump.writing.host_memory.PATIENCE_SECONDS`.

    Attributes:
        with_frames: the files of a step are finished when its frame is written, which may take some away (`keep_only`), not before.
        waits: the end of a step waits for earlier ones.
    """

    step_type: type[StepFiles] = StepFiles

    def __init__(
        self,
        options: Options,
        make: Maker,
        faults: Faults,
        *,
        packed: bool = False,
        budget: int = 2048 << 20,
        quota: int = 0,
        count: Callable[[str, int], None] = lambda _name, _count: None,
        threads: int = 2,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        super().__init__(options, faults, budget=budget, quota=quota, count=count, threads=threads, patience=patience)
        self.packed = packed
        self._templates = Templates(make)
        self._overhead = packed_files.overhead if packed else self._templates.overhead
        self._shard_bytes = max(1, min(packed_files.SHARD_BYTES, budget // 4))
        self.written = 0
        """Names of saved tensors in the steps that are finished."""
        self._finished: dict[int, Saved] = {}
        self._resting = False
        self._stuck = -1
        self._process = os.getpid()
        self._said: set[str] = set()

    # ---- hooks ----

    def begin_step(self, number: int, path: str) -> None:
        """The directory of a step was made; from now on tensors can be placed."""
        files = self.step_type(number, path)
        files.clock = self.memory.waited

        def fail(payload: Payload, error: Exception) -> None:
            self._lose_payload(files, payload, error)

        files.format = self.make_format(files, fail)
        with self._lock:
            self._resting = False
            for old in [n for n, s in self._steps.items() if s.closed and not s.pending][:-_MOST_STEPS]:
                self._steps.pop(old).close()  # its frame was dropped
            self._steps[number] = files
            self._finished.pop(number, None)

    def make_format(self, files: StepFiles, fail: Callable[[Payload, Exception], None]) -> Format:
        """What makes files of the tensors of a step; `fail` is called with what could not be written."""
        if self.packed:
            return packed_files.PackedFiles(files, self.quota, self._release, fail, self._shard_bytes)
        return LooseFiles(files, self._templates, self.quota, self._release, fail)

    def step(self, number: int) -> StepFiles | None:
        """The step that is being taken, None when its directory could not be made or in a forked child."""
        return self._steps.get(number) if os.getpid() == self._process else None

    def place(self, files: StepFiles, row: int, dtype: str, shape: tuple[int, ...], nbytes: int, kind: str = PLAIN) -> Payload:
        """Room for the bytes of one tensor. The caller copies them to `slab` and `offset` of the payload and calls `add`. A payload
        without a slab found no room, and the caller counts it as `lost` says. Waits while the memory budget is used up.

        Args:
            dtype: as dump files have it.
            shape, nbytes: of the contiguous bytes.
            kind: of memory, see `msprobe_engine.formats.dump.writing.host_memory`.

        Raises:
            Exception: in strict mode, what failed on a writer thread.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        payload = Payload(row, dtype, shape, nbytes)
        reserved = nbytes + self._overhead(dtype, shape) if self.quota.limit else 0
        if reserved and not self.quota.reserve(reserved):
            why = f"max_disk_gb {self.quota.limit / 1e9:g} is used up"
            self._warn_once(OVER_QUOTA, f"{why}: tensors that do not fit are left out and listed in not_saved.json")
            return self._refuse(files, payload, OVER_QUOTA, why)
        why = ""
        try:
            found = self.memory.allocate(nbytes, kind)
        except (OSError, RuntimeError, MemoryError) as problem:
            found, why = None, f"no host memory: {problem}"
        if found is None:
            why = why or f"memory_budget_mb is used up, and no tensor was written for {self._patience:g} s"
            self.quota.release(reserved)
            self._warn_once(NO_MEMORY, f"a tensor is left out, {why}; see not_saved.json")
            return self._refuse(files, payload, NO_MEMORY, why)
        payload.slab, payload.offset = found
        payload.reserved = reserved
        return payload

    def _refuse(self, files: StepFiles, payload: Payload, kind: str, why: str) -> Payload:
        payload.state, payload.why, payload.lost = LOST, why, kind
        files.kept[payload.row] = payload
        return payload

    def redact(self, files: StepFiles, row: int, dtype: str, shape: tuple[int, ...]) -> None:
        """A tensor that would be placed gets no file because of what it holds; its names are listed in ``not_saved.json``."""
        self._refuse(files, Payload(row, dtype, shape, 0), REDACTED, NOT_SAVED)

    def spoil(self, files: StepFiles, payload: Payload, why: str) -> None:
        """The bytes of a placed payload could not be copied; the caller counts it."""
        self.quota.release(payload.reserved)
        self._release(payload)
        self._refuse(files, payload, NOT_COPIED, why)

    def add(self, files: StepFiles, payload: Payload) -> None:
        """The bytes of a placed payload are there, or on their way."""
        files.kept[payload.row] = payload
        with self._lock:
            files.batch.append(payload)
            files.batch_bytes += payload.nbytes
            if files.batch_bytes >= _BATCH_BYTES or len(files.batch) >= _BATCH:
                self._send(files)

    def hand_over(self, files: StepFiles, entry: Entry) -> None:
        """A record is complete: its tensors get their names. Doing so twice is harmless; of two records with the same name the one
        that was handed over later has the files."""
        files.handed.add(id(entry))
        with self._lock:
            files.batch.append((next(files.order), entry))
            if len(files.batch) >= _BATCH:
                self._send(files)

    def end_step(self, files: StepFiles, entries: Sequence[Entry]) -> None:
        """Nothing is added any more; `entries` are all of the step, those not handed over yet follow now."""
        wanted = self.options.saves
        for entry in entries:
            if id(entry) not in files.handed and wanted is not None and wanted(entry.name):
                self.hand_over(files, entry)
        files.waited = self.memory.waited - files.clock
        with self._lock:
            files.closed = True
            self._send(files)
        if self.waits:
            files.waited += self._wait_for_earlier(files)

    def _wait_for_earlier(self, files: StepFiles) -> float:
        """Wait until all other steps are in their files; the seconds that took. Where nothing is written any more the wait is given up, and
        there is none until something is written again."""

        def is_unfinished() -> bool:
            return any(other.pending for other in list(self._steps.values()) if other is not files)

        began = time.monotonic()
        if is_unfinished() and self._progress != self._stuck:
            self._pool.help()
            if not self._wait(is_unfinished, EARLIER_SECONDS):
                self._stuck = self._progress
        return time.monotonic() - began

    def rest(self) -> None:
        """The next step is not dumped: memory is given back when what there is was written."""
        with self._lock:
            self._resting = True
            idle = not self._steps
        if idle:
            self.memory.trim()

    # ---- the thread that writes the frame ----

    def so_far(self, number: int) -> Saved:
        """What of a step is going to be saved as far as is known now. No wait."""
        files = self._steps.get(number)
        return self._finished.get(number, NOTHING) if files is None else files.find_saved()

    def finish(self, number: int) -> Saved:
        """Wait until everything of a step is in its files. Called when the frame of the step is written."""
        files = self._steps.get(number)
        if files is None or os.getpid() != self._process:
            return self._finished.get(number, NOTHING)
        self._wait_for_writers(files)
        self._complete(files)
        files.close()
        self.written += sum(name in payload.names for name, (_, payload) in files.names.items() if payload.state == WRITTEN)
        saved = files.find_saved()
        with self._lock:
            if self._steps.get(number) is files:
                del self._steps[number]
            self._finished[number] = saved
            for reason, count in saved.late.items():
                if reason != NOT_WRITTEN:  # counted when it happened
                    self._count(reason, count)
            while len(self._finished) > _MOST_STEPS:
                del self._finished[next(iter(self._finished))]
            idle = not self._steps
        if files.waited >= 1:
            _log.info("step %d: the training waited %.1f s for tensor files; dump fewer tensors, or to a faster disk", number, files.waited)
        if idle and self._resting:
            self.memory.trim()
        return saved

    def keep_only(self, number: int, names: Collection[str]) -> None:
        """Of a step that is over only the files of these names stay. Called before `finish`, on the thread that writes the frame."""
        files = self._steps.get(number)
        if files is None or os.getpid() != self._process:
            return
        try:
            self._wait_for_writers(files)
            files.resolve_repeated_names()
            with files.lock:
                for name in [name for name in files.names if name not in names]:
                    _, payload = files.names.pop(name)
                    if payload.state != LOST:
                        files.format.withdraw(payload, name)
                files.unsaved = [lost for lost in files.unsaved if lost.name in names]
        except OSError as error:
            self._fail(error, files.tensors)

    def drop(self, number: int) -> None:
        """Forget a step that is taken again: its directory is about to be emptied."""
        if number in self._steps:
            self.finish(number)

    def move_step(self, number: int, path: str) -> None:
        """The directory of a step that is being taken has a new name."""
        files = self._steps.get(number)
        if files is not None:
            files.move(path)

    def drain(self) -> bool:
        """Wait until all copies were written, as long as anything is written at all; False when that was given up."""
        self._pool.help()
        return self._wait(lambda: any(files.pending for files in self._steps.values()), self._patience)

    def close(self) -> None:
        """Write what there is and give the memory back."""
        if os.getpid() == self._process:
            self.drain()
            self.memory.trim()

    def _warn_once(self, what: str, message: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s", message)
