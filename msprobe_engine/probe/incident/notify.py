"""How ranks learn of an incident without a collective.

A rank that raises an event at the end of step k announces it before it goes on; the event says ``capture_step = k + 2``. Every
rank polls at the end of each step. If the ranks are coupled by at least one collective per step (they are, in synchronous data,
tensor or pipeline parallel training), a rank can only end step k+1 after the announcing rank has entered step k+1, that is after
its announcement: the poll at the end of step k+1 sees it, and all ranks capture step k+2. A rank that sees it later, because the
store was slow or the ranks are not coupled, captures its next step and says so in its rank file.

Neither call may hold the training: the work is done by one daemon thread, and the caller waits for it at most `patience` seconds.
Once it had to give up, it does not wait again until the thread has answered, so a dead store costs one `patience`, not one per step.
Ranks of a large job do not ask the store each: `node_notify`.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import itertools
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import write_file
from msprobe_engine.core.io.regular_files import OddFileError, make_directories

_log = logging.getLogger("msprobe")
LEAD_STEPS = 2
PATIENCE_SECONDS = 0.05
MAX_BYTES = 16_384
"""An event is about 300 bytes; anything longer is not one."""
MOST_NAMES = 4096
"""In the directory of a `DirectoryNotifier`, which every rank lists at the end of a step."""
GIVE_UP_AFTER = 3
END_SECONDS = 10.0
"""Seconds that the end of the process waits for a store that has not answered yet: the answer would come into an interpreter that is
ending, and the C++ code that has waited for it aborts the process there ("terminate called without an active exception")."""
_late: list[threading.Thread] = []
"""Threads whose store had not answered when their notifier was closed."""


@runtime_checkable
class Notifier(Protocol):
    """Carries events between ranks. Both calls return at once and never raise.

    Attributes:
        lead_steps: what is announced at the end of a step is known to all ranks before they begin the step so many after it.
    """

    lead_steps: int

    def announce(self, event: Mapping[str, Any]) -> None: ...

    def poll(self) -> list[dict[str, Any]]:
        """Events announced by any rank (this one too) that this call sees for the first time."""
        ...

    def close(self) -> None: ...


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used; TCPStore, FileStore, HashStore and PrefixStore have it."""

    def set(self, key: str, value: str) -> Any: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...


class SilentNotifier:
    """For one process: nobody to tell."""

    lead_steps = LEAD_STEPS

    def announce(self, event: Mapping[str, Any]) -> None:  # noqa: ARG002 - the protocol's signature
        return None

    def poll(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        return None


class _ThreadedNotifier:
    """Runs `_publish` and `_fetch` on one daemon thread with bounded waiting."""

    lead_steps = LEAD_STEPS

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: threading.Event | None = None
        self._failures = 0
        self._untold = False
        self.failed = ""

    def announce(self, event: Mapping[str, Any]) -> None:
        text = json.dumps(event)
        self._run(lambda: self._publish_or_log(text), always=True)

    def poll(self) -> list[dict[str, Any]]:
        self._run(self._fetch_all, always=False)
        out: list[dict[str, Any]] = []
        while not self._arrived.empty():
            out.append(self._arrived.get())
        return out

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=1.0)
            if self._thread.is_alive():
                _late.append(self._thread)
            self._thread = None

    def _publish_or_log(self, text: str) -> None:
        try:
            self._publish(text)
        except Exception as error:
            if not self._untold:
                self._untold = True
                _log.error(
                    "the other ranks were not told of an incident and capture nothing: %s: %s; said once", type(error).__name__, error
                )
            raise

    def _publish(self, text: str) -> None:
        raise NotImplementedError

    def _fetch(self) -> list[str | bytes]:
        raise NotImplementedError

    def _fetch_all(self) -> None:
        for text in self._fetch():
            if len(text) > MAX_BYTES:
                continue
            try:
                value = parse_json(text)
            except ValueError:
                continue
            if isinstance(value, dict):
                self._deliver(value)

    def _deliver(self, value: dict[str, Any]) -> None:
        self._arrived.put(value)

    def _run(self, job: Callable[[], None], *, always: bool) -> None:
        if self.failed:
            return
        busy = self._pending is not None and not self._pending.is_set()
        if busy and not always:
            return  # the last question is still open: do not queue up another one
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="msprobe-notify", daemon=True)
            self._thread.start()
        finished = threading.Event()
        self._pending = finished
        self._jobs.put((job, finished))
        if not busy:
            finished.wait(self._patience)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                job()
                self._failures = 0
            except Exception as error:
                self._failures += 1
                if self._failures >= GIVE_UP_AFTER and not self.failed:
                    self._give_up(error)
            finally:
                done.set()

    def _give_up(self, error: Exception) -> None:
        self.failed = f"{type(error).__name__}: {error}"
        _log.error("incidents are no longer announced between ranks, training goes on: %s", self.failed)


class StoreNotifier(_ThreadedNotifier):
    """Events in a torch.distributed-like store; one ``add(key, 0)`` per poll while nothing happens.

    Keys: ``{prefix}/count`` counts announcements, ``{prefix}/{n}`` (n from 1) holds the n-th as JSON. The counter goes up before
    the value is there, so a reader asks ``check`` first and comes back at its next poll; ``get`` never waits.

    Events that are there before the notifier is made belong to an earlier probe of this job and are not reported.
    """

    def __init__(self, store: Store, prefix: str = "msprobe/incident", patience: float = PATIENCE_SECONDS) -> None:
        super().__init__(patience)
        self._store = store
        self._prefix = prefix
        self._known = -1
        self._open: set[int] = set()
        self._run(self._read_count, always=True)

    def _publish(self, text: str) -> None:
        number = self._store.add(f"{self._prefix}/count", 1)
        self._store.set(f"{self._prefix}/{number}", text)

    def _read_count(self) -> None:
        self._known = int(self._store.add(f"{self._prefix}/count", 0))

    def _fetch(self) -> list[str | bytes]:
        if self._known < 0:  # the store did not answer before
            self._read_count()
        count = int(self._store.add(f"{self._prefix}/count", 0))
        self._open.update(range(self._known + 1, min(count, self._known + 1000) + 1))
        self._known = max(self._known, min(count, self._known + 1000))
        out: list[str | bytes] = []
        for number in sorted(self._open):
            key = f"{self._prefix}/{number}"
            if self._store.check([key]):
                out.append(self._store.get(key))
                self._open.discard(number)
        return out


class DirectoryNotifier(_ThreadedNotifier):
    """Events as files in a directory that all ranks share; a file appears whole (written aside, then renamed).

    Events that are there before the notifier is made belong to an earlier run and are not reported. Of ranks that announce the same event,
    as all do of a NaN that a collective has spread, the first ones write it, all to one file: every rank looks at a few names in a step.
    """

    def __init__(self, directory: Path, patience: float = PATIENCE_SECONDS) -> None:
        super().__init__(patience)
        self._directory = directory
        self._earlier: frozenset[str] = frozenset()
        try:
            make_directories(str(directory))
            self._earlier = frozenset(self._names())
        except OSError as error:
            self._give_up(error)
        self._seen = set(self._earlier)

    def _names(self) -> list[str]:
        names = [entry.name for entry in itertools.islice(os.scandir(self._directory), MOST_NAMES + 1)]
        if len(names) > MOST_NAMES:
            raise OSError(f"{self._directory} holds more than {MOST_NAMES} files, and no run announces so many events; empty it")
        return sorted(name for name in names if name.startswith("event-"))

    def _publish(self, text: str) -> None:
        about = json.loads(text).get("id", text)
        digest = hashlib.sha256(str(about).encode()).hexdigest()[:32]
        names = (f"event-{digest}-{number}.json" for number in itertools.count())
        name = next(name for name in names if name not in self._earlier)  # the same on all ranks, for all saw the same at the start
        if not (self._directory / name).exists():
            write_file(self._directory / name, [text.encode()])

    def _fetch(self) -> list[str | bytes]:
        out: list[str | bytes] = []
        for name in self._names():
            if name in self._seen:
                continue
            self._seen.add(name)
            try:
                out.append(read_input(self._directory / name, MAX_BYTES, follow=False))
            except OSError as error:
                if error.errno in (errno.ESTALE, errno.ENOENT):  # another rank has just replaced it by its own: the next look has that one
                    self._seen.discard(name)
                    continue
                if not isinstance(error, OddFileError) and error.errno != errno.EFBIG:
                    raise
                _log.warning("%s is no event of another rank: %s; it is left out", self._directory / name, error.strerror)
        return out


def wait_at_end(thread: threading.Thread) -> None:
    """The end of the process waits for a thread that asks a store."""
    _late.append(thread)


def _wait_for_answers() -> None:
    until = time.monotonic() + END_SECONDS
    for thread in _late:
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_answers)  # before any probe has registered its end, so that this comes after it
