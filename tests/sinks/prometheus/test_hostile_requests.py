"""The server of the Prometheus endpoint: what strangers may do to it costs the training nothing."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import selectors
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from online_ends import server_certificate, until

from msprobe_engine.core.metrics_server.http import MAX_CONNECTIONS, REQUEST_SECONDS, MetricsServer

FUZZ_SECONDS = float(os.environ.get("MSPROBE_FUZZ_SECONDS", "2"))
"""A longer tier sets more."""

TRAINING = """
import json, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
import torch
from msprobe.pytorch import TorchProbe
out, cert, key = sys.argv[1:]
sink = {"enabled": True, "port": 0, "tls_cert": cert, "tls_key": key}
settings = Path(out) / "probe.yaml"
sinks = {"prometheus": sink, "csv": {"enabled": False}}
settings.write_text(json.dumps({"output_dir": out, "monitor": {"parameters": True}, "sinks": sinks}))
probe = TorchProbe.from_config(settings)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
probe.attach(model, optimizer)
server = next(s for s in probe.session.writer.sinks if s.name == "prometheus")
print(server.port, flush=True)
most = threads = step = 0
end = None
while end is None or time.monotonic() < end:
    probe.begin_step(step)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    probe.end_step({})
    torch.save(model.state_dict(), Path(out) / "checkpoint.pt")
    most = max(most, len(list(Path("/proc/self/fd").iterdir())))
    threads = max(threads, len(list(Path("/proc/self/task").iterdir())))
    if step == 5:
        quiet = most, threads
    if end is None and (Path(out) / "end").exists():
        end = time.monotonic() + 0.5
    step += 1
    time.sleep(0.005)
probe.close()
print(step, most - quiet[0], threads - quiet[1], flush=True)
"""


class Drips:
    """So many connections that send a byte now and then and connect again when they are thrown out; one thread holds them all."""

    def __init__(self, port: int, count: int, head: bytes) -> None:
        self._address, self._count, self._head = ("127.0.0.1", port), count, head
        self.made = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            while not self._stop.is_set():
                for _ in range(min(50, self._count - len(selector.get_map()))):
                    raw = socket.socket()
                    raw.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        raw.connect(self._address)
                    selector.register(raw, selectors.EVENT_READ)
                    self.made += 1
                for key, _ in selector.select(0.01):  # only what was closed can be read
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                for key in list(selector.get_map().values()):
                    with contextlib.suppress(OSError):
                        key.fileobj.send(self._head)  # type: ignore[union-attr]
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]


def scrape(port: int, tls: ssl.SSLContext | None = None, **headers: str) -> http.client.HTTPResponse:
    """One GET of /metrics."""
    made = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=240, context=tls)
        if tls
        else http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    )
    made.request("GET", "/metrics", headers={name.replace("_", "-"): value for name, value in headers.items()})
    return made.getresponse()


def is_answered(port: int, tls: ssl.SSLContext | None) -> bool:
    """Does a scraper that tries again get the metrics?"""
    for _ in range(30):
        with contextlib.suppress(OSError, http.client.HTTPException):
            return b"msprobe_steps_total" in scrape(port, tls).read()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_two_thousand_drips_do_not_stop_a_training(tmp_path: Path, tls: bool) -> None:
    """A training whose limit is 1024 descriptors saves checkpoints all the while, with 16 connections and no further thread, and a
    scraper is answered in between."""
    cert, key = server_certificate(tmp_path) if tls else ("", "")
    context = ssl.create_default_context(cafile=tmp_path / "server" / "ca.crt") if tls else None
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "out"), cert, key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        port = int(run.stdout.readline())
        assert is_answered(port, context)
        drips = Drips(port, 2000, b"\x16\x03\x01\x02\x00" if tls else b"GET /metrics HTTP/1.1\r\nX: ")
        assert until(lambda: drips.made >= 2000, 60.0)
        answered = [is_answered(port, context) for _ in range(3)]
        (tmp_path / "out" / "end").touch()
        output, errors = run.communicate(timeout=240)
        drips.close()
    assert run.returncode == 0, errors
    assert answered == [True] * 3
    steps, descriptors, threads = (int(word) for word in output.split())
    assert steps > 20
    assert descriptors <= MAX_CONNECTIONS + 4
    assert threads <= 1


@contextlib.contextmanager
def serving(render: Callable[[], bytes] = lambda: b"fine", **options: Any) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, lambda accept: (f"text/plain; for={len(accept)}", render), **options)
    try:
        yield server
    finally:
        server.close()


def say(port: int, data: bytes) -> bytes:
    """What comes back for raw bytes."""
    said = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=240) as raw:
        raw.sendall(data)
        while piece := raw.recv(65536):
            said += piece
    return said


def request(head: str = "GET /metrics HTTP/1.1", *headers: str) -> bytes:
    return "\r\n".join((head, *headers, "", "")).encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(), 200),
        (request("GET / HTTP/1.0"), 200),
        (b"GET /metrics?name=x HTTP/1.1\nHost: localhost\n\n", 200),
        (request("GET /secret HTTP/1.1"), 404),
        (request("POST /metrics HTTP/1.1"), 405),
        (request("GET /metrics HTTP/9.9"), 505),
        (request("GET /metrics FTP/1.0"), 400),
        (b"\r\n\r\n", 400),
        (b"\xff\xfe\x00 \x00 HTTP/1.1\r\n\r\n", 405),
        (request("GET /metrics HTTP/1.1", "X: " + "x" * 9000), 431),
        (b"x" * 9000, 431),
        (request("GET /metrics HTTP/1.1", *["X: y"] * 200), 431),
        (request("GET /metrics HTTP/1.1", "Accept: application/openmetrics-text; version=x"), 200),
    ],
)
def test_status(data: bytes, status: int) -> None:
    """Every request has an answer that says what it is."""
    with serving() as server:
        assert say(server.port, data).split(b"\r\n")[0].split(b" ")[1] == str(status).encode()


def test_head_and_gzip() -> None:
    """HEAD has the headers of GET and no body; a client that takes gzip gets it, others do not."""
    with serving(lambda: b"fine " * 1000) as server:
        answer = scrape(server.port, Accept_Encoding="deflate, gzip;q=1.0")
        assert (answer.headers["Content-Encoding"], gzip.decompress(answer.read())) == ("gzip", b"fine " * 1000)
        assert scrape(server.port, Accept_Encoding="identity").headers["Content-Encoding"] is None
        head, _, body = say(server.port, request("HEAD /metrics HTTP/1.1")).partition(b"\r\n\r\n")
        assert b"Content-Length: 5000" in head
        assert body == b""


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9464", 200),
        ("localhost", 200),
        ("LOCALHOST.:1", 200),
        ("[::1]:9464", 200),
        ("127.9.9.9", 200),
        (socket.gethostname(), 200),
        ("proxy.example:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:9464", 421),
        ("10.0.0.1", 421),
        ("", 421),
        ("[", 421),
        ("evil.example@127.0.0.1", 421),
        ("\u0131", 421),
    ],
)
def test_only_names_of_this_machine_are_answered_on_loopback(host: str, status: int) -> None:
    """A page in a browser here that has its own name resolved to loopback gets nothing (DNS rebinding)."""
    with serving(hosts=("Proxy.Example",)) as server:
        said = say(server.port, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert said.split(b"\r\n")[0].split(b" ")[1] == str(status).encode()


def test_any_name_is_answered_beyond_loopback() -> None:
    """Who listens to the network is asked for by names that this machine does not know."""
    server = MetricsServer("0.0.0.0", 0, lambda _: ("text/plain", lambda: b"fine"))
    assert say(server.port, request("GET /metrics HTTP/1.1", "Host: node7.cluster")).startswith(b"HTTP/1.1 200")
    server.close()


def test_a_failing_scrape_is_500_and_the_next_one_is_answered() -> None:
    """What goes wrong while rendering ends one scrape."""
    answers: Iterator[Exception | bytes] = iter([RuntimeError("broken"), b"fine"])

    def render() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with serving(render) as server:
        assert scrape(server.port).status == 500
        assert scrape(server.port).read() == b"fine"


def test_many_scrapes_at_once_share_one_text() -> None:
    """All who have asked when a text is made get that one; they do not make the training render for each of them."""
    rendered = 0

    def render() -> bytes:
        nonlocal rendered
        rendered += 1
        time.sleep(0.2)
        return b"fine"

    with serving(render) as server:
        open_ = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
        for raw in open_:
            raw.sendall(request())
        for raw in open_:
            assert b"fine" in raw.makefile("rb").read()
            raw.close()
        assert rendered <= 3


def test_a_client_that_does_not_read_keeps_nobody_out() -> None:
    """An answer that is not taken makes room; there are never more connections than allowed."""
    with serving(lambda: b"x" * 30_000_000) as server:
        lazy = []
        for _ in range(MAX_CONNECTIONS + 4):
            lazy.append(socket.create_connection(("127.0.0.1", server.port)))
            lazy[-1].sendall(request())
        assert until(lambda: server.connections == MAX_CONNECTIONS)
        assert say(server.port, request("GET /secret HTTP/1.1")).startswith(b"HTTP/1.1 404")
        assert server.connections <= MAX_CONNECTIONS
        for raw in lazy:
            raw.close()


def test_one_deadline_for_the_whole_request() -> None:
    """A byte now and then does not make the time longer."""
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as raw:
        begin = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begin < 10 * REQUEST_SECONDS:
                raw.sendall(b"x")
                time.sleep(0.2)
        assert REQUEST_SECONDS * 0.9 < time.monotonic() - begin < 10 * REQUEST_SECONDS


def test_it_waits_when_the_process_has_no_descriptor_left(tmp_path: Path) -> None:
    """A newcomer is let in when there is one again, and the thread does not spin meanwhile."""
    code = f"""
import os, resource, socket, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from msprobe_engine.core.metrics_server.http import MetricsServer
server = MetricsServer("127.0.0.1", 0, lambda _: ("text/plain", lambda: b"fine"))
import prometheus_client.exposition
client = socket.socket()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
client.connect(("127.0.0.1", server.port))
client.sendall(b"GET /metrics HTTP/1.0\\r\\n\\r\\n")
begin = time.process_time()
time.sleep(1.0)
print(time.process_time() - begin < 0.5)
for fd in held:
    os.close(fd)
client.settimeout(30)
print(b"fine" in client.makefile("rb").read())
server.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert (done.stdout.split(), done.stderr) == (["True", "True"], "")


_PIECES = st.one_of(
    st.binary(max_size=300),
    st.sampled_from([b"GET /metrics HTTP/1.1\r\n", b"HEAD / HTTP/1.0\r\n", b"Host: localhost\r\n", b"Host: [\r\n", b"\r\n\r\n", b"\n\n"]),
    st.sampled_from(
        [b"Accept: application/openmetrics-text;version=", b"1.0.0\r\n", b"Accept-Encoding: gzip\r\n", b"Expect: 100-continue\r\n"]
    ),
    st.sampled_from(
        [b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b" folded\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"\x00" * 9000]
    ),
)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[MetricsServer, ssl.SSLContext | None]]:
    """One server that takes all of it, and answers afterwards."""
    root = tmp_path_factory.mktemp("tls")
    cert, key = server_certificate(root) if request.param else ("", "")
    context = ssl.create_default_context(cafile=root / "server" / "ca.crt") if request.param else None
    before = len(os.listdir("/proc/self/fd"))
    with serving(cert=cert, key=key) as server:
        yield server, context
        assert until(lambda: server.connections == 0, 30.0)
        assert scrape(server.port, context).read() == b"fine"
        assert len(os.listdir("/proc/self/fd")) <= before + 6


@pytest.mark.fast_cells("tls")
def test_a_server_survives_anything(target: tuple[MetricsServer, ssl.SSLContext | None]) -> None:
    """Random bytes and pieces of requests, in any order, as they are and inside of TLS, hung up at any moment."""
    server, context = target

    @settings(database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(_PIECES, max_size=6), st.booleans(), st.booleans())
    def fuzz(pieces: list[bytes], raw: bool, wait: bool) -> None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=0.2) as plain:
            made = plain if raw or context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")
            with made:
                for piece in pieces:
                    made.sendall(piece)
                if wait and made is plain:
                    made.shutdown(socket.SHUT_WR)
                if wait:
                    made.recv(9)
        assert server.connections <= MAX_CONNECTIONS

    end = time.monotonic() + FUZZ_SECONDS
    while time.monotonic() < end:
        fuzz()
