"""Two hosts (network namespaces with a cable between them), TLS on, two ranks: the cable is cut and restored, the server is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from online_ends import until

from msprobe_engine.accuracy.online.authority import Authority

BENCH, TRAINER, PORT = "10.77.31.1", "10.77.31.2", 47120
MESSAGES = 400

_SERVER = """
import sys
sys.path.insert(0, {here!r})
from online_ends import *
from msprobe_engine.accuracy.online.options import TlsOptions
root = Path(sys.argv[1])
def folder(peer):
    path = root / f"rank{{peer.rank}}"
    path.mkdir(exist_ok=True)
    return path
def last(peer):
    return max((int(p.name) for p in folder(peer).iterdir() if p.name.isdigit()), default=0)
def handler(peer, header, payload):
    part = folder(peer) / "part"
    part.write_bytes(payload)
    target = folder(peer) / str(peer.sequence)
    assert not target.exists(), "handed over twice"
    part.rename(target)
options = replace(QUICK_SERVER, tls=TlsOptions(Path(sys.argv[2])))
server = Server(Address({bench!r}, {port}), handler, options, lambda e: print(e.kind, e.message, file=sys.stderr, flush=True), last)
print("ready", flush=True)
time.sleep(100)
"""

_CLIENT = """
import json, sys
sys.path.insert(0, {here!r})
from online_ends import *
from msprobe_engine.accuracy.online.options import TlsOptions
rank = int(sys.argv[2])
options = replace(QUICK_CLIENT, rank=rank, tls=TlsOptions(Path(sys.argv[1])), longest_wait=30.0)
client = Client(Address({bench!r}, {port}), options, lambda e: print(e.kind, e.message, file=sys.stderr, flush=True))
for i in range({count}):
    client.send({{"i": i}}, [f"{{rank}} {{i}} ".encode() * 2000])
    time.sleep(0.01)
print(json.dumps(client.close(30.0).__dict__), flush=True)
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a veth pair between them; its end at the first is called msp0."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip")
    names = f"msp-bench-{os.getpid()}", f"msp-trainer-{os.getpid()}"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("-n", names[0], "link", "add", "msp0", "type", "veth", "peer", "name", "msp1", "netns", names[1])
        for name, link, address in ((names[0], "msp0", BENCH), (names[1], "msp1", TRAINER)):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield names
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False)


def _start(host: str, script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    code = script.format(here=str(Path(__file__).parent), bench=BENCH, port=PORT, count=MESSAGES)
    command = ["ip", "netns", "exec", host, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ready(server: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", server.communicate()[1]
    return server


def _counter(spool: Path) -> Callable[[], int]:
    return lambda: min(len(list((spool / f"rank{rank}").glob("[0-9]*"))) for rank in range(2))


def test_two_hosts_with_tls_lose_nothing_when_the_cable_is_cut_and_the_server_killed(hosts: tuple[str, str], tmp_path: Path) -> None:
    """All messages of both ranks arrive once, whole and in order."""
    bench, trainer = hosts
    authority = Authority.create(tmp_path / "ca", "cluster")
    authority.issue(tmp_path / "bench", "bench", [BENCH])
    authority.issue(tmp_path / "trainer", "trainer")
    spool = tmp_path / "spool"
    spool.mkdir()
    count = _counter(spool)
    server = _ready(_start(bench, _SERVER, spool, tmp_path / "bench"))
    clients = [_start(trainer, _CLIENT, tmp_path / "trainer", str(rank)) for rank in range(2)]
    try:
        assert until(lambda: count() > 40)
        _ip("-n", bench, "link", "set", "msp0", "down")
        time.sleep(1.2)
        stood = count()
        _ip("-n", bench, "link", "set", "msp0", "up")
        assert until(lambda: count() > stood + 40, 15.0)
        server.send_signal(signal.SIGKILL)
        server.communicate()
        server = _ready(_start(bench, _SERVER, spool, tmp_path / "bench"))
        ended = [client.communicate(timeout=60.0) for client in clients]
    finally:
        for process in (server, *clients):
            process.kill()
            process.communicate()
    for rank, (said, heard) in enumerate(ended):
        counts = json.loads(said)
        assert counts["acknowledged"] == MESSAGES, heard
        assert counts["connections"] >= 3
        assert "again after" in heard
        files = {int(p.name): p.read_bytes() for p in (spool / f"rank{rank}").iterdir()}
        assert files == {i + 1: f"{rank} {i} ".encode() * 2000 for i in range(MESSAGES)}
