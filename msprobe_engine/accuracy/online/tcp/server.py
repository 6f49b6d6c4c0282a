"""The receiving end over TCP: one thread per client that reads, one that hands messages to the handler."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace

from msprobe_engine.accuracy.online.addresses import check_plain
from msprobe_engine.accuracy.online.budget import Budget
from msprobe_engine.accuracy.online.certificates.tls import SERVER, Credentials, explain
from msprobe_engine.accuracy.online.events import (
    CONNECTED,
    DISCONNECTED,
    EXPIRING,
    FAULT,
    FINISHED,
    GONE,
    RECONNECTED,
    REFUSED,
    Counts,
    Event,
    OnEvent,
    Peer,
)
from msprobe_engine.accuracy.online.options import Address, ServerOptions
from msprobe_engine.accuracy.online.send_queue import report_event
from msprobe_engine.accuracy.online.tcp.channel import Waker
from msprobe_engine.accuracy.online.tcp.connection import Connection
from msprobe_engine.accuracy.online.tcp.session import Handler, Last, Session, SessionState
from msprobe_engine.core.errors import ProbeError, SettingsError, TransportError

__all__ = ["Handler", "Last", "Server", "SessionState"]

_TICK_SECONDS = 0.5
_AGAIN_SECONDS = 60.0
_MOST_REASONS = 1000
_RESTARTS = 2
"""Sessions that are remembered, in connections that are allowed."""


class Server:
    """Listens until `close`.

    Args:
        address: host to listen on (loopback unless told otherwise) and port.
        handler: see `Handler`.
        options: limits, times, TLS.
        on_event: told what happens.
        last: see `Last`; None: what this process itself remembers.

    Raises:
        SettingsError: certificates cannot be used, or plain TCP outside of loopback without ``plain``.
        TransportError: the port is taken, the address is not of this machine.
    """

    def __init__(self, address: Address, handler: Handler, options: ServerOptions, on_event: OnEvent, last: Last | None = None) -> None:
        check_plain(address.host, options.tls is not None, options.plain, "to listen on")
        self.options = options
        self.credentials = Credentials(options.tls, SERVER) if options.tls is not None else None
        self.budget = Budget(options.memory_bytes)
        self._handler = handler
        self._on_event = on_event
        self._last = last
        self._lock = threading.Lock()
        self._sessions = SessionTable(options.newcomers, _RESTARTS * options.clients)
        self._newcomers: dict[Connection, None] = {}
        self._connections: set[Connection] = set()
        self._refusals: dict[tuple[str, str], tuple[float, int]] = {}
        self._stop = threading.Event()
        self._waker = Waker()
        for warning in self.credentials.warnings() if self.credentials is not None else ():
            report_event(on_event, Event(EXPIRING, warning, bad=True))
        self._listener = _open_listener(address)
        self.port: int = self._listener.getsockname()[1]
        """The port in use."""
        self._thread = threading.Thread(target=self._accept, name="msprobe-online-server", daemon=True)
        self._thread.start()

    def sessions(self) -> list[SessionState]:
        """All clients that are remembered (see `SessionTable`), in the order in which they came; sums of the others first."""
        with self._lock:
            past, sessions = self._sessions.past(), list(self._sessions)
        return past + [session.state() for session in sessions]

    def close(self, timeout: float = 10.0) -> None:
        """Stop listening, let handlers finish what they are at (for at most `timeout` seconds), acknowledge it, and hang up."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._waker.wake()
        self._thread.join(timeout)
        self._listener.close()
        deadline = time.monotonic() + timeout
        with self._lock:
            sessions, connections = list(self._sessions), list(self._connections)
        for session in sessions:
            session.stop(max(0.0, deadline - time.monotonic()))
        for connection in connections:
            connection.hang_up("the server ends")
        for connection in connections:
            connection.join(max(0.1, deadline + 1.0 - time.monotonic()))
        self._waker.close()

    # for connections

    def enter(self, connection: Connection, peer: Peer) -> Session:
        """A client has said who it is.

        Raises:
            TransportError: it may not come in now.
        """
        with self._lock:
            known = self._sessions.get(peer.session)
        safe = self._last(peer) if known is None and self._last is not None else 0
        with self._lock:
            for other in self._sessions:
                there = other.connection is not None and other.final is None
                if there and other.peer.rank == peer.rank and other.peer.session != peer.session and not self._give_way(other):
                    raise TransportError(
                        f"rank {peer.rank} is connected from {other.peer.address} already; two trainings, or two processes of one, have "
                        "the same rank (if the other one is dead, its place is free soon)"
                    )
            session = self._sessions.get(peer.session)
            if session is not None and session.peer.rank != peer.rank:
                raise TransportError(f"this session belongs to rank {session.peer.rank}, not to rank {peer.rank}")
            if session is not None and session.peer.name != peer.name:
                raise TransportError(f"this session belongs to '{session.peer.name}', not to '{peer.name}'")
            again = session is not None
            if session is None:
                session = Session(peer, safe, self._handler, self._on_event, self.budget, self.options.read_ahead)
                session.connection = connection
                self._sessions.add(session)
            earlier, session.connection = session.connection, connection
            session.peer = peer
            session.seen = session.since = time.monotonic()
            self._newcomers.pop(connection, None)
        if earlier is not None and earlier is not connection:
            earlier.hang_up("the same client has connected anew")
            earlier.join(1.0)  # so that two threads do not put messages into one session
        name = f", certificate of '{peer.name}'" if peer.name else ""
        kind, word = (RECONNECTED, "is connected again") if again else (CONNECTED, "is connected")
        report_event(self._on_event, Event(kind, f"rank {peer.rank} ({peer.address}{name}) {word}", peer=peer))
        return session

    def _give_way(self, session: Session) -> bool:
        """With the lock held: a connection that has brought nothing for a while (an odd greeting?) has no right to its place."""
        if not session.is_empty or time.monotonic() - session.since <= self.options.silence:
            return False
        session.connection.hang_up(f"nothing was sent for {self.options.silence:g} s, and somebody else needs the place; connect again")
        session.connection = None
        session.seen = time.monotonic()
        return True

    def leave(self, connection: Connection, session: Session | None, problem: BaseException | None) -> None:
        with self._lock:
            self._connections.discard(connection)
            self._newcomers.pop(connection, None)
            is_current = session is not None and session.connection is connection
            if session is not None and is_current:
                session.connection = None
                session.seen = time.monotonic()
            self._sessions.forget()
        if session is None:
            if problem is not None and not self._stop.is_set():
                self._report_refused(connection, problem)
        elif is_current:
            who = f"rank {session.peer.rank} ({session.peer.address})"
            if session.final is not None:
                self._report_finished(session, who)
            elif not self._stop.is_set():
                why = explain(problem, SERVER) if problem is not None else "it hung up"
                said = f"{who} is disconnected: {why}; it may come back, nothing is lost so far"
                report_event(self._on_event, Event(DISCONNECTED, said, bad=True, peer=session.peer))

    def _report_finished(self, session: Session, who: str) -> None:
        state, final = session.state(), session.final
        assert final is not None
        given_up = final.dropped + final.lost
        said = f"{who} has ended: {state.received} messages, {state.refused} refused, {state.missing} missing, {given_up} given up by it"
        report_event(self._on_event, Event(FINISHED, said, bad=bool(state.refused or state.missing or given_up), peer=session.peer))

    def _report_refused(self, connection: Connection, problem: BaseException) -> None:
        """Somebody did not get in. The same from the same host is said once a minute."""
        reason = explain(problem, SERVER)
        key = connection.address.rpartition(":")[0], reason
        now = time.monotonic()
        with self._lock:
            before, count = self._refusals.get(key, (-_AGAIN_SECONDS, 0))
            quiet = now - before < _AGAIN_SECONDS
            if len(self._refusals) >= _MOST_REASONS:
                self._refusals.clear()
            self._refusals[key] = (before, count + 1) if quiet else (now, 0)
        if not quiet:
            more = f" ({count} more times since it was last said)" if count else ""
            report_event(self._on_event, Event(REFUSED, f"{connection.address} was refused: {reason}{more}", bad=True))

    # the thread that listens

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._waker, select.POLLIN)
        ticked = time.monotonic()
        while not self._stop.is_set():
            poller.poll(_TICK_SECONDS * 1000)
            try:
                accepted, address = self._listener.accept()
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._stop.wait(0.2)  # it stays in the queue of the kernel, and poll would say so at once
            else:
                self._accept_connection(accepted, address)
            if time.monotonic() - ticked >= _TICK_SECONDS:
                ticked = time.monotonic()
                self._tick()

    def _accept_connection(self, accepted: socket.socket, address: tuple[str, int]) -> None:
        """A new connection: nobody yet."""
        with self._lock:
            full = len(self._connections) >= self.options.clients
            full = full and not any(s.connection is not None and self._give_way(s) for s in self._sessions)
        if full:  # without a word, and without a thread: who has no thread costs nothing
            accepted.close()
            self._once(REFUSED, f"{self.options.clients} connections are open; more are not let in")
            return
        try:
            name = str(Address(address[0], address[1]))
            connection = Connection(accepted, name, self.options, self.credentials, self.budget, self.enter, self.leave)
        except OSError:
            accepted.close()
            return
        evicted = None
        with self._lock:
            if len(self._newcomers) >= self.options.newcomers:
                evicted = next(iter(self._newcomers))
                del self._newcomers[evicted]
            self._newcomers[connection] = None
            self._connections.add(connection)
        if evicted is not None:
            evicted.hang_up("too many connections have not said who they are")
        try:
            connection.start()
        except RuntimeError:  # no more threads
            accepted.close()
            self.leave(connection, None, TransportError("no more threads can be started"))

    def _tick(self) -> None:
        with self._lock:
            sessions, connections = list(self._sessions), list(self._connections)
        now = time.monotonic()
        for session in sessions:
            away = session.connection is None and session.final is None and now - session.seen > self.options.silence
            if away and not session.gone_told:
                session.gone_told = True
                said = f"rank {session.peer.rank} ({session.peer.address}) has been away for {self.options.silence:g} s without a last word"
                report_event(self._on_event, Event(GONE, said, bad=True, peer=session.peer))
        if self.credentials is not None and self.credentials.have_files_changed():
            with contextlib.suppress(ProbeError):
                self.credentials.context()
                for connection in connections:  # what was revoked may not stay either
                    connection.hang_up("certificates have changed, connect again")
                return
            self._once(FAULT, "the files of tls_path have changed and cannot be used; nobody new is let in")

    def _once(self, kind: str, message: str) -> None:
        with self._lock:
            known = (kind, message) in self._refusals
            self._refusals[(kind, message)] = (time.monotonic(), 0)
        if not known:
            report_event(self._on_event, Event(kind, message, bad=True))


def _open_listener(address: Address) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"host {address.host}: is no address ({error}); give a host name or an IP address of this machine") from None
    family, kind, protocol, _, where = addresses[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        hint = {
            errno.EADDRINUSE: "another program (an earlier server?) holds the port: end it or take another one on both hosts",
            errno.EADDRNOTAVAIL: "this machine has no such address: give one of its own",
            errno.EACCES: "ports below 1024 are for root: take a higher one",
        }.get(error.errno or 0, "give an address and a port of this machine")
        raise TransportError(f"cannot listen on {address}: {error.strerror}; {hint}") from None
    listener.setblocking(False)
    return listener


class SessionTable:
    """Sessions by name, in the order in which they came. Not safe for threads by itself.

    Who is connected stays. Of the others, those without a single message (odd greetings, trainings that ended before their first
    step) are forgotten beyond `most_empty`, the oldest first; and beyond `most` sessions in all, those that have ended, then those that
    have been away longest. The counts of what is forgotten are kept, added up by rank.
    """

    def __init__(self, most_empty: int, most: int) -> None:
        self._most_empty = most_empty
        self._most = most
        self._sessions: dict[str, Session] = {}
        self._past: dict[int, SessionState] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, name: str) -> Session | None:
        return self._sessions.get(name)

    def add(self, session: Session) -> None:
        """A new one; it has a connection."""
        self._sessions[session.peer.session] = session
        self.forget()

    def forget(self) -> None:
        """Keep to the bounds; to be called when a connection is over."""
        away = [session for session in self if session.connection is None]
        empty = sorted((s for s in away if s.is_empty), key=lambda s: s.seen)
        victims = empty[: max(0, len(empty) - self._most_empty)]
        excess = len(self._sessions) - len(victims) - self._most
        if excess > 0:
            chosen = {id(session) for session in victims}
            idle = [session for session in away if session.idle and id(session) not in chosen]
            victims += sorted(idle, key=lambda s: (not s.is_empty, s.final is None, s.seen))[:excess]
        for session in victims:
            del self._sessions[session.peer.session]
            self._remember(session.state())

    def past(self) -> list[SessionState]:
        """What was forgotten, one state per rank; its `final` counts are sums."""
        return list(self._past.values())

    def _remember(self, state: SessionState) -> None:
        final = state.final or Counts(lost=state.peer.lost)
        known = self._past.pop(state.peer.rank, None)
        if known is None and len(self._past) >= self._most:
            known = self._past.pop(next(iter(self._past)))
        if known is not None:
            assert known.final is not None
            sums = {f.name: getattr(known.final, f.name) + getattr(final, f.name) for f in fields(Counts)}
            final = Counts(**sums)
            for name in ("received", "bytes", "refused", "missing"):
                state = replace(state, **{name: getattr(state, name) + getattr(known, name)})
        self._past[state.peer.rank] = replace(state, final=final)
