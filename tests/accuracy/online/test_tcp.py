"""The online path over TCP: nothing is lost, or the loss is counted, whatever happens to cable, server and messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from online_ends import LOOPBACK, QUICK_CLIENT, Cable, Kept, sending, serving, until

from msprobe_engine.accuracy.online.events import Event
from msprobe_engine.accuracy.online.options import DROP, Address, ClientOptions, ServerOptions
from msprobe_engine.accuracy.online.receiver import ServerMetrics
from msprobe_engine.accuracy.online.tcp.client import Client
from msprobe_engine.accuracy.online.tcp.server import Server
from msprobe_engine.core.errors import SettingsError, TransportError


def _all_there(kept: Kept, client: Client, count: int) -> bool:
    return kept.numbers(client.session) == list(range(count))


def test_messages_arrive_whole_once_and_in_order() -> None:
    """Headers and payloads of any size, from nothing to more than all buffers, come out as they went in."""
    kept, events = Kept(), []
    rng = np.random.default_rng(0)
    sizes = [0, 1, 100, 16384, 16385, 131072, 131073, 3_000_000, 7]
    sent = []
    with serving(kept) as server:
        client = sending(server.port, events)
        for i, size in enumerate(sizes):
            parts = [rng.bytes(size), b"", rng.bytes(size // 3)]
            header = {"i": i, "nan": float("inf"), "name": "模型\ud800.0", "long": "x" * (300_000 if i == 4 else 5)}
            sent.append((i + 1, header, b"".join(parts)))
            assert client.send(header, parts)
        counts = client.close(60.0)
    assert kept.messages[client.session] == sent
    assert counts.acknowledged == counts.offered == len(sizes)
    assert kept.kinds()[-1] == "finished"
    final = server.sessions()[0].final
    assert final is not None
    assert final.acknowledged == len(sizes)


def test_a_damaged_byte_breaks_the_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On plain TCP over a network every message has a checksum: what was changed is not believed, and comes again."""
    monkeypatch.setattr("msprobe_engine.accuracy.online.tcp.client.is_loopback", lambda _: False)
    kept, events = Kept(), []
    with serving(kept) as server:
        cable = Cable(server.port)
        client = sending(cable.port, events, plain=True)
        for i in range(12):
            cable.flip_at = cable.passed + 37 * i  # prefix, header, payload, checksum
            client.send({"i": i}, [bytes(range(256))])
            assert until(lambda i=i: len(kept.numbers(client.session)) == i + 1)
        client.close(10.0)
        cable.close()
    assert _all_there(kept, client, 12)
    assert all(payload == bytes(range(256)) for _, _, payload in kept.messages[client.session])
    assert kept.said("changed on its way")


def test_a_connection_that_ends_inside_a_frame_costs_nothing() -> None:
    """Cut at any byte: the rest comes again."""
    kept, events = Kept(), []
    with serving(kept) as server:
        cable = Cable(server.port)
        client = sending(cable.port, events)
        until(lambda: client.counts().connections)
        for i, more in enumerate((1, 20, 33, 60, 1000, 30_000)):
            cable.stop_after = cable.passed + more
            client.send({"i": i}, [b"z" * 50_000])
            assert until(lambda i=i: len(kept.numbers(client.session)) == i + 1)
        client.close(5.0)
        cable.close()
    assert _all_there(kept, client, 6)


def test_a_server_that_comes_later_gets_everything() -> None:
    """No server at the start is one message, and the queue."""
    kept, events = Kept(), []
    with serving(kept) as server:
        port = server.port
    client = sending(port, events)
    for i in range(10):
        assert client.send({"i": i}, [b"x"])
    assert until(lambda: "unreachable" in [e.kind for e in events])
    with serving(kept, port=port):
        client.close(5.0)
    assert _all_there(kept, client, 10)
    assert [e.kind for e in events].count("unreachable") == 1


def test_a_server_that_is_closed_and_opened_goes_on_where_it_was() -> None:
    """Its handler's owner says what is safe; nothing is handed over twice and nothing is left out."""
    kept, events = Kept(), []
    kept.delay = 0.002
    with serving(kept) as server:
        port = server.port
        client = sending(port, events)
        for i in range(300):
            client.send({"i": i}, [b"x" * 2000])
        until(lambda: len(kept.numbers(client.session)) > 50)
    assert not _all_there(kept, client, 300)
    with serving(kept, port=port) as again:
        counts = client.close(60.0)
        assert again.sessions()[0].missing == 0
    assert counts.acknowledged == 300
    assert _all_there(kept, client, 300)


_KILLED = """
import sys, time
sys.path.insert(0, {here!r})
from online_ends import *
folder = Path(sys.argv[2])
def last(peer):
    return max((int(p.name) for p in folder.iterdir() if p.name.isdigit()), default=0)
def handler(peer, header, payload):
    part = folder / f"{{peer.sequence}}.part"
    part.write_bytes(payload)
    target = folder / str(peer.sequence)
    assert not target.exists(), "handed over twice"
    part.rename(target)
server = Server(Address(LOOPBACK, int(sys.argv[1])), handler, QUICK_SERVER, lambda e: None, last)
print(server.port, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_server_killed_with_signal_9_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    """Whatever it was at: what is in its spool is not sent again, everything else is."""
    spool = tmp_path / "spool"
    spool.mkdir()
    script = _KILLED.format(here=str(Path(__file__).parents[1]))
    client, port, events = None, "0", []
    for round_ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, port, str(spool)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        client = client or sending(int(port), events)
        for i in range(300):
            client.send({"i": i}, [f"{round_} {i}".encode() * 100])
        before = len(list(spool.iterdir()))
        assert until(lambda before=before: len(list(spool.iterdir())) > before + 50)
        if round_ < 2:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
    assert client is not None
    counts = client.close(60.0)
    process.kill()
    process.wait()
    process.stdout.close()
    assert counts.acknowledged == 900
    expected = [f"{r} {i}".encode() * 100 for r in range(3) for i in range(300)]
    assert [(spool / str(n)).read_bytes() for n in range(1, 901)] == expected


def test_a_full_queue_waits_or_drops_and_counts() -> None:
    """Policy block waits as long as allowed, once; policy drop never waits. All is counted, and said once."""
    events: list[Event] = []
    client = sending(1, events, queue_bytes=10_000, policy=DROP)
    taken = [client.send({"i": i}, [b"x" * 900]) for i in range(50)]
    counts = client.close(0.1)
    assert counts.offered == 50
    assert counts.dropped == 50 - sum(taken) > 30
    assert counts.lost == sum(taken)
    assert [e.kind for e in events].count("dropping") == 1
    patient = sending(1, events, queue_bytes=10_000, longest_wait=0.3)
    begin = time.monotonic()
    for i in range(50):
        patient.send({"i": i}, [b"x" * 900])
    took = time.monotonic() - begin
    assert 0.3 <= patient.close(0.0).waited_seconds <= took


def test_back_pressure_of_a_slow_handler_reaches_the_sender_and_ends() -> None:
    """With policy block and a slow benchmark nothing is dropped, memory stays bounded on both ends, and heartbeats go on."""
    kept, events = Kept(), []
    kept.delay = 0.02
    with serving(kept, memory_bytes=500_000, read_ahead=150_000) as server:
        client = sending(server.port, events, queue_bytes=400_000, longest_wait=10.0)
        for i in range(60):
            assert client.send({"i": i}, [b"x" * 100_000])
            assert server.budget.used <= 600_000
        kept.delay = 1.2  # longer than silence: nobody may take anybody for dead
        client.send({"i": 60}, [b"y"])
        counts = client.close(60.0)
        assert server.budget.used == 0
    assert counts.acknowledged == 61
    assert counts.connections == 1
    assert counts.waited_seconds > 0.3


def test_a_full_disk_at_the_server_is_waited_for_and_a_bad_message_is_refused() -> None:
    """OSError: the same message again. Other errors: refused, counted on both sides, told once."""
    kept, events, tries = Kept(), [], []

    def fail(peer: object) -> Exception | None:
        number = peer.sequence  # type: ignore[attr-defined]
        tries.append(number)
        if number == 3 and tries.count(3) < 3:
            return OSError(28, "No space left on device")
        return ValueError("no such API") if number in (5, 6) else None

    kept.fail = fail
    with serving(kept) as server:
        client = sending(server.port, events)
        for i in range(10):
            client.send({"i": i}, [])
        counts = client.close(60.0)
        state = server.sessions()[0]
    assert kept.numbers(client.session) == [0, 1, 2, 3, 6, 7, 8, 9]
    assert (counts.acknowledged, counts.refused, state.refused, state.received) == (8, 2, 2, 8)
    assert kept.kinds().count("fault") == kept.kinds().count("recovered") == kept.kinds().count("refused") == 1
    assert any("no such API" in e.message for e in events)


def test_too_large_messages_are_dropped_and_counted_before_and_after_the_greeting() -> None:
    """The client's limit at once; the server's smaller one when it is known. The server never takes memory for more."""
    kept, events = Kept(), []
    with serving(kept) as server:
        port = server.port
    client = sending(port, events, message_bytes=10_000)
    assert not client.send({"i": 0}, [b"x" * 20_000])
    assert client.send({"i": 1}, [b"x" * 8_000])
    assert client.send({"i": 2}, [b"x" * 10])
    with serving(kept, port=port, message_bytes=5_000) as server:
        assert until(lambda: client.counts().acknowledged == 1)
        assert not client.send({"i": 3}, [b"x" * 8_000])
        counts = client.close(60.0)
        state = server.sessions()[0]
    assert kept.numbers(client.session) == [2]
    assert (counts.acknowledged, counts.dropped, counts.lost) == (1, 3, 0)
    assert state.missing == 1


def test_two_trainings_with_one_rank_do_not_mix() -> None:
    """The second is refused while the first is there, is told why, and comes in when the first has gone."""
    kept, events = Kept(), []
    with serving(kept) as server:
        first = sending(server.port, events)
        first.send({"i": 0}, [])
        assert until(lambda: kept.numbers(first.session) == [0])
        second = sending(server.port, events)
        second.send({"i": 0}, [])
        assert until(lambda: any("same rank" in e.message for e in events))
        assert kept.numbers(second.session) == []
        first.close(5.0)
        assert second.close(60.0).acknowledged == 1
    assert kept.numbers(second.session) == [0]
    only_one = Kept()
    with serving(only_one, ranks=frozenset((1,))) as server:
        other = sending(server.port, events, rank=7)
        assert until(lambda: any("rank_list" in e.message for e in events))
        other.close(0.1)


def test_a_training_that_dies_is_noticed() -> None:
    """Gone without a last word is said after `silence`; the last word ends the session at once."""
    kept, events = Kept(), []
    with serving(kept) as server:
        cable = Cable(server.port)
        client = sending(cable.port, events)
        client.send({"i": 0}, [])
        assert until(lambda: kept.numbers(client.session) == [0])
        cable.cut = True
        assert until(lambda: "gone" in kept.kinds())
        assert server.sessions()[0].final is None
        cable.pull()
        cable.cut = False
        client.close(5.0)
        cable.close()
        assert until(lambda: kept.kinds()[-1] == "finished")


def test_send_never_raises_and_a_forked_child_sends_nothing() -> None:
    """What is no JSON or no memory is a counted message; a fork shares neither socket nor numbers."""
    kept, events, done = Kept(), [], []
    with serving(kept) as server:
        client = sending(server.port, events)
        assert not client.send({"i": object()}, [], lambda: done.append(1))
        assert not client.send({"i": 0}, [np.arange(10)[::2].data])
        assert client.send({"i": 0}, [b"x"])
        assert done == [1]
        child = os.fork()
        if not child:
            status = client.send({"i": 1}, [b"x"]) or client.close(1.0).acknowledged
            os._exit(17 if status is True else 0)
        assert os.waitpid(child, 0)[1] == 0
        counts = client.close(60.0)
        assert not client.send({"i": 2}, [])
    assert (counts.acknowledged, counts.dropped) == (1, 2)
    assert kept.numbers(client.session) == [0]


def test_plain_tcp_to_others_must_be_meant_and_ports_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of loopback TLS is the rule; `plain` is the exception. A taken port says so."""
    with pytest.raises(SettingsError, match="msprobe certs"):
        Client(Address("192.0.2.1", 1), ClientOptions(), print)
    with pytest.raises(SettingsError, match="msprobe certs"):
        Server(Address("0.0.0.0", 0), Kept(), ServerOptions(), print)
    kept = Kept()
    with serving(kept) as server, pytest.raises(TransportError, match="another program"):
        Server(Address(LOOPBACK, server.port), Kept(), ServerOptions(), print)
    monkeypatch.setattr("msprobe_engine.accuracy.online.addresses.os.getuid", lambda: 12345)
    if os.getuid() == 12345 or not sys.platform.startswith("linux"):
        return
    events: list[Event] = []
    with serving(kept) as server:
        monkeypatch.undo()
        monkeypatch.setattr("msprobe_engine.accuracy.online.tcp.connection.is_strangers", lambda _: True)
        client = sending(server.port, events, QUICK_CLIENT)
        assert until(lambda: any("another user" in e.message for e in events))
        client.close(0.1)


# Counters of the online path for Prometheus.


def test_a_scrape_says_what_became_of_the_messages_of_every_rank() -> None:
    """Two restarts of one rank are added up; what the training gave up is there too."""
    pytest.importorskip("prometheus_client")
    kept = Kept()
    with serving(kept) as server:
        metrics = ServerMetrics(server.sessions, 0)
        for _restart in range(2):
            client = sending(server.port, [], message_bytes=100, rank=3)
            for size in (10, 10, 1000):
                client.send({"i": 0}, [b"x" * size])
            client.close(5.0)
            assert until(lambda: not server.sessions()[-1].connected)
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=5.0).read().decode()
        metrics.close()
    assert 'msprobe_online_messages_total{rank="3",result="received"} 4.0' in text
    assert 'msprobe_online_messages_total{rank="3",result="given_up"} 2.0' in text
    assert 'msprobe_online_ended{rank="3"} 1.0' in text
    assert 'msprobe_online_connected{rank="3"} 0.0' in text
