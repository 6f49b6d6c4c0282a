"""The Prometheus sink: endpoint, node, text file, push."""

from __future__ import annotations

import base64
import http.server
import json
import math
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from frames_of_lists import frame_of
from online_ends import server_certificate
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families as parse

from msprobe_engine.core.errors import MissingExtraError, SinkError
from msprobe_engine.core.settings.schema import PrometheusSettings
from msprobe_engine.probe.rules.builtin.values.nan_inf import NanInfRule
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.prometheus import node
from msprobe_engine.probe.sinks.prometheus.node import NodeDirectory
from msprobe_engine.probe.sinks.prometheus.sink import PrometheusSink


@pytest.fixture
def sinks(tmp_path: Path) -> Iterator[Callable[..., PrometheusSink]]:
    made: list[PrometheusSink] = []

    def make(rank: int = 0, local_rank: int = 0, local_world_size: int = 1, **settings: object) -> PrometheusSink:
        settings.setdefault("port", 0)
        sink = PrometheusSink(
            PrometheusSettings(**settings),  # type: ignore[arg-type]
            output_dir=tmp_path,
            rank=rank,
            local_rank=local_rank,
            local_world_size=local_world_size,
        )
        made.append(sink)
        return sink

    yield make
    for sink in made:
        sink.close()


def parse_openmetrics(text: str) -> list[Any]:
    return list(openmetrics_parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def scrape(sink: PrometheusSink, accept: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{sink.port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
    return body.decode()


def values(text: str, name: str) -> dict[str, float]:
    """Rank to value of one metric."""
    return {s.labels["rank"]: s.value for f in parse(text) for s in f.samples if s.name == name}


def feed(sink: PrometheusSink, step: int, value: float = 1.0, rank: int = 0) -> None:
    frame = frame_of({"layers.0.w": [value]}, step=step, rank=rank, scalars={"loss": value, "step_seconds": 0.1})
    sink.write(frame, NanInfRule().check(frame))


def test_endpoint(sinks: Callable[..., PrometheusSink], binary: Callable[[str], str]) -> None:
    """The endpoint answers on loopback with what promtool, and both parsers of the client library, accept."""
    sink = sinks()
    assert isinstance(sink, Sink)
    feed(sink, 1)
    feed(sink, 2, math.nan)
    text = scrape(sink)
    assert values(text, "msprobe_step") == {"0": 2.0}
    checked = subprocess.run([binary("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=240)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    openmetrics = scrape(sink, "application/openmetrics-text; version=1.0.0")
    names = [f.name for f in parse_openmetrics(openmetrics)]
    assert "msprobe_nonfinite_elements" in names
    assert len(names) == len(set(names))
    assert all(math.isfinite(s.value) for f in parse(text) for s in f.samples)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/secret", timeout=10)


def test_endpoint_ends_with_close(sinks: Callable[..., PrometheusSink]) -> None:
    """After close nobody listens, a second close does nothing, and the port is free again."""
    sink = sinks()
    port = sink.port
    assert port is not None
    sink.close()
    sink.close()
    with pytest.raises(OSError):  # noqa: PT011 - refused or reset, both are right
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    assert sinks(port=port).port == port


def test_port_taken(sinks: Callable[..., PrometheusSink]) -> None:
    """A taken port is a SinkError that names it and says what to do; local rank r would use port + r."""
    port = sinks().port
    with pytest.raises(SinkError, match=rf"port {port} on 127\.0\.0\.1 is taken; set sinks\.prometheus\.port"):
        sinks(port=port)
    with pytest.raises(SinkError, match=f"port {port} "):
        sinks(rank=1, local_rank=1, local_world_size=2, per_node=False, port=port - 1 if port else 0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"address": "192.0.2.1", "port": 9464}, "cannot listen on 192.0.2.1"),
        ({"mode": "textfile"}, "textfile_dir"),
        ({"mode": "push"}, "push_url"),
        ({"tls_cert": "/nonexistent"}, "needs both"),
        ({"tls_cert": "/nonexistent", "tls_key": "/nonexistent"}, "cannot use tls_cert"),
    ],
)
def test_what_cannot_start(sinks: Callable[..., PrometheusSink], settings: dict[str, object], text: str) -> None:
    """Every setting that cannot work is a SinkError that names it."""
    with pytest.raises(SinkError, match=text):
        sinks(**settings)


def test_missing_package(sinks: Callable[..., PrometheusSink], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error holds the pip command."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"msprobe-integrations\[prometheus\]"):
        sinks()


def test_silent_client_holds_up_nobody(sinks: Callable[..., PrometheusSink]) -> None:
    """A client that connects and says nothing does not keep others from scraping."""
    sink = sinks()
    with socket.create_connection(("127.0.0.1", sink.port or 0), timeout=5):
        feed(sink, 1)
        assert values(scrape(sink), "msprobe_step") == {"0": 1.0}


def test_tls(sinks: Callable[..., PrometheusSink], tmp_path: Path) -> None:
    """With a certificate the endpoint speaks TLS that a client can verify, also while another client keeps silent."""
    cert, key = server_certificate(tmp_path)
    sink = sinks(tls_cert=cert, tls_key=key)
    context = ssl.create_default_context(cafile=tmp_path / "server" / "ca.crt")
    with (
        socket.create_connection(("127.0.0.1", sink.port or 0), timeout=5),
        urllib.request.urlopen(f"https://127.0.0.1:{sink.port}/metrics", timeout=10, context=context) as answer,
    ):
        assert b"msprobe_steps_total" in answer.read()


def test_one_endpoint_per_node(sinks: Callable[..., PrometheusSink], tmp_path: Path) -> None:
    """Local rank 0 serves all ranks of its node, says how old and how many they are, and leaves other nodes alone."""
    served = sinks(rank=8, local_rank=0, local_world_size=4)
    second = sinks(rank=9, local_rank=1, local_world_size=4)
    third = sinks(rank=10, local_rank=2, local_world_size=4)
    other_node = sinks(rank=13, local_rank=1, local_world_size=4)
    assert second.port is None
    for sink, rank, step in ((served, 8, 5), (second, 9, 6), (third, 10, 7), (other_node, 13, 9)):
        feed(sink, step, rank=rank)
        sink.flush()
    text = scrape(served)
    assert values(text, "msprobe_step") == {"8": 5.0, "9": 6.0, "10": 7.0}
    assert set(values(text, "msprobe_snapshot_age_seconds")) == {"9", "10"}
    assert "msprobe_snapshots_missing 1.0" in text
    assert text.count("# TYPE msprobe_step ") == 1
    parse_openmetrics(scrape(served, "application/openmetrics-text; version=1.0.0"))
    # A rank that ended in order is gone; one that died stays, and ages.
    second.close()
    path = NodeDirectory(tmp_path, 8).memory / "rank10.json"
    assert not list(tmp_path.glob("prometheus/node8/*"))
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "written": old["written"] - 1000.0}))
    text = scrape(served)
    assert set(values(text, "msprobe_step")) == {"8", "10"}
    assert values(text, "msprobe_snapshot_age_seconds")["10"] >= 1000.0


def test_one_endpoint_per_node_without_shared_memory(
    sinks: Callable[..., PrometheusSink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the memory of a node cannot be had, or somebody else has a place of that name there, ranks meet in the output directory."""
    monkeypatch.setattr(node, "SHARED_MEMORY", tmp_path)
    (tmp_path / "link").mkdir()
    NodeDirectory(tmp_path, 0).memory.symlink_to(tmp_path / "link")
    served, second = (sinks(rank=rank, local_rank=rank, local_world_size=2) for rank in range(2))
    for sink, rank in ((served, 0), (second, 1)):
        feed(sink, 5, rank=rank)
        sink.flush()
    assert values(scrape(served), "msprobe_step") == {"0": 5.0, "1": 5.0}
    assert [path.name for path in tmp_path.glob("prometheus/node0/*")] == ["rank1.json"]
    assert not list((tmp_path / "link").iterdir())


def test_nothing_stays_in_shared_memory(sinks: Callable[..., PrometheusSink], tmp_path: Path) -> None:
    """The rank that serves takes away what the others have left."""
    served, second = (sinks(rank=rank, local_rank=rank, local_world_size=2) for rank in range(2))
    second.flush()
    assert NodeDirectory(tmp_path, 0).memory.is_dir()
    served.close()
    assert not NodeDirectory(tmp_path, 0).memory.exists()


DIGITS = "1" * 400


@pytest.mark.parametrize(
    ("content", "unreadable", "invalid"),
    [
        ("", 1, 0),
        ("[]", 1, 0),
        ("{}", 1, 0),
        ("[" * 100_000, 1, 0),
        ('{"rank":2,"written":1,"families":[]}', 1, 0),
        ('{"rank":1,"written":true,"families":[]}', 1, 0),
        (f'{{"rank":1,"written":{DIGITS},"families":[]}}', 1, 0),
        ('{"rank":1,"written":1,"families":[5]}', 0, 1),
        ('{"rank":1,"written":1,"families":[["evil_metric",[]],[["msprobe_step"],[]],["msprobe_\\ud800",[]]]}', 0, 3),
        ('{"rank":1,"written":1,"families":[["msprobe_step",[["",[["le{","1"]],1],["",[],NaN],["_evil",[],1]]]]}', 0, 3),
        (f'{{"rank":1,"written":1,"families":[["msprobe_loss",[["",[["rank","1"]],{DIGITS}],["",[["rank","1"]],2]]]]}}', 1, 0),
        ('{"rank":1,"written":1,"families":[["msprobe_scalar",[["",[["name","\\ud800"]],1]]]]}', 0, 0),
    ],
    ids=range(12),
)
def test_damaged_snapshot(sinks: Callable[..., PrometheusSink], tmp_path: Path, content: str, unreadable: int, invalid: int) -> None:
    """What is not of the right form in another rank's snapshot is counted and left out, numbers of 400 digits too; scrapes go on."""
    served = sinks(rank=0, local_rank=0, local_world_size=2)
    (NodeDirectory(tmp_path, 0).memory / "rank1.json").write_text(content)
    feed(served, 1)
    text = scrape(served)
    assert f"msprobe_snapshots_unreadable {unreadable}.0" in text
    assert f"msprobe_snapshot_samples_invalid {invalid}.0" in text
    assert values(text, "msprobe_step") == {"0": 1.0}
    assert "evil" not in text
    parse_openmetrics(scrape(served, "application/openmetrics-text; version=1.0.0"))


def test_textfile(sinks: Callable[..., PrometheusSink], tmp_path: Path, binary: Callable[[str], str]) -> None:
    """Mode textfile keeps one whole file that others may read; it goes away with an orderly end."""
    directory = tmp_path / "textfile"
    sink = sinks(rank=2, mode="textfile", textfile_dir=str(directory))
    feed(sink, 3, rank=2)
    sink.flush()
    (path,) = directory.iterdir()
    assert (path.name, stat.S_IMODE(path.stat().st_mode)) == ("msprobe_rank2.prom", 0o644)
    assert values(path.read_text(), "msprobe_step") == {"2": 3.0}
    subprocess.run([binary("promtool"), "check", "metrics"], stdin=path.open(), check=True, timeout=240)
    sink.close()
    assert list(directory.iterdir()) == []


def test_alerts_reach_files_at_once(sinks: Callable[..., PrometheusSink], tmp_path: Path) -> None:
    """Files are replaced once a second at most, but an alert does not wait."""
    sink = sinks(mode="textfile", textfile_dir=str(tmp_path / "t"))
    path = tmp_path / "t" / "msprobe_rank0.prom"
    feed(sink, 1)
    feed(sink, 2, math.nan)
    assert values(path.read_text(), "msprobe_step") == {"0": 2.0}
    feed(sink, 3)
    assert values(path.read_text(), "msprobe_step") == {"0": 2.0}


class Gateway(http.server.ThreadingHTTPServer):
    """Answers like a push gateway and remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.authorized: set[str | None] = set()
        self.news = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    server: Gateway

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.server.authorized.add(self.headers.get("Authorization"))
        self.server.seen.append((self.command, self.path, body))
        self.server.news.set()
        self.send_response(202)
        self.end_headers()

    do_DELETE = do_PUT

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.mark.parametrize(("who", "authorization"), [("", None), ("me:p%40ss@", "Basic " + base64.b64encode(b"me:p@ss").decode())])
def test_push(sinks: Callable[..., PrometheusSink], who: str, authorization: str | None) -> None:
    """Mode push puts the metrics under job and rank, and deletes them at the end; user and password of the address go along."""
    with Gateway() as gateway:
        threading.Thread(target=gateway.serve_forever, args=(0.05,), daemon=True).start()
        sink = sinks(rank=4, mode="push", push_url=f"http://{who}127.0.0.1:{gateway.server_address[1]}", job="run7")
        feed(sink, 1, rank=4)
        assert gateway.news.wait(10)
        sink.close()
        gateway.shutdown()
    (first, *_, last) = gateway.seen
    assert gateway.authorized == {authorization}
    assert first[:2] == ("PUT", "/metrics/job/run7/rank/4")
    assert values(first[2], "msprobe_step") == {"4": 1.0}
    assert last[:2] == ("DELETE", "/metrics/job/run7/rank/4")


def test_dead_gateway_holds_up_nobody(sinks: Callable[..., PrometheusSink]) -> None:
    """Writing takes no time although the gateway accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        sink = sinks(mode="push", push_url=f"http://127.0.0.1:{dead.getsockname()[1]}")
        start = time.perf_counter()
        for step in range(20):
            feed(sink, step)
        assert time.perf_counter() - start < 5.0
