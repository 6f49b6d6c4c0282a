"""One step of one rank in the spool, see `msprobe_engine.accuracy.online.queue_dir.spool`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from msprobe_engine.accuracy.online import messages
from msprobe_engine.accuracy.online.queue_dir import files
from msprobe_engine.accuracy.online.queue_dir.files import bases, data_names_in, document, dump_text, number_of, parse_not_saved
from msprobe_engine.accuracy.precheck.calls import bare_name
from msprobe_engine.core import names
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.output_files import write_file, write_plain
from msprobe_engine.core.io.regular_files import make_directories
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.stream import open_records
from msprobe_engine.formats.dump.writing.packed_files import INDEX, index_text, shard_name
from msprobe_engine.formats.tensors.reader import TensorFiles

LOST_ON_THE_WAY = "it did not reach the benchmark host"


@dataclass
class _State:
    """Where a call stands: the messages with its records, and whether it was given out and checked."""

    forward: int = -1
    backward: int = -1
    given: bool = False
    checked: bool = False
    first: str = ""


@dataclass(frozen=True)
class SpoolCall:
    """A call that can be checked.

    Attributes:
        name: ``"Torch.matmul.0"``.
        forward, backward: numbers of the messages with its records; -1: there is no backward record.
        skip: why it is not checked; empty: it is.
        first: the call, when this is a further backward pass through it; empty: this is one.
    """

    name: str
    step: SpoolStep = field(repr=False, compare=False)
    forward: int = -1
    backward: int = -1
    skip: str = ""
    first: str = ""

    @property
    def api(self) -> str:
        """Bare name: ``"matmul"``."""
        return bare_name(self.name)

    @property
    def source(self) -> str:
        """The line of the training that made it; empty when it is not known."""
        try:
            return self.step.source(self.forward, f"{self.first or self.name}.{names.FORWARD}")
        except (DumpFormatError, OSError):
            return ""

    def message(self) -> dict[str, Any]:
        """What a process that checks calls is told, see `msprobe_engine.accuracy.precheck.worker`."""
        try:
            return self._message()
        except (DumpFormatError, OSError) as error:
            return {"name": self.name, "skip": str(error)}
        except RecursionError:
            return {"name": self.name, "skip": "its record is nested too deep"}

    def _message(self) -> dict[str, Any]:
        if self.skip:
            return {"name": self.name, "skip": self.skip}
        if self.step.gone:
            raise DumpFormatError("another training has sent this step again before the call was checked")
        record = self.step.record(self.forward, f"{self.first or self.name}.{names.FORWARD}")
        backward = self.step.record(self.backward, f"{self.name}.{names.BACKWARD}") if self.backward >= 0 else None
        places = self.step.places(record, backward)
        return {"name": self.name, "record": record, "backward": backward, "directory": str(self.step.directory), "tensors": places}


class SpoolStep:
    """Not to be made for a directory that is not this program's own. Methods may be called from any thread.

    Args:
        directory: ``step{N}/rank{R}``.
    """

    SESSION: ClassVar[str] = ".session"
    RESULTS: ClassVar[str] = ".results"

    def __init__(self, directory: Path, session: str, number: int, rank: int) -> None:
        self.directory = directory
        self.session = session
        self.number = number
        self.rank = rank
        self.bytes = 0
        self.over = False
        self.gone = False
        self._lock = threading.RLock()
        self._calls: dict[str, _State] = {}
        self._further: dict[str, list[_State]] = {}
        self._left = 0
        self._numbers: set[int] = set()
        self._keys: dict[str, tuple[str, str]] = {}
        self._names: dict[str, str] = {}

    # ---- its directory ----

    def create_directory(self) -> None:
        """Make the directory; what is in it goes.

        Raises:
            OSError: it cannot be made.
        """
        path = os.fspath(self.directory)
        layout.refuse_link(path)
        shutil.rmtree(path, ignore_errors=True)
        make_directories(f"{path}/{layout.TENSORS}")
        marker = {"step": self.number, "rank": self.rank, "pid": os.getpid()}
        write_plain(f"{path}/{layout.MARKER}", [json.dumps(marker).encode() + b"\n"])
        write_file(f"{path}/{self.SESSION}", [self.session.encode()])

    @classmethod
    def recover(cls, directory: Path, session: str, number: int, rank: int) -> SpoolStep:
        """A step that an earlier process has left.

        Raises:
            DumpFormatError: a file of it is damaged.
        """
        made = cls(directory, session, number, rank)
        for path in sorted(directory.glob(".calls-*.json")):
            shard = directory / layout.TENSORS / shard_name(number_of(path))
            try:
                made._register_message(number_of(path), files.read_document(path), shard if shard.is_file() else None)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DumpFormatError(f"{path}: is damaged ({type(error).__name__}: {str(error)[:120]})") from None
            made.bytes += path.stat().st_size + (shard.stat().st_size if shard.is_file() else 0)
        made.over = (directory / layout.DUMP).exists()
        return made

    @property
    def results(self) -> Path | None:
        """The result file of this step, None when there is none yet."""
        try:
            return Path(os.fsdecode(files.read_file(self.directory / self.RESULTS)))
        except FileNotFoundError:
            return None

    def note_results(self, path: Path) -> None:
        """From now on this is the result file of this step.

        Raises:
            OSError: that cannot be written down.
        """
        if not self.gone:
            write_file(self.directory / self.RESULTS, [os.fsencode(path)])

    def replace(self) -> None:
        """Its directory belongs to another training from now on."""
        with self._lock:
            self.gone = True

    def finish(self) -> None:
        """Everything is checked: what is left is a dump, and calls have the order that they have there."""
        with contextlib.suppress(DumpFormatError), open_records(self.directory / layout.DUMP) as records:
            names_there = [name.rpartition(".")[0] for block in records for name in block if names.direction(name) == names.FORWARD]
            order = {name: n for n, name in enumerate(names_there)}
            self._calls = dict(sorted(self._calls.items(), key=lambda item: order.get(item[0], len(order))))
        for name in (self.SESSION, self.RESULTS, *(path.name for path in self.directory.glob(".calls-*.json"))):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.directory / name)

    # ---- what comes ----

    def add(self, message: messages.Calls) -> list[SpoolCall]:
        """Make finished calls safe.

        Raises:
            OSError: they cannot be written.
            DumpFormatError: the shard is damaged.
        """
        shard = self.directory / layout.TENSORS / shard_name(message.number) if len(message.shard) else None
        if shard is not None:
            write_file(shard, [message.shard])
        document = {"calls": message.records, "names": message.names}
        with self._lock:
            try:
                new = self._register_message(message.number, document, shard)
            except DumpFormatError:
                assert shard is not None
                shard.unlink()
                raise
            write_file(self._calls_file(message.number), [message.text])
            if new:
                self.bytes += len(message.text) + len(message.shard)
            return [call for name in bases(message.records) if (call := self._complete(name)) is not None]

    def _register_message(self, number: int, document: Mapping[str, Any], shard: Path | None) -> bool:
        """Note what a message holds; False when it is known already."""
        if shard is not None:
            sources = {key: (shard.name, source.dtype or "") for key, source in TensorFiles.of_shard(shard).sources().items()}
            self._keys.update(sources)
        known = number in self._numbers
        self._numbers.add(number)
        self._names.update(document["names"])
        for name in document["calls"]:
            base, _, direction = name.rpartition(".")
            state = self._calls.get(base)
            if state is None:
                state = self._calls[base] = _State()
            if direction == names.FORWARD:
                state.first = ""
                for each in (state, *self._further.get(base, ())):
                    self._has_forward(each, number)
                continue
            state.backward = number
            first = names.of_first_pass(base)
            if first != base and state.forward < 0:  # the forward record of one more pass through a call is that of the call
                state.first = first
                self._further.setdefault(first, []).append(state)
                if first in self._calls and self._calls[first].forward >= 0:
                    self._has_forward(state, self._calls[first].forward)
        return not known

    def _has_forward(self, state: _State, number: int) -> None:
        if state.forward < 0:
            self._left += 1
        state.forward = number

    def _complete(self, name: str) -> SpoolCall | None:
        """The call, when both of its records are here and it was not given out."""
        state = self._calls[name]
        if state.given or state.forward < 0 or state.backward < 0:
            return None
        return self._give(name, state)

    def _give(self, name: str, state: _State) -> SpoolCall:
        state.given = True
        return SpoolCall(name, self, state.forward, state.backward, first=state.first)

    def end_step(self, message: messages.Step) -> list[SpoolCall]:
        """The step is over: its dump.json and what belongs to it.

        Raises:
            OSError: a file cannot be written.
            DumpFormatError: a file is damaged.
        """
        data_names = messages.data_names(message.files[messages.NAMES]) if messages.NAMES in message.files else dict(self._names)
        missing = self._write_index(data_names)
        not_saved = parse_not_saved(message.files.get(layout.NOT_SAVED)) + [
            {"name": n, "bytes": 0, "reason": LOST_ON_THE_WAY} for n in missing
        ]
        if not_saved:
            write_file(self.directory / layout.NOT_SAVED, [json.dumps({"not_saved": not_saved}, indent=1).encode()])
        for name in (layout.STACK, layout.CONSTRUCT):
            if name in message.files:
                write_file(self.directory / name, [message.files[name]])
        dump = bytes(message.files.get(layout.DUMP, b""))
        where = json.dumps({"dump_data_dir": str(self.directory / layout.TENSORS)})[1:-1].encode()
        write_file(self.directory / layout.DUMP, [dump.replace(messages.NO_DIRECTORY, where, 1)])
        if message.complete:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.directory / layout.MARKER)
        with self._lock:
            self._names = data_names
            self.over = True
            return self.ready()

    def _write_index(self, sources: Mapping[str, str]) -> list[str]:
        """The index of saved tensors; returns the names whose content is not here."""
        by_key: dict[str, list[str]] = {}
        for name, key in sources.items():
            by_key.setdefault(key, []).append(name)
        tensors, aliases, missing = [], [], []
        for key, all_names in by_key.items():
            place = self._keys.get(key)
            if place is None:
                missing += all_names
                continue
            first = key if key in all_names else all_names[0]
            tensors.append((first, place[0], key, place[1]))
            aliases += [(other, first) for other in all_names if other != first]
        write_file(self.directory / layout.TENSORS / INDEX, [index_text(tensors, aliases)])
        return missing

    def abandon(self) -> list[SpoolCall]:
        """Nothing more comes of this step; when its end is missing, a dump.json is made of the records that are here.

        Raises:
            OSError: a file cannot be written.
        """
        with self._lock:
            if not self.over:
                self.over = True
                self._write_index(self._names)
                records: dict[str, Any] = {}
                for path in sorted(self.directory.glob(".calls-*.json")):
                    records |= files.read_document(path)["calls"]
                write_file(self.directory / layout.DUMP, [dump_text(str(self.directory / layout.TENSORS), records)])
            return self.ready()

    def ready(self) -> list[SpoolCall]:
        """Calls that can be checked and were not given out: those with both records; when the step is over, all."""
        with self._lock:
            return [
                self._give(name, state)
                for name, state in self._calls.items()
                if not state.given and state.forward >= 0 and (state.backward >= 0 or self.over)
            ]

    def without_backward(self) -> list[SpoolCall]:
        """Calls that still wait for a backward record; they are checked without one."""
        with self._lock:
            return [self._give(name, state) for name, state in self._calls.items() if not state.given and state.forward >= 0]

    # ---- what is checked ----

    @property
    def left(self) -> int:
        """Calls that are not checked."""
        return self._left

    @property
    def alone(self) -> int:
        """Backward records without a forward record."""
        with self._lock:
            return sum(state.forward < 0 for state in self._calls.values())

    @property
    def done(self) -> bool:
        """Is everything of the step here, and checked?"""
        with self._lock:
            return self.over and not self._left and not self.gone

    def mark_checked(self, name: str) -> None:
        """The results of this call are written."""
        with self._lock:
            state = self._calls.get(name)
            if state is None or state.checked:
                return
            state.given = state.checked = True
            self._left -= 1

    @property
    def names(self) -> list[str]:
        """All calls, in the order in which they came; once everything is checked in that of dump.json."""
        with self._lock:
            return list(self._calls)

    def record(self, number: int, name: str) -> dict[str, Any]:
        """A record as it came.

        Raises:
            DumpFormatError, OSError: it is gone.
        """
        found = document(str(self._calls_file(number)), self.session)["calls"].get(name)
        if not isinstance(found, dict):
            raise DumpFormatError(f"{self._calls_file(number)}: has no record '{name[:120]}'")
        return found

    def source(self, number: int, name: str) -> str:
        """The line of the training that made a call, as it came.

        Raises:
            OSError: it is gone.
        """
        found = document(str(self._calls_file(number)), self.session)["sources"].get(name)
        return found if isinstance(found, str) else ""

    def places(self, *records: Mapping[str, Any] | None) -> dict[str, tuple[str, str]]:
        """Shard and key of every saved tensor in these records; what is not here is left out."""
        found = {}
        with self._lock:
            for record in records:
                for name in data_names_in(record):
                    key = self._names.get(name)
                    if key is not None and key in self._keys:
                        found[name] = (self._keys[key][0], key)
        return found

    def _calls_file(self, number: int) -> Path:
        return self.directory / f".calls-{number:05d}.json"
