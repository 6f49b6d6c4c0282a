"""How the ranks of a large job learn of an incident: one rank of each node watches the store, and the others read what it has heard.

Where every rank asks the job's store at the end of each step, the one thread that answers for the store is busy for as long as all of them
together ask, and a training of thousands of ranks waits for it. Here the first rank of a node has a connection of its own to the store, on
which a thread waits for a key: nothing is asked as long as nothing happens. Whoever announces an event sets the keys of all nodes. What
the first rank hears it appends to a file that the ranks of the node share, and a rank looks at the length of that file, which costs a
microsecond. Nobody waits. A store that can give no further connection is asked step by step, by the first rank of each node.

An event that is announced at the end of step k has the time of one step to arrive, and all ranks have read it at the end of step k + 2:
they capture step k + 3. A rank that hears of it later captures its next step, and says so, as in `notify`.

Keys beside those of `StoreNotifier`: ``{prefix}/nodes`` counts nodes, ``{prefix}/node/{name}`` says which file is a node's, and
``{prefix}/wake/{node}/{n}`` is set when the n-th event is there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.probe.incident.notify import GIVE_UP_AFTER, MAX_BYTES, PATIENCE_SECONDS, Store, StoreNotifier, wait_at_end

_log = logging.getLogger("msprobe")
_SHARED_MEMORY = Path("/dev/shm")
"""Where ranks of a node share files in memory; without it the directory for temporary files does."""
_LOOKS = 60.0
"""Seconds after which the first rank of a node looks by itself: whoever announced an event may have died before it set the keys."""
_EVER = timedelta(days=365)
_MOST = 1 << 24
"""Bytes of the events of a run; what comes behind them is not read."""


class LargeStore(Store, Protocol):
    def multi_set(self, keys: list[str], values: list[str]) -> Any: ...


class Watched(Protocol):
    """A connection that waits."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...


class NodeNotifier(StoreNotifier):
    """Events of a job, over its store and a file of the node.

    Args:
        store, prefix: as of `StoreNotifier`.
        node: a name that the ranks of one node have in common, and no others.
        first: this rank asks for its node.
        watched: the same store over a connection that nobody else uses; None: there is none.
    """

    lead_steps = 3

    def __init__(
        self, store: LargeStore, node: str, *, first: bool, prefix: str = "msprobe/incident", watched: Watched | None = None
    ) -> None:
        self._key = f"{prefix}/node/{node}"
        self._first, self._alone, self._ends = first, False, False
        self._file: int | None = None
        self._own: Path | None = None
        self._read = 0
        self._large = store
        self._watched = watched if first else None
        self._watcher: threading.Thread | None = None
        self._number = 0
        self._looked = time.monotonic()
        self._fetching = threading.Lock()
        super().__init__(store, prefix, patience=0.0)
        self._run(self._make_file if first else self._find_file, always=True)

    def announce(self, event: Mapping[str, Any]) -> None:
        """An event is on its way when this returns, unless the store does not answer."""
        self._patience = PATIENCE_SECONDS
        super().announce(event)
        self._patience = 0.0

    def poll(self) -> list[dict[str, Any]]:
        """Never waits."""
        now = time.monotonic()
        if self._first or self._alone:
            if self._watcher is None or now > self._looked + _LOOKS:
                self._looked = now
                self._run(self._fetch_all, always=False)
        elif self._file is None:
            self._run(self._find_file, always=False)
        messages: list[dict[str, Any]] = []
        while not self._arrived.empty():
            messages.append(self._arrived.get())
        return messages + self._from_file()

    def close(self) -> None:
        self._ends = True
        if self._first:
            self._run(self._withdraw, always=True)
        super().close()
        if self._watcher is not None:
            self._watcher.join(timeout=1.0)
            if self._watcher.is_alive():
                wait_at_end(self._watcher)
        file, self._file = self._file, None
        if file is not None and not (self._watcher is not None and self._watcher.is_alive()):
            os.close(file)

    def _read_count(self) -> None:
        if self._first:
            super()._read_count()

    def _publish(self, text: str) -> None:
        number = int(self._store.add(f"{self._prefix}/count", 1))
        self._store.set(f"{self._prefix}/{number}", text)
        nodes = int(self._store.add(f"{self._prefix}/nodes", 0))
        keys = [f"{self._prefix}/wake/{node}/{number}" for node in range(1, nodes + 1)]
        if keys:
            self._large.multi_set(keys, ["1"] * len(keys))

    def _fetch(self) -> list[str | bytes]:
        with self._fetching:
            known = self._known
            messages = super()._fetch()
            if self._known > known and threading.current_thread() is not self._watcher:
                self._wake(known + 1)
        return messages

    def _wake(self, number: int) -> None:
        """Let the watcher of this node look again."""
        self._store.set(f"{self._prefix}/wake/{self._number}/{number}", "1")

    def _watch(self, watched: Watched) -> None:
        """In a thread of its own, until the end."""
        failures = 0
        while not self._ends and failures < GIVE_UP_AFTER:
            began = time.monotonic()
            try:
                watched.wait([f"{self._prefix}/wake/{self._number}/{self._known + 1}"], _EVER)
                if not self._ends:
                    self._fetch_all()
            except Exception as error:
                failures = failures + 1 if time.monotonic() < began + 1.0 else 0
                _log.debug("waiting for incidents: %s: %s", type(error).__name__, error)
        self._watched = None

    def _deliver(self, value: dict[str, Any]) -> None:
        if self._file is None:
            super()._deliver(value)
        else:
            os.write(self._file, json.dumps(value).encode() + b"\n")

    def _make_file(self) -> None:
        """The file of the node; without one its other ranks ask the store, too."""
        try:
            place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
            file, name = tempfile.mkstemp(".events", "msprobe-", place)
        except OSError as error:
            _log.debug("ranks of this node ask the store each: %s", error)
            name = "-"
        else:
            self._file, self._own = file, Path(name)
        if self._watched is not None and self._known >= 0:
            self._number = int(self._store.add(f"{self._prefix}/nodes", 1))
            self._watcher = threading.Thread(target=self._watch, args=(self._watched,), name="msprobe-watch", daemon=True)
            self._watcher.start()
        self._store.set(self._key, f"{self._known} {name}")

    def _find_file(self) -> None:
        """The file that the first rank of the node has made, once it has."""
        if self._file is not None or self._alone or not self._store.check([self._key]):
            return
        known, _, name = os.fsdecode(self._store.get(self._key)).partition(" ")
        if not name:  # of an earlier probe
            return
        try:
            file = open_regular(name)
            if os.fstat(file).st_uid != os.getuid():
                os.close(file)
                raise PermissionError(f"{name} is of another user")
            self._file = file
        except OSError as error:  # a container of its own
            _log.debug("this rank asks the store itself: %s", error)
            self._alone, self._known = True, int(known)

    def _withdraw(self) -> None:
        if self._own is not None:
            with contextlib.suppress(OSError):
                self._own.unlink()
        self._store.set(self._key, "")
        if self._watcher is not None:
            self._wake(self._known + 1)

    def _from_file(self) -> list[dict[str, Any]]:
        if self._file is None:
            return []
        size = min(os.fstat(self._file).st_size, _MOST)
        if size <= self._read:
            return []
        text = os.pread(self._file, size - self._read, self._read)
        whole = text.rfind(b"\n") + 1
        self._read += whole
        messages: list[dict[str, Any]] = []
        for line in text[:whole].splitlines():
            with contextlib.suppress(ValueError):
                value = parse_json(line) if len(line) <= MAX_BYTES else None
                if isinstance(value, dict):
                    messages.append(value)
        return messages
