"""How fast the online path carries bytes: against a plain socket copy of the same bytes, without TLS and with it.

    python benchmarks/online.py
    python benchmarks/online.py --megabytes 1024 --rounds 15 --sizes 65536 1048576

Sender and receiver are two processes on loopback. A copy is ``sendall`` of the same buffer again and again on one side and ``recv_into`` a
buffer of the same size on the other; ours is `Client.send` of as many messages, until all are acknowledged by a `Server` whose handler does
nothing. The two take turns; shown are medians over the rounds, and of the ratios of a round. CPU is what both processes use together:
on a machine that others use too, its ratio says more than that of times. Directory: a shared directory on the local disk, against
writing and reading the same bytes as files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online.certificates.authority import Authority
from msprobe_engine.accuracy.online.directory.client import DirectoryClient
from msprobe_engine.accuracy.online.directory.server import DirectoryServer
from msprobe_engine.accuracy.online.options import Address, ClientOptions, ServerOptions, TlsOptions
from msprobe_engine.accuracy.online.tcp.client import Client
from msprobe_engine.accuracy.online.tcp.server import Server

HOST = "127.0.0.1"
Run = Callable[[memoryview, int], tuple[float, float]]
"""Carries so many copies of some bytes; returns seconds, and CPU seconds of both ends."""


def receive_copies(pipe: Connection, tls: Path | None) -> None:
    """Read connections to their end, one after the other, and answer each with a byte."""
    context = None
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "server.crt", tls / "server.key")
    listener = socket.create_server((HOST, 0))
    pipe.send(listener.getsockname()[1])
    while True:
        connection: Any = listener.accept()[0]
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        left, size = (int.from_bytes(connection.recv(8), "big") for _ in range(2))
        buffer = memoryview(bytearray(size))
        begin = time.process_time()
        while left > 0:
            at = 0
            while at < size:
                at += connection.recv_into(buffer[at:])
            left -= size
        connection.sendall(b"x")
        pipe.send(time.process_time() - begin)
        connection.close()


def receive_ours(pipe: Connection, tls: Path | None) -> None:
    """A server whose handler does nothing; says what CPU was used when it is asked."""
    server = Server(
        Address(HOST, 0),
        lambda *_: None,
        ServerOptions(tls=None if tls is None else TlsOptions(tls)),
        lambda event: print(event.message) if event.bad else None,
    )
    pipe.send(server.port)
    while True:
        begin = time.process_time()
        pipe.recv()
        pipe.send(time.process_time() - begin)


def receive_directory(pipe: Connection, directory: Path) -> None:
    """The same over a directory."""
    server = DirectoryServer(directory, lambda *_: None, ServerOptions(), lambda event: print(event.message) if event.bad else None)
    pipe.send(0)
    while True:
        begin = time.process_time()
        count = pipe.recv()
        while sum(session.final is not None for session in server.sessions()) < count:
            time.sleep(0.005)
        pipe.send(time.process_time() - begin)


def start(target: Callable[..., None], *arguments: object) -> tuple[Connection, int]:
    """Run a receiver; returns the pipe to it and its port."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=target, args=(theirs, *arguments), daemon=True).start()
    return ours, ours.recv()


class Copy:
    """The plain copy."""

    def __init__(self, tls: Path | None) -> None:
        self._pipe, self._port = start(receive_copies, tls)
        self._tls = tls

    def __call__(self, data: memoryview, count: int) -> tuple[float, float]:
        connection: Any = socket.create_connection((HOST, self._port))
        if self._tls is not None:
            context = ssl.create_default_context(cafile=str(self._tls / "ca.crt"))
            connection = context.wrap_socket(connection, server_hostname=HOST)
        begin, used = time.perf_counter(), time.process_time()
        connection.sendall((len(data) * count).to_bytes(8, "big") + len(data).to_bytes(8, "big"))
        for _ in range(count):
            connection.sendall(data)
        connection.recv(1)
        seconds = time.perf_counter() - begin
        connection.close()
        return seconds, time.process_time() - used + float(self._pipe.recv())


class Ours:
    """The online path over TCP."""

    def __init__(self, server_tls: Path | None, client_tls: Path | None) -> None:
        self._pipe, self._port = start(receive_ours, server_tls)
        self._options = ClientOptions(tls=None if client_tls is None else TlsOptions(client_tls))

    def __call__(self, data: memoryview, count: int) -> tuple[float, float]:
        client = Client(Address(HOST, self._port), self._options, lambda event: print(event.message) if event.bad else None)
        while not client.counts().connections:
            time.sleep(0.001)
        self._pipe.send(0)
        self._pipe.recv()
        begin, used = time.perf_counter(), time.process_time()
        for i in range(count):
            client.send({"i": i}, [data])
        counts = client.close(600.0)
        seconds = time.perf_counter() - begin
        assert counts.acknowledged == count, counts
        self._pipe.send(0)
        return seconds, time.process_time() - used + float(self._pipe.recv())


class Files:
    """Files written, read again, and removed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, data: memoryview, count: int) -> tuple[float, float]:
        buffer = bytearray(len(data))
        begin, used = time.perf_counter(), time.process_time()
        for i in range(count):
            (self._root / str(i)).write_bytes(data)
            with open(self._root / str(i), "rb") as file:
                file.readinto(buffer)
            os.unlink(self._root / str(i))
        return time.perf_counter() - begin, time.process_time() - used


class Directory:
    """The online path over a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pipe, _ = start(receive_directory, root)
        self._runs = 0

    def __call__(self, data: memoryview, count: int) -> tuple[float, float]:
        self._runs += 1
        begin, used = time.perf_counter(), time.process_time()
        client = DirectoryClient(self._root, ClientOptions(rank=self._runs), lambda event: print(event.message) if event.bad else None)
        for i in range(count):
            client.send({"i": i}, [data])
        client.close(600.0)
        self._pipe.send(self._runs)
        theirs = float(self._pipe.recv())
        return time.perf_counter() - begin, time.process_time() - used + theirs


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="per run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 1 << 20, 16 << 20], help="bytes per message")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        authority = Authority.create(root / "ca", "benchmark")
        bench, trainer = root / "bench", root / "trainer"
        authority.issue(bench, "bench", [HOST])
        authority.issue(trainer, "trainer")
        (root / "files").mkdir()
        (root / "shared").mkdir()
        ways: dict[str, tuple[Run, Run]] = {
            "TCP": (Copy(None), Ours(None, None)),
            "TLS": (Copy(bench), Ours(bench, trainer)),
            "directory": (Files(root / "files"), Directory(root / "shared")),
        }
        print("| way | message | copy, MB/s | ours, MB/s | ratio | copy, CPU s/GB | ours, CPU s/GB | ratio |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for name, (copy, ours) in ways.items():
            for size in arguments.sizes:
                data = memoryview(os.urandom(size))
                count = max(1, (arguments.megabytes * 1_000_000) // size)
                pairs = [(copy(data, count), ours(data, count)) for _ in range(arguments.rounds)]
                total = size * count
                speeds = [statistics.median(total / pair[i][0] for pair in pairs) / 1e6 for i in range(2)]
                costs = [statistics.median(pair[i][1] / total for pair in pairs) * 1e9 for i in range(2)]
                ratio = statistics.median(a[0] / b[0] for a, b in pairs)
                cost = statistics.median(a[1] / b[1] for a, b in pairs)
                print(
                    f"| {name} | {size >> 10} KiB | {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio:.2f} "
                    f"| {costs[0]:.2f} | {costs[1]:.2f} | {cost:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
