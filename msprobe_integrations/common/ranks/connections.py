"""The thread of a process that drives its exchanges, and connections that carry messages.

Who wants to connect to a rank has read its address from the job's store: where it listens, and a secret that it has drawn. A connection
that does not begin with the secret is closed. What comes over it are numbers of fixed form, never objects.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import resource
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count, islice
from typing import Any, Protocol

import numpy as np

from msprobe_engine.core.log import get_logger
from msprobe_integrations.common.ranks.addresses import machine_id, own_hosts
from msprobe_integrations.common.ranks.tree import Kind, Message

GREETING = 15.0
"""Seconds that a connection may take to say what it is for."""
_HEAD = struct.Struct("<BBxxIqq")
_HELLO = struct.Struct("<8s16s20sI")
_MAGIC = b"msprobe1"
_MOST_BYTES = 1 << 28
"""Of one message: two million rows."""
_CHUNK = 1 << 18
_STRANGERS, _OF_ALL_FILES = 256, 8
"""Connections that have not said yet what they are for: so many at most, and one of so many files that the process may open."""
_FULL = 1.0
"""Seconds without new connections after one for which the process had no file left."""
_UNCLAIMED = 60.0
_DRAIN = 2.0
_log = get_logger()


def encode(message: Message) -> bytes:
    """As it goes over a connection."""
    kind, lane, number, identity, words = message
    return _HEAD.pack(kind, lane, words.nbytes, number, identity) + words.astype("<i8", copy=False).tobytes()


def decode(data: bytearray) -> list[Message]:
    """The messages that have come whole; they are taken out of `data`.

    Raises:
        ValueError: it is no message.
    """
    messages, position = [], 0
    while len(data) - position >= _HEAD.size:
        kind, lane, length, number, identity = _HEAD.unpack_from(data, position)
        if length > _MOST_BYTES or length % 8:
            raise ValueError(f"a message of {length} bytes")
        end = position + _HEAD.size + length
        if len(data) < end:
            break
        messages.append(Message(Kind(kind), lane, number, identity, np.frombuffer(bytes(data[position + _HEAD.size : end]), "<i8")))
        position = end
    del data[:position]
    return messages


class Adopter(Protocol):
    """Takes the connections that come for one tree."""

    def adopt(self, connection: Connection) -> None: ...


class Loop:
    """The thread of a process that drives its exchanges, from the first one on until the last has ended."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, lambda _events: self._drain_wake())
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._listener: socket.socket | None = None
        self._secret = secrets.token_bytes(16)
        self._address = ""
        self._strangers: dict[Connection, float] = {}
        self._early: dict[bytes, list[Connection]] = {}
        self._links: dict[bytes, Adopter] = {}
        self._over: set[bytes] = set()
        self.connections: set[Connection] = set()
        self.users: set[Any] = set()
        self.alive = True
        self._thread = threading.Thread(target=self._work, name="msprobe-exchange", daemon=True)
        self._thread.start()

    def call(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread, soon."""
        self._calls.append(action)
        with contextlib.suppress(OSError):  # full: it is awake anyway; or closed
            self._wake_in.send(b"x")

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """The same, in so many seconds. On the loop's thread."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def address(self, store_host: str) -> str:
        """Where this process listens, from now on: secret, port, place, then hosts, the likeliest first."""
        if self._listener is None:
            alone = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "?")  # all ranks are on this machine
            dual_stack = socket.has_dualstack_ipv6() and not alone
            family = socket.AF_INET6 if dual_stack else socket.AF_INET
            self._listener = socket.create_server(("127.0.0.1" if alone else "", 0), family=family, backlog=256, dualstack_ipv6=dual_stack)
            self._listener.setblocking(False)
            self._watch_listener()
            hosts = [] if alone else own_hosts(store_host)
            self._address = " ".join([self._secret.hex(), str(self._listener.getsockname()[1]), machine_id(), *hosts])
        return self._address

    # on the thread

    def _work(self) -> None:
        while self.alive:
            for key, events in self._selector.select(self._pause()):
                self._guard(key.data, events)
            while self._calls:
                self._guard(self._calls.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._guard(heapq.heappop(self._timers)[2])
            for connection in [each for each, until in self._strangers.items() if time.monotonic() > until]:
                del self._strangers[connection]
                connection.close()
            if not self.users and not self.connections - self._strangers.keys():
                _forget(self)
        self._close()

    def _pause(self) -> float | None:
        if self._calls:
            return 0.0
        times = [*(at for at, _, _ in self._timers[:1]), *islice(self._strangers.values(), 1)]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _guard(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:  # users tell their own; of one exchange the others hear nothing
            _log.debug("exchange of ranks: %s: %s", type(error).__name__, error)

    def _drain_wake(self) -> None:
        with contextlib.suppress(OSError):
            while self._wake_out.recv(4096):
                pass

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it stays ready to be accepted: the thread would not rest
                self.watch(self._listener, 0, self._on_listener)
                self.later(_FULL, self._watch_listener)
            return
        most = max(1, min(_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _OF_ALL_FILES))
        while len(self._strangers) >= most:  # the oldest goes: a rank says at once what it wants
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()
        connection = Connection(self, sock)
        self._strangers[connection] = time.monotonic() + GREETING
        connection.set_handler(self._greet)

    def _watch_listener(self) -> None:
        if self._listener is not None and self.alive:
            self.watch(self._listener, selectors.EVENT_READ, self._on_listener)

    def _on_listener(self, _events: int) -> None:
        self._accept()

    def _greet(self, connection: Connection) -> None:
        """A connection has sent something, or has ended."""
        data = connection.data
        if connection.ended or len(data) < _HELLO.size:
            if connection.ended:
                self._strangers.pop(connection, None)
            return
        magic, secret, key, place = _HELLO.unpack_from(data)
        del data[: _HELLO.size]
        del self._strangers[connection]
        if magic != _MAGIC or not secrets.compare_digest(secret, self._secret) or key in self._over:
            connection.close()
            return
        connection.place = place
        if (links := self._links.get(key)) is not None:
            links.adopt(connection)
        else:  # this rank has not heard yet that all have come
            connection.set_handler(lambda _connection: None)
            self._early.setdefault(key, []).append(connection)
            self.later(_UNCLAIMED, lambda: self._drop_early(key))

    def _drop_early(self, key: bytes) -> None:
        for connection in self._early.pop(key, []):
            connection.close()

    def open_links(self, key: bytes, links: Adopter) -> None:
        self._links[key] = links
        for connection in self._early.pop(key, []):
            links.adopt(connection)

    def end_links(self, key: bytes) -> None:
        """Whoever comes for it still is sent away."""
        self._links.pop(key, None)
        self._over.add(key)
        self._drop_early(key)

    def hello(self, secret: bytes, key: bytes, place: int) -> bytes:
        return _HELLO.pack(_MAGIC, secret, key, place)

    def watch(self, sock: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """`handler` hears of these events from now on, and of no others; 0: of none."""
        known = sock in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(sock)
        elif known:
            self._selector.modify(sock, events, handler)
        else:
            self._selector.register(sock, events, handler)

    def _close(self) -> None:
        for connection in list(self.connections):
            connection.close()
        self._selector.close()
        for closing in (self._wake_out, self._wake_in):
            closing.close()
        if self._listener is not None:
            self._listener.close()

    def abandon(self) -> None:
        """In a forked child: the parent's connections are none of its own."""
        self.alive = False
        for connection in list(self.connections):
            connection.sock.close()  # nothing is taken out of the selector, which the parent has too
        self.connections.clear()
        self._close()


class Connection:
    """A socket that carries messages; all on the loop's thread.

    Attributes:
        place: of the neighbour at the other end.
        data: that has come and was not read yet.
        ended: why nothing comes any more; empty as long as it may.
    """

    place = -1

    def __init__(self, loop: Loop, sock: socket.socket) -> None:
        self.sock, self._loop = sock, loop
        self.data = bytearray()
        self.ended = ""
        self._out: deque[memoryview] = deque()
        self._handler: Callable[[Connection], None] = lambda _connection: None
        self._finishing = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        loop.connections.add(self)

    def set_handler(self, handler: Callable[[Connection], None]) -> None:
        """`handler` is called when something has come, or nothing will any more."""
        self._handler = handler
        self._watch()

    def send(self, data: bytes) -> None:
        """Send it, as soon as the other end takes it."""
        if self.ended:
            return
        self._out.append(memoryview(data))
        if len(self._out) == 1:
            self._write()

    def finish(self) -> None:
        """Close it when all was sent and the other end has read it."""
        self._finishing = True
        self._handler = lambda connection: connection.close() if connection.ended else connection.data.clear()
        self._loop.later(_DRAIN, self.close)
        if not self._out:
            self._end_sending()

    def close(self) -> None:
        """At once."""
        self.ended = self.ended or "closed"
        if self in self._loop.connections:
            self._loop.connections.discard(self)
            self._loop.watch(self.sock, 0, self._on_events)
            self.sock.close()

    def _watch(self) -> None:
        if self in self._loop.connections:
            self._loop.watch(self.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0), self._on_events)

    def _on_events(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write()
        if events & selectors.EVENT_READ and not self.ended:
            self._read_socket()

    def _read_socket(self) -> None:
        try:
            chunk = self.sock.recv(_CHUNK)
            if chunk:
                self.data += chunk
            else:
                self.ended = "it has closed the connection"
        except BlockingIOError:
            return
        except OSError as error:
            self.ended = error.strerror or str(error)
        handler = self._handler
        if self.ended:
            ended = self.ended
            handler(self)
            self.close()
            self.ended = ended
        else:
            handler(self)

    def _write(self) -> None:
        try:
            while self._out:
                sent = self.sock.send(self._out[0])
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                    break
                self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:  # whoever reads finds out why
            self._out.clear()
        self._watch()
        if self._finishing and not self._out:
            self._end_sending()

    def _end_sending(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


_loop: Loop | None = None
_starting = threading.Lock()


def join_loop(user: Any) -> Loop:
    """The loop of this process, which lives as long as it has a user."""
    global _loop
    with _starting:
        if _loop is None:
            _loop = Loop()
        _loop.users.add(user)
        return _loop


def _forget(loop: Loop) -> None:
    global _loop
    with _starting:
        if not loop.users:
            loop.alive = False
            if _loop is loop:
                _loop = None


def _after_fork() -> None:
    global _loop, _starting
    loop, _loop, _starting = _loop, None, threading.Lock()
    if loop is not None:
        loop.abandon()


os.register_at_fork(after_in_child=_after_fork)
