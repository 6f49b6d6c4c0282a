"""The receiving end over a directory that both hosts have: one thread that looks, and one per client that hands messages to the handler."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online.budget import Budget
from msprobe_engine.accuracy.online.directory import layout
from msprobe_engine.accuracy.online.events import CONNECTED, EXPIRING, FAULT, FINISHED, GONE, RECONNECTED, REFUSED, Event, OnEvent, Peer
from msprobe_engine.accuracy.online.options import ServerOptions
from msprobe_engine.accuracy.online.send_queue import report_event
from msprobe_engine.accuracy.online.tcp.channel import Waker
from msprobe_engine.accuracy.online.tcp.connection import counts_of, whole
from msprobe_engine.accuracy.online.tcp.frames import PREFIX_BYTES, parse_message
from msprobe_engine.accuracy.online.tcp.session import Handler, Last, Session, SessionState
from msprobe_engine.core.errors import SettingsError, TransportError
from msprobe_engine.core.io.regular_files import open_regular

_LOCK = ".msprobe-server"
_POLL_SECONDS = 0.2
_PAUSE_SECONDS = 0.02
_BUSY = 16
"""Messages found at once after which the next look comes without a pause."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


@dataclass
class _Client:
    """A folder and what is known of it."""

    folder: Path
    session: Session
    alive: dict[str, Any] | None = None
    files: dict[int, str] = field(default_factory=dict)
    last: int = -1
    missing_since: float = 0.0
    looked: float = 0.0


class DirectoryServer:
    """As `Server`; a file is removed when the handler has returned. What the handler cannot use stays, renamed ``*.refused``.

    Raises:
        SettingsError: the directory is not there or cannot be used, or another server reads it.
    """

    def __init__(self, directory: Path, handler: Handler, options: ServerOptions, on_event: OnEvent, last: Last | None = None) -> None:
        self._directory = directory
        self._handler = handler
        self._options = options
        self._on_event = on_event
        self._last = last
        self._budget = Budget(options.memory_bytes)
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._waiting: set[str] = set()
        self._unreadable = False
        self._stop = threading.Event()
        self._waker = Waker()
        self._descriptor = self._take_lock()
        self._thread = threading.Thread(target=self._run, name="msprobe-online-server", daemon=True)
        self._thread.start()

    def sessions(self) -> list[SessionState]:
        """As `Server.sessions`."""
        with self._lock:
            clients = list(self._clients.values())
        return [client.session.state() for client in clients]

    def close(self, timeout: float = 10.0) -> None:
        """As `Server.close`. What was not read stays for the next server."""
        if self._stop.is_set():
            return
        deadline = time.monotonic() + timeout
        for client in list(self._clients.values()):
            client.session.stop(max(0.0, deadline - time.monotonic()))
        self._stop.set()
        self._waker.wake()
        self._thread.join(max(1.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            for client in self._clients.values():
                self._remove_taken(client)
        os.close(self._descriptor)

    def wake(self) -> None:
        """A handler has returned."""
        self._waker.wake()

    def _take_lock(self) -> int:
        try:
            mode = os.stat(self._directory).st_mode
            path = self._directory / _LOCK
            descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise SettingsError(
                f"nfs_path {self._directory}: cannot be used ({error.strerror}); name one that the trainings and this server can write"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise SettingsError(f"nfs_path {self._directory}: another server reads it; give every server its own directory") from None
        if mode & stat.S_IWOTH:
            said = f"{self._directory}: every user of this machine can write here, and so send messages; chmod o-w {self._directory}"
            report_event(self._on_event, Event(EXPIRING, said, bad=True))
        return descriptor

    # everything below runs on the server's own thread

    def _run(self) -> None:
        while not self._stop.is_set():
            self._waker.clear()
            busy = False
            try:
                self._find()
                for client in list(self._clients.values()):
                    if client.session.final is None:
                        busy |= self._serve_folder(client)
                self._unreadable = False
            except Exception as error:  # the directory may come back
                if not self._unreadable:
                    self._unreadable = True
                    said = f"{self._directory}: cannot be read now ({type(error).__name__}: {error}); it is tried again"
                    report_event(self._on_event, Event(FAULT, said, bad=True))
            if not busy:
                self._stop.wait(_PAUSE_SECONDS)  # to look for every single file would cost more than to read it
                self._waker.wait(_POLL_SECONDS)

    def _find(self) -> None:
        """New folders; a rank that two live trainings claim belongs to the one that came first."""
        for name in sorted(os.listdir(self._directory)):
            found = layout.parse_folder(name)
            if found is None or found[1] in self._clients:
                continue
            rank, session = found
            folder = self._directory / name
            if not stat.S_ISDIR(os.lstat(folder).st_mode):
                continue
            problem = ""
            if self._options.ranks and rank not in self._options.ranks:
                problem = f"rank {rank} is not in rank_list ({sorted(self._options.ranks)})"
            elif any(c.session.peer.rank == rank and c.session.connection is not None for c in self._clients.values()):
                problem = f"another training has rank {rank} too and still runs; this one waits"
            if problem:
                if session not in self._waiting:
                    self._waiting.add(session)
                    report_event(self._on_event, Event(REFUSED, f"{folder}: {problem}", bad=True))
                continue
            peer = Peer(session, rank, 0, str(folder))
            safe = self._last(peer) if self._last is not None else 0
            new = Session(peer, safe, self._handler, self._on_event, self._budget, self._options.read_ahead)
            new.connection = self
            with self._lock:
                self._clients[session] = _Client(folder, new)
            report_event(self._on_event, Event(CONNECTED, f"rank {rank} ({folder}) is there", peer=peer))

    def _serve_folder(self, client: _Client) -> bool:
        """Go on with one folder; True when there may be more to do at once."""
        session = client.session
        self._remove_taken(client)
        if session.have + 1 not in client.files or time.monotonic() - client.looked > _POLL_SECONDS:
            client.looked = time.monotonic()
            try:
                names = os.listdir(client.folder)
            except FileNotFoundError:
                names = []
            name_of = {sequence: name for name in names if (sequence := layout.parse_message_name(name)) is not None}
            client.files = dict(sorted(name_of.items()))
            self._remove_taken(client)
            self._hear(client)
        read = 0
        for sequence in [s for s in client.files if s > session.have]:
            if sequence > session.have + 1 and not self._skip_if_overdue(client, sequence):
                break
            client.missing_since = 0.0
            if not session.room or not self._read_message(client, sequence):
                break
            read += 1
        session.kick()
        if client.last >= 0 and not client.files and session.safe >= session.have:
            self._finish(client)
        return read >= _BUSY

    def _skip_if_overdue(self, client: _Client, sequence: int) -> bool:
        """A message is missing and later ones are there: has it been waited for long enough?"""
        now = time.monotonic()
        client.missing_since = client.missing_since or now
        if now - client.missing_since < self._options.gap_seconds:
            return False
        client.session.skip(sequence)
        return True

    def _remove_taken(self, client: _Client) -> None:
        safe, refused = client.session.pop_acknowledgement()
        for sequence, _ in refused:
            self._set_aside(client, sequence)
        for sequence in [s for s in client.files if s <= safe]:
            with contextlib.suppress(FileNotFoundError):
                (client.folder / client.files.pop(sequence)).unlink()

    def _set_aside(self, client: _Client, sequence: int) -> None:
        name = client.files.pop(sequence, None)
        if name is not None:
            with contextlib.suppress(OSError):
                os.rename(client.folder / name, client.folder / f"{sequence:012d}.refused")

    def _hear(self, client: _Client) -> None:
        """Signs of life: a note that changes. The clocks of the hosts need not agree."""
        session = client.session
        alive = layout.read_note(client.folder / layout.ALIVE)
        now = time.monotonic()
        if alive is not None and alive != client.alive:
            client.alive = alive
            session.seen = now
            lost = whole(alive.get("lost"))
            if lost is not None:
                session.record_lost(lost)
            if session.gone_told:
                session.gone_told = False
                report_event(self._on_event, Event(RECONNECTED, f"rank {session.peer.rank} ({client.folder}) is back", peer=session.peer))
            session.connection = self
        end = layout.read_note(client.folder / layout.END)
        if end is not None:
            client.last = max(whole(end.get("sequence")) or 0, 0)
            client.alive = end
        elif not session.gone_told and now - session.seen > self._options.silence:
            session.gone_told = True
            session.connection = None
            said = f"rank {session.peer.rank} ({client.folder}) has shown no sign of life for {self._options.silence:g} s and has not ended"
            report_event(self._on_event, Event(GONE, said, bad=True, peer=session.peer))

    def _read_message(self, client: _Client, sequence: int) -> bool:
        """One message into memory; False when there is none for it now."""
        session = client.session
        try:
            descriptor = open_regular(client.folder / client.files[sequence])
        except OSError as error:
            self._reject(client, sequence, error.strerror or str(error))
            return True
        try:
            status = os.fstat(descriptor)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                self._reject(client, sequence, "it is no regular file")
                return True
            if not PREFIX_BYTES <= size <= self._options.message_bytes:
                self._reject(client, sequence, f"it has {size} bytes, {PREFIX_BYTES} to {self._options.message_bytes} are allowed")
                return True
            if not self._budget.acquire(size, self._waker):
                return False
            view, memory = self._budget.memory.get(size)
            try:
                with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
                    frame = _whole_file(file, view)
                if frame.sequence != sequence:
                    raise TransportError(f"the message in it has number {frame.sequence}")
            except (OSError, TransportError) as error:
                self._budget.release(size)
                self._reject(client, sequence, str(error))
                return True
            extra = size - len(frame.header) - len(frame.payload)
            if not session.accept(frame._replace(memory=memory)):
                extra = size
            self._budget.release(extra)
            session.seen = time.monotonic()
            return True
        finally:
            os.close(descriptor)

    def _reject(self, client: _Client, sequence: int, reason: str) -> None:
        client.session.reject(sequence, reason)
        self._set_aside(client, sequence)

    def _finish(self, client: _Client) -> None:
        """The end was said, and all that is there was taken."""
        session = client.session
        if session.have < client.last and not self._skip_if_overdue(client, client.last + 1):
            return
        assert client.alive is not None
        session.final = final = counts_of(client.alive.get("counts"))
        session.connection = None
        state = session.state()
        for name in (layout.ALIVE, layout.END):
            with contextlib.suppress(OSError):
                (client.folder / name).unlink()
        with contextlib.suppress(OSError):  # what was refused stays
            client.folder.rmdir()
        given_up = final.dropped + final.lost
        said = (
            f"rank {session.peer.rank} ({client.folder}) has ended: {state.received} messages, {state.refused} refused, "
            f"{state.missing} missing, {given_up} given up by it"
        )
        report_event(self._on_event, Event(FINISHED, said, bad=bool(state.refused or state.missing or given_up), peer=session.peer))


def _whole_file(file: Any, view: memoryview) -> Any:
    at = 0
    while at < len(view):
        count = file.readinto(view[at:])
        if not count:
            raise TransportError("the file became shorter while it was read")
        at += count
    return parse_message(view)
