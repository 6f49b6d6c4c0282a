"""Writes dump directories in the layout that the existing tool and its `compare` read."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.io.output_files import write_file, write_plain
from msprobe_engine.core.io.regular_files import DIRECTORY_MODE, make_directories, require_directory
from msprobe_engine.core.records import Frame
from msprobe_engine.formats import loss_causes
from msprobe_engine.formats.dump import frame_log, layout
from msprobe_engine.formats.dump.layout import DumpWriteError
from msprobe_engine.formats.dump.writing.step_files import Saved
from msprobe_engine.formats.dump.writing.step_text import Prepared, StepText
from msprobe_engine.formats.dump.writing.template import Layout, Options
from msprobe_engine.formats.dump.writing.tensors import TensorStore
from msprobe_engine.probe.sinks.base import Sink

_log = logging.getLogger("msprobe.dump")
_MODES = ("all", "input", "output", "forward", "backward")
_DELETED = "steps that were deleted with their directory"
_SUMMARY_MODES = ("statistics", "md5", "xor", "digest")


class DumpSink(Sink):
    """The sink that writes ``{root}/step{N}/rank{R}/{dump.json, stack.json, construct.json}``.

    A step may pass through three calls: `begin_step` when its capture starts (the directory gets its marker), `write_log` at its
    end (optional, before rules see it: from then on a killed process loses nothing), `write` (on the writer thread: the files).
    Only `write` is needed. A directory that an earlier run left is replaced, which is said once.

    Args:
        root: ``dump_path``.
        level: ``L0``, ``L1``, ``mix`` or ``debug``, for frames that do not say; at L1 construct.json is ``{}``, at level debug
            debug.json is the only file.
        task: ``statistics``, ``tensor`` or ``structure`` (dump.json without data).
        framework: ``pytorch`` or ``mindspore``, for frames that do not say.
        extra_info: write stack.json and construct.json.
        rank: global rank, None outside a distributed run (the directory is then ``proc{pid}``).
        in_run_directory: without a rank it is ``rank0``, like all else in the directory of a run, of which a process claims this name.
        data_mode: subset of ``input``, ``output``, ``forward``, ``backward``; ``("all",)`` is everything.
        summary_mode: ``statistics``; ``md5`` writes CRC-32 too; ``xor`` writes the XOR of 64-bit words in place of statistics;
            ``digest``: the digest is written whenever a row has one, in every mode. A mode that is not ``statistics`` is named in
            the header.
        construct_micro_steps: construct.json as 26.2.0 writes it for Megatron, ``{node: [parent, micro step]}``. 8.1.1 cannot read that.
        selection: settings that leave records out (``{"list": ["layer.3"]}``); named in the header, so that nobody takes the dump for
            all that there was.
        single_file: a step is its dump.json, which holds stack.json and construct.json, without marker and frame log: one create and no
            rename. `write_log` writes it; for steps without saved tensors.
        tensors: where tensors of the step are saved; dump.json is written after their files. None: none are saved.
        began: when this process began to be watched (`time.time`); 0: files do not say it.

    Raises:
        UsageError: an argument has a value that is not allowed.
    """

    name = "dump"

    def __init__(
        self,
        root: Path | str,
        *,
        level: str,
        task: str = "statistics",
        framework: str = "pytorch",
        extra_info: bool = True,
        rank: int | None = None,
        data_mode: Sequence[str] = ("all",),
        summary_mode: str = "statistics",
        construct_micro_steps: bool = False,
        selection: Mapping[str, Any] = MappingProxyType({}),
        tensors: TensorStore | None = None,
        single_file: bool = False,
        in_run_directory: bool = False,
        began: float = 0.0,
    ) -> None:
        for value, allowed, what in (
            (level, ("L0", "L1", "mix", "L2", "debug"), "level"),
            (task, ("statistics", "tensor", "structure", "overflow_check"), "task"),
        ):
            if value not in allowed:
                raise UsageError(f"DumpSink: {what} {value!r}; allowed: {', '.join(allowed)}")
        unknown = [m for m in data_mode if m not in _MODES]
        if unknown or ("all" in data_mode and len(data_mode) > 1):
            raise UsageError(f"DumpSink: data_mode {list(data_mode)!r}; allowed: ['all'] or a subset of {', '.join(_MODES[1:])}")
        if summary_mode not in _SUMMARY_MODES:
            raise UsageError(f"DumpSink: summary_mode {summary_mode!r}; allowed: {', '.join(_SUMMARY_MODES)}")
        self.root = Path(root)
        self.level = level
        self.task = task
        self.framework = framework
        self._extra_info = extra_info
        self._rank_directory = layout.rank_directory(0 if rank is None and in_run_directory else rank)
        self._rank = rank
        self._tensors = tensors
        saves = None if tensors is None else tensors.options.saves
        suffix = ".pt" if framework == "pytorch" else ".npy"
        self._text = StepText(
            Options(tuple(data_mode), saves, suffix, summary_mode),
            level=level,
            task=task,
            framework=framework,
            extra_info=extra_info,
            selection=selection,
            construct_micro_steps=construct_micro_steps,
            single_file=single_file,
        )
        self._single_file = single_file
        self._root = _Root(self.root)
        self._lock = threading.Lock()
        self._begun: dict[int, str] = {}
        self._prepared: dict[int, Prepared] = {}
        self._packed: tuple[Layout, str, frame_log.PackedLayout] | None = None
        self._said_replaced = False
        self._looked_for_others = rank is not None or in_run_directory
        self._text.began = began
        self._made = time.time()

    def tell_world(self, world: Mapping[str, object]) -> None:
        """Which ranks the run has (`msprobe_engine.formats.dump.world`), as far as is known now; of steps whose files are still to be
        made."""
        self._text.world = world

    def tell_no_time(self) -> None:
        """The rank was given by hand: one process after another may be one rank of a run after another."""
        self._text.began = 0.0

    def directory(self, step: int) -> Path:
        """Where the files of a step are (created by `begin_step`)."""
        return self.root / f"step{step}" / self._rank_directory

    def begin_step(self, step: int) -> Path:
        """Create the directory of a step, with the marker of an unfinished one.

        Raises:
            SinkError: it cannot be created.
        """
        path = str(self.directory(step))
        if gone := self._root.count_deleted():
            self._text.lost[_DELETED] = self._text.lost.get(_DELETED, 0) + gone
            _log.error("%s was deleted or moved away while the run wrote it; %d steps went with it, later ones go there", self.root, gone)
        if self._tensors is not None:
            self._tensors.drop(step)
        marker = f"{path}/{layout.MARKER}"
        line = frame_log.line(step, self._rank)
        try:
            layout.refuse_link(path)
            try:
                os.mkdir(path, DIRECTORY_MODE)
            except (FileNotFoundError, NotADirectoryError):
                make_directories(path)
            except FileExistsError:
                require_directory(path)
                # The marker first: a process killed in the middle must not leave half of the old run as a finished step.
                write_plain(marker, [line])
                self._remove_old(path, known=step in self._begun)
                if self._single_file:
                    os.unlink(marker)
            if not self._single_file:
                write_plain(marker, [line])
        except OSError as error:
            raise DumpWriteError(error, marker) from error
        if not self._looked_for_others:
            self._looked_for_others = True
            self._warn_of_others(path)
        with self._lock:
            self._begun[step] = path
            self._prepared.pop(step, None)
        if self._tensors is not None:
            self._tensors.begin_step(step, path)
        return Path(path)

    def _warn_of_others(self, path: str) -> None:
        """Without ranks a directory is named by its process, so a second run does not replace the first one but stands beside it. What a
        process that still runs has made is of a rank of this run that was there sooner."""
        step, own = os.path.split(path)
        with contextlib.suppress(OSError), os.scandir(step) as entries:
            others = [e for e in entries if e.name.startswith("proc") and e.name != own and e.stat().st_mtime < self._made]
            old = sorted(e.name for e in others if not layout.of_a_live_process(e.name))
            if old:
                more = f" and {len(old) - 1} more" if len(old) > 1 else ""
                _log.warning(
                    "%s holds %s%s of an earlier run without ranks; it stays beside %s as if it were another rank: remove it, or "
                    "give this run a dump_path of its own", step, old[0], more, own
                )  # fmt: skip

    def assign_rank(self, rank: int) -> None:
        """The rank is known now: directories that were named without it get its name, those of finished steps too. To be
        called when nothing waits to be written. A directory that cannot be renamed stays where it is, which is said."""
        if self._rank is not None:
            return
        self._rank, self._rank_directory = rank, layout.rank_directory(rank)
        with self._lock:
            self._prepared.clear()  # they name the old directory
            for step, old in list(self._begun.items()):
                new = str(self.directory(step))
                if new == old:
                    continue
                try:
                    if os.path.isdir(new):  # of an earlier run
                        layout.refuse_link(new)
                        self._remove_old(new, known=False)
                        os.rmdir(new)
                    os.rename(old, new)
                    self._begun[step] = new
                    self._root.record_rename(old, new)
                    if self._tensors is not None:
                        self._tensors.move_step(step, new)
                    layout.correct_data_dir(old, new)
                    if os.path.exists(f"{new}/{layout.MARKER}"):
                        write_plain(f"{new}/{layout.MARKER}", [frame_log.line(step, rank)])
                except OSError as error:
                    _log.warning("%s cannot get the name of its rank, %s: %s", old, new, error.strerror or error)

    def _remove_old(self, path: str, known: bool) -> None:
        removed = False
        for file in os.listdir(path):
            if (file in layout.OWN_FILES and file != layout.MARKER) or (file.startswith(".") and file.endswith(".tmp")):
                os.unlink(f"{path}/{file}")
                removed = True
        tensors = f"{path}/{layout.TENSORS}"
        if os.path.isdir(tensors) and not os.path.islink(tensors):
            shutil.rmtree(tensors)
            removed = True
        if removed and not known and not self._said_replaced:
            self._said_replaced = True
            _log.warning(
                "%s holds a dump of an earlier run; what this run writes replaces it, other steps and ranks stay: give this run a "
                "dump_path of its own to keep them apart", path
            )  # fmt: skip

    def write_log(self, frame: Frame) -> None:
        """Save the frame in raw form by one write, at once; `write` makes the files of it later. Cheap enough for the training
        thread. After a kill the reader makes dump.json, stack.json and construct.json from it. A step may be saved again, by a frame that
        knows more.

        Raises:
            SinkError: it cannot be written; nothing partial stays.
        """
        path = self._begun.get(frame.step) or str(self.begin_step(frame.step))
        ready = self._prepare(frame, None if self._tensors is None else self._tensors.so_far(frame.step))
        if self._single_file:
            self._write_single(path, ready, frame.step in self._prepared)
            self._remember(ready)
            return
        stack = ready.layout.stack(frame.stacks) if self._extra_info else ""
        construct = ready.layout.construct if self._extra_info else ""
        packed = self._packed
        if packed is None or packed[0] is not ready.layout or packed[1] is not stack:
            packed = ready.layout, stack, frame_log.pack(ready.layout.data, stack.encode(), construct.encode())
            self._packed = packed
        file = f"{path}/{layout.FRAME_LOG}"
        parts = frame_log.encode(packed[2], frame.step, frame.rank, ready.head, ready.slots, ready.floats, ready.rows)
        self._write_file(file, parts, frame.step in self._prepared)
        self._remember(ready)

    def _remember(self, ready: Prepared) -> None:
        with self._lock:
            self._prepared[ready.frame.step] = ready
            while len(self._prepared) > 64:  # the writer dropped frames; they are in their logs
                del self._prepared[next(iter(self._prepared))]

    def _write_single(self, path: str, ready: Prepared, again: bool) -> None:
        for name, parts in self._text.documents(ready):
            self._write_file(f"{path}/{name}", parts, again)

    @staticmethod
    def _write_file(file: str, parts: Sequence[bytes | memoryview], again: bool) -> None:
        """Write a file, in place the first time; later the one that is there stays until this one is whole."""
        try:
            (write_file if again else write_plain)(file, parts)
        except OSError as error:
            if not again:
                with contextlib.suppress(OSError):
                    os.unlink(file)
            raise DumpWriteError(error, file) from error

    def _prepare(self, frame: Frame, saved: Saved | None) -> Prepared:
        where: dict[str, object] = {"dump_data_dir": None}
        if self._tensors is not None:
            where["dump_data_dir"] = str(self.directory(frame.step) / layout.TENSORS)
            if self._tensors.packed:
                where["tensor_format"] = "packed"
        return self._text.prepare(frame, saved, where)

    def write(self, frame: Frame, alerts: Sequence[Alert] = ()) -> None:  # noqa: ARG002 - alerts go to incident.json, not here
        """Write the files of a frame. A frame without entries is left out unless its step was begun.

        Raises:
            SinkError: a file cannot be written; temporary files are removed, the marker (and the frame log) stay, earlier steps
                are untouched.
        """
        with self._lock:
            ready = self._prepared.pop(frame.step, None)
            path = self._begun.get(frame.step)
        if path is None:
            if not frame.entries:
                return
            path = str(self.begin_step(frame.step))
        saved = None if self._tensors is None else self._tensors.finish(frame.step)
        logged, current = ready is not None, ready is not None and ready.frame is frame and _same(ready.saved, saved)
        if ready is None or not current:
            ready = self._prepare(frame, saved)
        try:
            if not self._single_file:
                self._write_files(path, ready)
            elif not current:
                self._write_single(path, ready, logged)
        except DumpWriteError as error:
            frame_log.tell_why(path, frame.step, self._rank, loss_causes.cause_of(error))
            raise
        finally:
            self._root.record_step(path)
        with self._lock:
            while len(self._begun) > 1024:
                del self._begun[next(iter(self._begun))]

    def _write_files(self, path: str, ready: Prepared) -> None:
        file = path
        try:
            # dump.json is the last, so that it means that everything is there
            for name, parts in self._text.documents(ready):
                file = f"{path}/{name}"
                write_file(file, parts)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{path}/{layout.FRAME_LOG}")
            if ready.frame.complete:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{path}/{layout.MARKER}")
        except OSError as error:
            raise DumpWriteError(error, file) from error

    def drain(self) -> None:
        """Wait until tensors that were copied are written, however long that takes, as long as anything is written at all."""
        if self._tensors is not None:
            self._tensors.drain()

    def close(self) -> None:
        """Forget everything held for speed."""
        with self._lock:
            self._prepared.clear()
            self._packed = None
        if self._tensors is not None:
            self._tensors.close()


class _Root:
    """Notices that the directory of all steps was deleted in the midst of the run. A step alone that is gone was tidied up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = (0, 0)
        self._last = ""
        self._count = 0

    def record_step(self, directory: str) -> None:
        """A step was written there, or was not because the directory is gone."""
        self._count += 1
        if os.path.lexists(directory):
            self._last, self._found = directory, self._identity()
        elif not self._last:
            self._last = directory

    def record_rename(self, old: str, new: str) -> None:
        """The directory of a step has another name."""
        if self._last == old:
            self._last = new

    def count_deleted(self) -> int:
        """How many steps have gone with the directory; 0: it is there. Said once."""
        if not self._last or os.path.lexists(self._last) or (any(self._found) and self._identity() == self._found):
            return 0
        gone, self._count, self._last = self._count, 0, ""
        return gone

    def _identity(self) -> tuple[int, int]:
        try:
            status = os.stat(self._path)
        except OSError:
            return 0, 0
        return status.st_dev, status.st_ino


def _same(before: Saved | None, now: Saved | None) -> bool:
    if before is None or now is None:
        return before is now
    return np.array_equal(before.rows, now.rows) and before[1:] == now[1:]
