"""The HTTP endpoint: one thread with a selector that answers ``/metrics``, for the process of a training.

What strangers do to it must cost the training nothing that it notices. So there are at most `MAX_CONNECTIONS` connections (the
descriptors are the training's: a `torch.save` fails without a free one), no thread per connection, one deadline for a whole request and
one for a whole answer, and rendering takes at most a quarter of one core: scrapes that come sooner wait for the next text together.
When all places are taken, whoever has been longest without sending a whole request makes room. `prometheus_client.start_http_server`
has none of these limits, and does the TLS handshake while accepting.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import logging
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.metrics_server.request import MAX_HEAD_BYTES, Request, end_of_head, error_answer, known_names, response_head

Choose = Callable[[str], tuple[str, Callable[[], bytes]]]
"""From an Accept header to the content type, and what makes the text of that type."""

MAX_CONNECTIONS = 16
REQUEST_SECONDS = 5.0
"""For the TLS handshake and the request together."""
ANSWER_SECONDS = 5.0
"""For an answer, from the moment at which its text is there."""
_DRAIN_SECONDS = 1.0
_LEAST_SECONDS = 0.05
"""Before a connection has to make room: a scraper on a busy machine gets its request out in this time, and a flood costs little."""
_SLOW_ANSWER_SECONDS = 1.0
"""An answer that takes longer makes room, too."""
_REST = 3.0
"""Times the duration of a rendering before the next one."""
_TICK_SECONDS = 0.5
_NO_DESCRIPTOR_SECONDS = 0.2
_LOG = logging.getLogger("msprobe.prometheus")

_HANDSHAKE, _REQUEST, _WAIT, _ANSWER, _DRAIN = range(5)


class _Connection:
    """One scraper. `phase` goes from `_HANDSHAKE` or `_REQUEST` on to `_DRAIN`."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext | None, now: float) -> None:
        raw.setblocking(False)
        self.socket = raw
        if context is not None:
            self.socket = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
        self.phase = _REQUEST if context is None else _HANDSHAKE
        self.began = now
        self.deadline = now + REQUEST_SECONDS
        self.events = 0
        self.head = bytearray()
        self.request: Request | None = None
        self.kind = ""
        self.render: Callable[[], bytes] = bytes
        self.out: list[memoryview] = []

    def advance(self, now: float) -> bool:
        """Do what can be done without waiting; False: it is over.

        Raises:
            OSError: it is broken. `ssl.SSLWantReadError` and `ssl.SSLWantWriteError` say what is waited for.
        """
        if self.phase == _HANDSHAKE:
            assert isinstance(self.socket, ssl.SSLSocket)
            self.socket.do_handshake()
            self.phase = _REQUEST
        while self.phase == _REQUEST:
            piece = self.socket.recv(MAX_HEAD_BYTES)
            if not piece:
                return False
            self.head += piece
            if end_of_head(self.head) or len(self.head) > MAX_HEAD_BYTES:
                self.phase = _WAIT
        while self.phase == _ANSWER and self.out:
            count = self.socket.send(self.out[0])
            self.out[0] = self.out[0][count:]
            if not self.out[0]:
                del self.out[0]
        if self.phase == _ANSWER:
            self.phase, self.deadline = _DRAIN, min(self.deadline, now + _DRAIN_SECONDS)
            if isinstance(self.socket, ssl.SSLSocket):
                self.socket.unwrap()  # says that this was all
            self.socket.shutdown(socket.SHUT_WR)
        while self.phase == _DRAIN:  # what is closed with unread data resets the connection, and the answer may be lost
            if not self.socket.recv(MAX_HEAD_BYTES):
                return False
        return True

    def answer(self, head: bytes, body: bytes, now: float) -> None:
        self.out = [memoryview(part) for part in (head, body) if part]
        self.phase, self.deadline = _ANSWER, now + ANSWER_SECONDS
        self.began = now

    def close(self) -> None:
        """Hang up, also where a forked child has the descriptor."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()


class MetricsServer:
    """Answers scrapes on a daemon thread until `close`.

    Args:
        address, port: where to listen; port 0 takes a free one.
        choose: see `Choose`; what makes the text is called on the thread of this server.
        cert, key: PEM files; both given: TLS 1.2 or newer.
        hosts: further names by which an endpoint on loopback may be asked for (see `request.known_names`).

    Raises:
        SinkError: the port is taken, the address is not of this machine, or the certificate cannot be used.
    """

    def __init__(self, address: str, port: int, choose: Choose, *, cert: str = "", key: str = "", hosts: Collection[str] = ()) -> None:
        if not 0 <= port <= 65535:
            raise SinkError(f"prometheus sink: port {port} is not a port (0 to 65535); sinks.prometheus.port + local rank must stay below")
        self._context = _tls(cert, key)
        self._choose = choose
        self._listener = _open_listener(address, port)
        bound: tuple[Any, ...] = self._listener.getsockname()
        self._names = known_names(address, bound[0], hosts)
        self.port: int = bound[1]
        """The port in use."""
        self.connections = 0
        """Open now."""
        self._open: list[_Connection] = []
        self._rested = self._accept_after = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="msprobe-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(timeout=5.0)

    # everything below runs on the thread of the server

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                while not self._stop.is_set():
                    self._serve_once(selector)
        except Exception as error:
            if not self._stop.is_set():
                said = "prometheus sink: the endpoint ends for a fault of its own (%s: %s); training goes on without it"
                _LOG.warning(said, type(error).__name__, error)
        finally:
            for connection in self._open:
                connection.close()
            self._open, self.connections = [], 0
            self._listener.close()

    def _serve_once(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        self._watch_listener(selector, now)
        newcomer = False
        for key, _ in selector.select(self._pause(now)):
            if key.data is None:
                newcomer = True
            else:
                self._advance(selector, key.data)
        self._answer_waiting(selector)
        now = time.monotonic()
        for connection in [c for c in self._open if c.deadline <= now and c.phase != _WAIT]:
            self._drop(selector, connection)
        if newcomer and not self._stop.is_set():
            self._accept(selector, now)

    def _pause(self, now: float) -> float:
        """Seconds until something is due without anybody's doing."""
        times = [self._rested if c.phase == _WAIT else c.deadline for c in self._open]
        if len(self._open) >= MAX_CONNECTIONS:
            times += [t for t in map(self._yields_at, self._open) if t > now]
        if self._accept_after > now:
            times.append(self._accept_after)
        return max(0.001, min([now + _TICK_SECONDS, *times]) - now)

    @staticmethod
    def _yields_at(connection: _Connection) -> float:
        """When this connection has to make room for a newcomer."""
        if connection.phase == _WAIT:
            return float("inf")
        return connection.began + (_SLOW_ANSWER_SECONDS if connection.phase == _ANSWER else _LEAST_SECONDS)

    def _victim(self, now: float) -> _Connection | None:
        """Who makes room: the oldest that has not sent a whole request (or has its answer already), else the slowest answer."""
        for phases in ((_HANDSHAKE, _REQUEST, _DRAIN), (_ANSWER,)):
            ready = [c for c in self._open if c.phase in phases and self._yields_at(c) <= now]
            if ready:
                return min(ready, key=lambda c: c.began)
        return None

    def _watch_listener(self, selector: selectors.BaseSelector, now: float) -> None:
        """A newcomer that cannot be let in yet waits in the queue of the kernel."""
        wanted = now >= self._accept_after and (len(self._open) < MAX_CONNECTIONS or self._victim(now) is not None)
        watched = self._listener in selector.get_map()
        if wanted and not watched:
            selector.register(self._listener, selectors.EVENT_READ)
        elif watched and not wanted:
            selector.unregister(self._listener)

    def _accept(self, selector: selectors.BaseSelector, now: float) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            victim = self._victim(now)
            if victim is None:
                return
            self._drop(selector, victim)
        try:
            raw, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._accept_after = now + _NO_DESCRIPTOR_SECONDS  # poll would say at once that somebody is there
            return
        try:
            connection = _Connection(raw, self._context, now)
        except (OSError, ValueError):
            raw.close()
            return
        self._open.append(connection)
        self.connections = len(self._open)
        self._advance(selector, connection)

    def _advance(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        events = selectors.EVENT_READ
        try:
            now = time.monotonic()
            going = connection.advance(now)
            if connection.phase == _WAIT and connection.request is None:
                self._read_request(connection, now)
                going = connection.phase == _WAIT or connection.advance(now)
        except (BlockingIOError, ssl.SSLWantReadError):
            going = True
            if connection.phase == _ANSWER and not isinstance(connection.socket, ssl.SSLSocket):
                events = selectors.EVENT_WRITE
        except ssl.SSLWantWriteError:
            going, events = True, selectors.EVENT_WRITE
        except Exception:  # a client that went away, or speaks something else
            going = False
        if not going:
            self._drop(selector, connection)
            return
        self._watch(selector, connection, 0 if connection.phase == _WAIT else events)

    @staticmethod
    def _watch(selector: selectors.BaseSelector, connection: _Connection, events: int) -> None:
        if connection.events == events:
            return
        if not events:
            selector.unregister(connection.socket)
        elif connection.events:
            selector.modify(connection.socket, events, connection)
        else:
            selector.register(connection.socket, events, connection)
        connection.events = events

    def _read_request(self, connection: _Connection, now: float) -> None:
        if not end_of_head(connection.head[:MAX_HEAD_BYTES]):
            connection.answer(*error_answer(431, f"a request has at most {MAX_HEAD_BYTES} bytes here"), now)
            return
        request = connection.request = Request(bytes(connection.head), self._names)
        if request.status != 200:
            connection.answer(*error_answer(request.status, request.reason, request.head_only), now)
            return
        try:
            connection.kind, connection.render = self._choose(request.accept)
        except Exception:  # a version that is none
            connection.kind, connection.render = self._choose("")

    def _answer_waiting(self, selector: selectors.BaseSelector) -> None:
        """One text for all who wait for this kind of it; another kind has its turn after the pause."""
        waiting = [c for c in self._open if c.phase == _WAIT]
        begin = time.monotonic()
        if not waiting or begin < self._rested:
            return
        first = waiting[0]
        same = [c for c in waiting if c.kind == first.kind]
        answers: dict[bool, tuple[bytes, bytes]] = {}
        try:
            text = first.render()
            for compressed in {_takes_gzip(c) for c in same}:
                body = gzip.compress(text, 1) if compressed else text
                answers[compressed] = response_head(200, first.kind, len(body), compressed=compressed), body
        except Exception as error:
            _LOG.debug("prometheus sink: a scrape failed: %s", error, exc_info=True)
            failed = error_answer(500, "the metrics cannot be put into words now")
            answers = {False: failed, True: failed}
        now = time.monotonic()
        self._rested = now + _REST * (now - begin)
        for other in self._open:  # nobody was looked at meanwhile
            other.deadline += now - begin
        for connection in same:
            head, body = answers[_takes_gzip(connection)]
            assert connection.request is not None
            connection.answer(head, b"" if connection.request.head_only else body, now)
            self._advance(selector, connection)

    def _drop(self, selector: selectors.BaseSelector, connection: _Connection) -> None:
        self._watch(selector, connection, 0)
        connection.close()
        self._open.remove(connection)
        self.connections = len(self._open)


def _takes_gzip(connection: _Connection) -> bool:
    from prometheus_client.exposition import gzip_accepted

    return connection.request is not None and gzip_accepted(connection.request.accept_encoding)


def _open_listener(address: str, port: int) -> socket.socket:
    family = socket.AF_INET
    with contextlib.suppress(OSError):
        family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _why(address, port, error) from error
    return listener


def _tls(cert: str, key: str) -> ssl.SSLContext | None:
    if not cert and not key:
        return None
    if not (cert and key):
        raise SinkError("prometheus sink: TLS needs both sinks.prometheus.tls_cert and sinks.prometheus.tls_key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise SinkError(f"prometheus sink: cannot use tls_cert {cert} with tls_key {key}: {error}; give two PEM files") from error
    return context


def _why(address: str, port: int, error: OSError) -> SinkError:
    if error.errno == errno.EADDRINUSE:
        hint = (
            "set sinks.prometheus.port to a free one (0 takes any) or end what holds it (an earlier probe of this process? close() it); "
            "training goes on without metrics"
        )
        return SinkError(f"prometheus sink: port {port} on {address} is taken; {hint}")
    if error.errno == errno.EACCES:
        return SinkError(f"prometheus sink: no permission to listen on port {port}; choose one above 1023")
    reason = error.strerror or error
    return SinkError(f"prometheus sink: cannot listen on {address} port {port}: {reason}; sinks.prometheus.address must be of this machine")
