"""Ends of the online path for tests: a server that keeps what it gets, certificates, and a proxy that is the cable."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online.events import Event, Peer
from msprobe_engine.accuracy.online.options import Address, ClientOptions, ServerOptions
from msprobe_engine.accuracy.online.tcp.client import Client
from msprobe_engine.accuracy.online.tcp.server import Server

LOOPBACK = "127.0.0.1"
CLI = [sys.executable, "-m", "msprobe_engine.cli.main"]
QUICK_CLIENT = ClientOptions(heartbeat=0.1, silence=0.6, connect_seconds=2.0, retry_seconds=0.1, longest_wait=5.0)
QUICK_SERVER = ServerOptions(heartbeat=0.1, silence=0.6, greeting_seconds=0.5)


def until(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Does it become true?"""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for what another process does."""
    assert until(condition, seconds), "it never became true"


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        found: int = listener.getsockname()[1]
    return found


class Kept:
    """A handler that keeps messages per session, as a spool would, and what was told."""

    def __init__(self) -> None:
        self.messages: dict[str, list[tuple[int, dict[str, Any], bytes]]] = {}
        self.events: list[Event] = []
        self.delay = 0.0
        self.fail: Callable[[Peer], Exception | None] = lambda _: None

    def __call__(self, peer: Peer, header: Mapping[str, Any], payload: memoryview) -> None:
        error = self.fail(peer)
        if error is not None:
            raise error
        if self.delay:
            time.sleep(self.delay)
        self.messages.setdefault(peer.session, []).append((peer.sequence, dict(header), bytes(payload)))

    def last(self, peer: Peer) -> int:
        got = self.messages.get(peer.session)
        return got[-1][0] if got else 0

    def numbers(self, session: str) -> list[int]:
        return [header["i"] for _, header, _ in self.messages.get(session, [])]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    def said(self, word: str) -> bool:
        return any(word in event.message for event in self.events)


@contextlib.contextmanager
def serving(kept: Kept, options: ServerOptions = QUICK_SERVER, port: int = 0, **changes: Any) -> Iterator[Server]:
    """A server on loopback."""
    server = Server(Address(LOOPBACK, port), kept, replace(options, **changes), kept.events.append, kept.last)
    try:
        yield server
    finally:
        server.close(2.0)


def sending(port: int, events: list[Event], options: ClientOptions = QUICK_CLIENT, **changes: Any) -> Client:
    """A client on loopback."""
    return Client(Address(LOOPBACK, port), replace(options, **changes), events.append)


class Cable:
    """A proxy in front of a port: it can be cut (nothing passes, nobody is told), pulled (connections break), and damaged."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut = False
        self.flip_at = -1
        self.stop_after = -1
        self.passed = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def pull(self) -> None:
        """Break all connections."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Away with it."""
        self._closed = True
        self.pull()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((LOOPBACK, self._target))
            except OSError:
                near.close()
                continue
            self._pairs.append((near, far))
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError), near, far:
            while not self._closed:
                if self.cut:
                    time.sleep(0.005)
                    continue
                ready, _, _ = select.select([near, far], [], [], 0.05)
                for end in ready:
                    if self.cut:
                        break
                    data = end.recv(65536)
                    if not data:
                        return
                    if end is near:
                        data = self._harm(data)
                    (far if end is near else near).sendall(data)
                    if 0 <= self.stop_after <= self.passed:
                        self.stop_after = -1
                        return

    def _harm(self, data: bytes) -> bytes:
        begin, self.passed = self.passed, self.passed + len(data)
        if begin <= self.flip_at < self.passed:
            harmed = bytearray(data)
            harmed[self.flip_at - begin] ^= 0x40
            self.flip_at = -1
            return bytes(harmed)
        if 0 <= self.stop_after < self.passed:
            return data[: max(0, self.stop_after - begin)]
        return data


def tls_directories(root: Path, *addresses: str) -> dict[str, Path]:
    """An authority with a server (at these addresses too), two clients (one to be revoked) and, of another authority, a stranger."""
    from msprobe_engine.accuracy.online.certificates.authority import Authority

    ours, theirs = Authority.create(root / "ca", "cluster"), Authority.create(root / "ca2", "elsewhere")
    ours.issue(root / "bench", "bench", [LOOPBACK, "localhost", *addresses])
    ours.issue(root / "trainer", "trainer")
    ours.issue(root / "former", "former")
    theirs.issue(root / "stranger", "stranger", [LOOPBACK], client=True)
    names = ("ca", "ca2", "bench", "trainer", "former", "stranger")
    return {name: root / name for name in names}


def server_certificate(root: Path) -> tuple[str, str]:
    """Certificate and key of a server at the loopback address; ``ca.crt`` of its authority is beside the certificate."""
    from msprobe_engine.accuracy.online.certificates.authority import Authority

    Authority.create(root / "ca", "cluster").issue(root / "server", "server", [LOOPBACK], client=False)
    return str(root / "server" / "server.crt"), str(root / "server" / "server.key")
