"""A socket, with or without TLS, that never blocks; one thread sends, receives and waits on it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from msprobe_engine.core.errors import TransportError

_CHUNK = 1 << 20
_JOIN = 16 << 10
_BLOCK = 128 << 10
_PIECES = 512
"""At once in one call of the system; Linux takes 1024."""
CLOSED = -1
"""`Channel.receive` at the end of the stream."""


class Waker:
    """Wakes a thread that waits in `Channel.wait`; calls between two waits are one."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._set = False
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        """Let the waiting thread go on, now or as soon as it waits."""
        if self._set:
            return
        with self._lock:
            if not self._set:
                self._set = True
                os.write(self._write, b"x")

    def clear(self) -> None:
        """Before looking at what one was woken for."""
        if self._set:
            with self._lock:
                os.read(self._read, 1)
                self._set = False  # last: who does not wake because of it has already put down what there is to see

    def wait(self, timeout: float) -> None:
        """Return when woken, or after `timeout` seconds."""
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        poller.poll(timeout * 1000)

    def close(self) -> None:
        """Give the descriptors back; the waiting thread has ended."""
        with self._lock:
            self._set = True
            os.close(self._read)
            os.close(self._write)


class Channel:
    """See the module.

    Args:
        connection: connected; becomes non-blocking.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._out: deque[memoryview] = deque()
        self._want_write = False
        self._want_read = False

    @property
    def certificate_name(self) -> str:
        """Common name of the other end's certificate; "" without TLS."""
        found: Any = self._socket.getpeercert() if isinstance(self._socket, ssl.SSLSocket) else None
        names = [value for part in (found or {}).get("subject", ()) for key, value in part if key == "commonName"]
        return str(names[-1]) if names else ""

    @property
    def encrypted(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket)

    def start_tls(
        self,
        context: ssl.SSLContext,
        deadline: float,
        *,
        server_side: bool,
        host: str | None = None,
        waker: Waker | None = None,
        stop: Callable[[], object] = bool,
    ) -> None:
        """Shake hands.

        Args:
            deadline: `time.monotonic` of the latest end.
            host: the name that the server's certificate must have, where the context checks it.
            waker, stop: `stop` is asked after every wake; with a true answer it is over.

        Raises:
            ssl.SSLError, OSError: it fails.
            TransportError: it takes too long, or was stopped.
        """
        wrapped = context.wrap_socket(self._socket, server_side=server_side, server_hostname=host, do_handshake_on_connect=False)
        self._socket = wrapped
        while True:
            try:
                wrapped.do_handshake()
                return
            except ssl.SSLWantReadError:
                read, write = True, False
            except ssl.SSLWantWriteError:
                read, write = False, True
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TransportError("the TLS handshake was not over in time")
            self._poll(read, write, remaining, waker)
            if stop():
                raise TransportError("stopped in the middle of the TLS handshake")

    def queue_bytes(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Queue bytes to be sent. They must not change until `pending` is 0."""
        if not self.encrypted:
            self._out.extend(memoryview(buffer) for buffer in buffers if len(buffer))
            return
        small: list[memoryview] = []  # a TLS record for every few bytes would cost more than copying them together
        size = 0
        for buffer in buffers:
            view = memoryview(buffer)
            if len(view) <= _JOIN and size < _BLOCK:
                small.append(view)
                size += len(view)
                continue
            if small:
                self._out.append(memoryview(b"".join(small)))
                small, size = [], 0
            if len(view) <= _JOIN:
                small, size = [view], len(view)
            else:
                self._out.append(view)
        if size:
            self._out.append(memoryview(b"".join(small)))

    @property
    def pending(self) -> int:
        """Pieces that are not sent yet."""
        return len(self._out)

    def flush(self) -> int:
        """Send what can be sent now; returns how many bytes.

        Raises:
            OSError, ssl.SSLError: the connection is broken.
        """
        sent = 0
        self._want_read = False
        while self._out:
            try:
                count = self._send()
            except (BlockingIOError, ssl.SSLWantWriteError):
                break
            except ssl.SSLWantReadError:
                self._want_read = True
                break
            sent += count
            while count:
                view = self._out[0]
                if count < len(view):
                    self._out[0] = view[count:]
                    break
                count -= len(view)
                self._out.popleft()
        return sent

    def _send(self) -> int:
        if not self.encrypted:
            return self._socket.sendmsg(islice(self._out, _PIECES))
        return self._socket.send(self._out[0][:_CHUNK])

    def receive(self, target: memoryview) -> int:
        """Bytes put into `target`: 0 when nothing is there now, `CLOSED` at the end.

        Raises:
            OSError, ssl.SSLError: the connection is broken.
        """
        self._want_write = False
        try:
            return self._socket.recv_into(target) or CLOSED
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        except ssl.SSLWantWriteError:
            self._want_write = True
            return 0

    def wait(self, timeout: float, waker: Waker | None = None, *, read: bool = True) -> None:
        """Return when there is something to receive (with `read`), when what is pending can be sent, when woken, or after `timeout`.

        Raises:
            ConnectionResetError: the other end has gone, and nobody reads what would say so.
        """
        if read and isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return
        write = (bool(self.pending) and not self._want_read) or self._want_write
        self._poll(read or self._want_read, write, timeout, waker)

    def _poll(self, read: bool, write: bool, timeout: float, waker: Waker | None) -> None:
        poller = select.poll()
        poller.register(self._socket, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
        if waker is not None:
            poller.register(waker, select.POLLIN)
        for descriptor, found in poller.poll(max(timeout, 0) * 1000):
            if not read and found & (select.POLLERR | select.POLLHUP) and descriptor == self._socket.fileno():
                raise ConnectionResetError("the other end has gone")  # said at once on every further look, so do not look

    def drain(self, linger: float) -> None:
        """Hang up. With `linger`, what is pending is sent first and what still comes is read, for so many seconds at most: closing a
        socket with unread data would reset the connection, and the other end would never see what was sent last."""
        end = time.monotonic() + linger
        scrap = memoryview(bytearray(1 << 16))
        with contextlib.suppress(OSError, ValueError):  # ValueError: poll of a closed socket
            while self.pending and time.monotonic() < end:
                self.flush()
                if self.pending:
                    self.wait(end - time.monotonic(), read=False)
            if linger:
                self._socket.shutdown(socket.SHUT_WR)
            while time.monotonic() < end and self.receive(scrap) != CLOSED:
                self.wait(end - time.monotonic())
        with contextlib.suppress(OSError):
            self._socket.close()
