"""What a stranger, or a program gone wrong, can send to the server: it never stops, never takes memory for what it does not get, and
others go on."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from online_ends import LOOPBACK, Kept, sending, serving, tls_directories, until

from msprobe_engine.accuracy.online.options import TlsOptions
from msprobe_engine.accuracy.online.send_queue import Outbox
from msprobe_engine.accuracy.online.tcp.channel import Channel
from msprobe_engine.accuracy.online.tcp.connection import Pace, counts_of
from msprobe_engine.accuracy.online.tcp.frames import (
    Frame,
    FrameReader,
    Kind,
    Need,
    encode_control,
    encode_prefix,
    parse_header,
    parse_message,
)
from msprobe_engine.accuracy.online.tcp.server import Server
from msprobe_engine.core.errors import TransportError

_FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def _hello(**changes: Any) -> bytes:
    return encode_control(Kind.HELLO, {"session": secrets.token_hex(16), "rank": 0, "first": 1, "lost": 0, **changes})


def _message(sequence: int, header: bytes = b'{"i":0}', payload: bytes = b"") -> bytes:
    return encode_prefix(Kind.MESSAGE, sequence, len(header), len(payload)) + header + payload


def _read_all(reader: FrameReader, data: bytes, sizes: Iterator[int]) -> list[Frame]:
    """Feed in pieces."""
    frames: list[Frame] = []
    at = 0
    while at < len(data):
        target = reader.target()
        count = min(next(sizes), len(target), len(data) - at)
        target[:count] = data[at : at + count]
        at += count
        while True:
            found = list(reader.parse_received(count))
            frames += [f._replace(payload=memoryview(bytes(f.payload))) for f in found if isinstance(f, Frame)]
            if not found or not isinstance(found[-1], Need):
                break
            reader.give(memoryview(bytearray(found[-1].payload)))
            count = 0
    return frames


@_FUZZ
@given(
    st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 300_000)), max_size=4),
    st.lists(st.integers(1, 200_000), min_size=1, max_size=5),
)
def test_frames_come_out_whole_however_they_are_cut(shapes: list[tuple[int, int]], cuts: list[int]) -> None:
    """The reader gives the same frames for any way the bytes arrive."""
    header = lambda n: b'{"x":"' + b"a" * n + b'"}'  # noqa: E731
    expected = [(header(h), bytes([i]) * p) for i, (h, p) in enumerate(shapes)]
    data = b"".join(_message(i + 1, h, p) for i, (h, p) in enumerate(expected))
    endless = (([*cuts, 60_000])[i % (len(cuts) + 1)] for i in range(1 << 40))
    frames = _read_all(FrameReader((Kind.MESSAGE,), 1 << 20), data, endless)
    assert [(f.header, bytes(f.payload)) for f in frames] == expected


@_FUZZ
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(0, 255), st.integers(0, 400))
def test_the_reader_survives_anything(noise: bytes, at: int, value: int, end: int) -> None:
    """Noise, and good frames with a byte changed or cut off: frames, or `TransportError`, nothing else."""
    good = bytearray(_message(1, b'{"i":1}', b"payload" * 20))
    good[min(at, len(good) - 1)] = value
    for data in (noise, bytes(good), bytes(good[:end]), bytes(good) + noise, noise + bytes(good)):
        with contextlib.suppress(TransportError):
            for frame in _read_all(FrameReader((Kind.MESSAGE, Kind.ALIVE), 10_000), data, iter(lambda: 64, 0)):
                parse_header(frame.header)
        with contextlib.suppress(TransportError):
            parse_header(parse_message(memoryview(data)).header)


def test_lengths_are_checked_before_memory_is_asked_for() -> None:
    """Whatever a prefix announces; the prefix itself has a checksum, so these are made on purpose."""
    for kind, header, payload in ((3, 0, 1), (3, 1 << 31, 0), (4, 1 << 31, 0), (4, 0, 1 << 62), (4, 100, 9_950), (9, 0, 0), (0, 0, 0)):
        text = struct.pack(">4sBBHQIQ", b"MSPF", 1, kind, 0, 1, header, payload)
        with pytest.raises(TransportError, match=r"allowed|no place|has none"):
            _read_all(FrameReader((Kind.MESSAGE, Kind.REFUSED), 10_000), text + struct.pack(">I", zlib.crc32(text)), iter(lambda: 99, 0))
    for header_text in (b"[1]", b"{", b"\xff", b"1" * 5000, b"[" * 60_000):
        with pytest.raises(TransportError):
            parse_header(header_text)


@pytest.fixture(scope="module")
def target() -> Iterator[tuple[Server, Kept]]:
    """One server that takes all of it."""
    kept = Kept()
    with serving(kept, message_bytes=1_000_000, newcomers=8) as server:
        yield server, kept
        client = sending(server.port, [], rank=999)
        client.send({"i": 1}, [b"still here"])
        assert client.close(60.0).acknowledged == 1
        assert server.budget.used == 0


def _say(server: Server, data: bytes, answer: float = 0.3) -> bytes:
    """Send raw bytes, say no more, and return what comes back."""
    with socket.create_connection((LOOPBACK, server.port), timeout=answer) as raw, contextlib.suppress(OSError):
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        said = b""
        while piece := raw.recv(65536):
            said += piece
        return said
    return b""


_TEXTS = st.one_of(
    st.binary(max_size=200),
    st.sampled_from(
        [b"[" * 60_000, b"1" * 5000, b'{"counts":{"waited_seconds":' + b"1" * 400 + b"}}", b'{"lost":1e999}', b'{"counts":[]}']
    ),
    st.dictionaries(
        st.sampled_from(["counts", "lost", "i", "session"]), st.recursive(st.integers() | st.floats() | st.text(), st.lists)
    ).map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
)
_FRAMES = st.one_of(
    st.builds(
        lambda kind, number, header: encode_prefix(kind, number, len(header), 0) + header, st.sampled_from(Kind), st.integers(0, 9), _TEXTS
    ),
    st.builds(_message, st.integers(0, 5), _TEXTS, st.binary(max_size=99)),
    st.builds(lambda number, size: encode_prefix(Kind.MESSAGE, number, 10, size), st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 62)),
    st.binary(max_size=200),
)


def test_a_server_survives_anything(target: tuple[Server, Kept]) -> None:
    """Noise at the beginning and after the greeting; whole frames of every kind with odd headers, in any order, with a byte changed."""
    server, _ = target

    @settings(_FUZZ, database=None)
    @given(st.lists(_FRAMES, max_size=5), st.booleans(), st.integers(0, 1 << 16), st.integers(0, 255), st.booleans())
    def fuzz(frames: list[bytes], greets: bool, at: int, value: int, changed: bool) -> None:
        data = bytearray(b"".join(frames))
        if data and changed:
            data[at % len(data)] = value
        _say(server, (_hello(rank=at) if greets else b"") + bytes(data), 0.1)

    fuzz()


def test_a_greeting_that_is_none_is_refused(target: tuple[Server, Kept]) -> None:
    """With a reason, and no session is made."""
    server, _ = target
    wrong = {
        "session": ("x", 5, "A" * 32), "rank": (-1, "0", True, 1 << 40, None), "first": (1.5, -3), "lost": ("many", 1 << 70),
    }  # fmt: skip
    sent = [{"session": secrets.token_hex(16), name: value} for name, values in wrong.items() for value in values]
    for greeting in sent:
        assert b"reason" in _say(server, _hello(**greeting), 30.0), greeting
    assert not {state.peer.session for state in server.sessions()} & {greeting["session"] for greeting in sent}


def test_oversized_truncated_and_lying_messages_cost_no_memory(target: tuple[Server, Kept]) -> None:
    """Announced sizes beyond the limit end the connection at once; what is announced and does not come is given back."""
    server, _ = target
    big = encode_prefix(Kind.MESSAGE, 1, 10, 1 << 40)
    assert b"1000000 are allowed" in _say(server, _hello() + big, 30.0)
    for _i in range(5):
        _say(server, _hello() + encode_prefix(Kind.MESSAGE, 1, 10, 900_000) + b"x" * 1000)
    assert until(lambda: server.budget.used == 0)


def test_slow_loris_is_cut_off_before_and_after_the_greeting(target: tuple[Server, Kept]) -> None:
    """A byte now and then keeps nobody's place; a good client comes in meanwhile, through more of them than newcomers are allowed."""
    server, kept = target
    stop = threading.Event()

    def drip(data: bytes) -> None:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, server.port)) as raw:
            for byte in data:
                raw.sendall(bytes([byte]))
                if stop.wait(0.1):
                    return

    threads = [threading.Thread(target=drip, args=(_hello(),)) for _ in range(20)]
    for thread in threads:
        thread.start()
    client = sending(server.port, [], rank=77)
    client.send({"i": 0}, [])
    assert client.close(60.0).acknowledged == 1
    assert until(lambda: kept.said("no greeting within") or kept.said("too many connections"))
    with socket.create_connection((LOOPBACK, server.port)) as raw:
        raw.sendall(_hello(rank=78) + encode_prefix(Kind.MESSAGE, 1, 10, 100_000))
        raw.settimeout(5.0)
        ended = False  # by the server: with a byte in a tenth of a second the message would take hours
        for _ in range(600):
            try:
                raw.sendall(b"x")
            except ConnectionError:
                ended = True
                break
            time.sleep(0.1)
        assert ended
    stop.set()
    for thread in threads:
        thread.join()
    assert until(lambda: server.budget.used == 0)


def test_pace_counts_only_the_time_in_which_this_end_reads() -> None:
    """Silence and slowness are the other end's; a pause of ours, at any place, is not held against it."""
    look: dict[str, Any] = {"reading": True, "heard": True, "complete": True, "inside": 0}
    pace = Pace(1000.0, 10.0, 100.0)
    assert pace.find_problem(1001.0, **look) == ""
    assert pace.find_problem(1002.0, **look | {"reading": False}) == ""
    assert pace.find_problem(1500.0, **look | {"complete": False, "inside": 50, "heard": False}) == ""
    assert pace.find_problem(1505.0, **look | {"complete": False, "inside": 50}) == ""
    assert pace.find_problem(1506.0, **look | {"reading": False, "complete": False, "inside": 50}) == ""
    assert pace.find_problem(1700.0, **look | {"reading": False, "complete": False, "inside": 50}) == ""
    assert pace.find_problem(1704.0, **look | {"complete": False, "inside": 50}) == ""
    assert "too slow" in pace.find_problem(1712.0, **look | {"complete": False, "inside": 50})
    assert "nothing was heard" in Pace(0.0, 10.0, 100.0).find_problem(11.0, reading=True, heard=False, complete=False, inside=0)


def test_many_connections_do_not_exhaust_the_server(target: tuple[Server, Kept]) -> None:
    """A flood of silent connections is held to the number of newcomers."""
    server, _ = target
    flood = [socket.create_connection((LOOPBACK, server.port)) for _ in range(100)]
    assert until(lambda: sum(t.name == "msprobe-online" for t in threading.enumerate()) < 40)
    client = sending(server.port, [], rank=79)
    client.send({"i": 0}, [])
    assert client.close(60.0).acknowledged == 1
    for raw in flood:
        raw.close()


@pytest.mark.slow
def test_connections_that_stop_inside_of_the_tls_handshake_are_held_to_the_same_number(tmp_path: Path) -> None:
    """A certificate is not needed to connect, so this is what anybody in the network can do."""
    made = tls_directories(tmp_path)
    kept = Kept()
    with serving(kept, tls=TlsOptions(made["bench"]), newcomers=8, greeting_seconds=30.0) as server:
        flood = []
        for _i in range(60):
            flood.append(socket.create_connection((LOOPBACK, server.port)))
            flood[-1].sendall(b"\x16\x03\x01\x02")
        assert until(lambda: sum(t.name == "msprobe-online" for t in threading.enumerate()) < 20)
        client = sending(server.port, [], tls=TlsOptions(made["trainer"]))
        client.send({"i": 0}, [])
        assert client.close(60.0).acknowledged == 1
        for raw in flood:
            raw.close()
    with serving(kept, clients=3) as server:
        first = sending(server.port, [])
        first.send({"i": 0}, [])
        assert until(lambda: first.counts().acknowledged == 1)
        flood = [socket.create_connection((LOOPBACK, server.port)) for _ in range(10)]
        assert until(lambda: kept.said("more are not let in"))
        first.send({"i": 1}, [])
        assert first.close(60.0).acknowledged == 2
        for raw in flood:
            raw.close()


def test_odd_greetings_leave_nothing_and_refuse_nobody() -> None:
    """However many say who they are and send nothing, with whatever numbers, the server remembers a few of them; a training comes in."""
    kept = Kept()
    odd: list[dict[str, Any]] = [{}, {"first": 1 << 60}, {"lost": 1 << 60}, {"rank": 5}]
    with serving(kept, newcomers=8, clients=16) as server:
        for i in range(120):
            _say(server, _hello(**{"rank": 100 + i} | odd[i % 4]), 30.0)
        assert until(lambda: not any(state.connected for state in server.sessions()))
        assert len(server._sessions) <= 8
        assert sum(state.missing for state in server.sessions()) == 30 * ((1 << 60) - 1)  # what they claim is not forgotten
        client = sending(server.port, [], rank=5)
        client.send({"i": 0}, [])
        assert client.close(60.0).acknowledged == 1


def test_restarts_without_end_are_bounded_and_their_counts_are_kept() -> None:
    """Of trainings that sent something and ended, the table keeps twice as many as connections are allowed, and the sums of the others."""
    kept = Kept()
    with serving(kept, clients=4) as server:
        for i in range(20):
            client = sending(server.port, [], rank=i % 2, message_bytes=100)
            client.send({"i": 0}, [b"xy"])
            client.send({"i": 1}, [b"x" * 1000])
            assert client.close(60.0).acknowledged == 1
        assert until(lambda: not any(state.connected for state in server.sessions()))
        states = server.sessions()
        assert len(server._sessions) == 8
        assert sum(state.received for state in states) == 20
        assert sum(state.final.dropped for state in states if state.final is not None) == 20
        assert {state.peer.rank for state in states} == {0, 1}


def test_a_greeting_that_stays_without_a_message_gives_its_place_to_a_training() -> None:
    """The rank of a connection that has sent nothing but signs of life for a while, and its place when there is no other, are free."""
    kept = Kept()
    with serving(kept, clients=2, silence=0.5) as server:
        stop = threading.Event()

        def stay(rank: int) -> None:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, server.port)) as raw:
                raw.sendall(_hello(rank=rank))
                while not stop.wait(0.1):
                    raw.sendall(encode_control(Kind.ALIVE, {"lost": 0}))

        threads = [threading.Thread(target=stay, args=(rank,)) for rank in (7, 8)]
        for thread in threads:
            thread.start()
        assert until(lambda: len(server.sessions()) == 2)
        client = sending(server.port, [], rank=7)
        client.send({"i": 0}, [])
        assert client.close(60.0).acknowledged == 1
        stop.set()
        for thread in threads:
            thread.join()


def test_counts_of_a_client_are_numbers_or_nothing() -> None:
    """What cannot be a number of seconds or messages is 0; 400 digits end no conversation."""
    for value in (10**400, float("nan"), float("inf"), -1, True, "x", None):
        counts = counts_of({"waited_seconds": value, "lost": value, "offered": 3})
        assert (counts.waited_seconds, counts.lost, counts.offered) == (0.0, 0, 3), value


def test_one_session_cannot_be_taken_by_another_rank(target: tuple[Server, Kept]) -> None:
    """A session belongs to the rank, and with TLS to the certificate, that opened it."""
    server, _ = target
    name = secrets.token_hex(16)
    _say(server, _hello(session=name, rank=5))
    assert b"belongs to rank 5" in _say(server, _hello(session=name, rank=6), 30.0)


def test_a_hostile_server_cannot_hurt_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, noise, acknowledgements of what was never sent, endless frames: the client hangs up and goes on trying; nothing is lost
    twice, and an answer that does not come is waited for without a processor."""
    waits: list[float] = []
    wait = Channel.wait

    def count_waits(channel: Channel, timeout: float, *args: Any, **kwargs: Any) -> None:
        waits.append(timeout)
        wait(channel, timeout, *args, **kwargs)

    monkeypatch.setattr(Channel, "wait", count_waits)
    welcome = encode_control(Kind.WELCOME, {"safe": 0, "have": 0, "message_bytes": 1 << 30})
    answers = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10,
        encode_control(Kind.WELCOME, {"safe": 10**9, "have": 10**9, "message_bytes": 1}),
        encode_control(Kind.WELCOME, {"safe": "x"}),
        welcome + encode_control(Kind.ACK, None, 10**6),
        welcome + encode_control(Kind.ACK, {"refused": [[1], "x", ["a", "b"]]}, 0) + b"\0" * 100,
        welcome + encode_prefix(Kind.MESSAGE, 1, 1 << 20, 1 << 40),
        encode_control(Kind.REFUSED, {"reason": ["\x1b[31m"] * 10}),
    ]
    listener = socket.create_server((LOOPBACK, 0))

    def serve() -> None:
        for answer in answers:
            with contextlib.suppress(OSError):
                raw, _ = listener.accept()
                with raw:
                    raw.recv(100)
                    time.sleep(0.05)
                    raw.sendall(answer)
                    time.sleep(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    events: list[Any] = []
    client = sending(listener.getsockname()[1], events)
    client.send({"i": 0}, [b"x"])
    thread.join(15.0)
    assert not thread.is_alive()
    listener.close()
    counts = client.close(0.1)
    assert (counts.acknowledged, counts.lost) == (0, 1)
    assert len(waits) < 100


def test_done_is_called_once_for_every_message_whatever_comes_of_it() -> None:
    """Acknowledged, refused, dropped or lost: the memory goes back."""
    from msprobe_engine.accuracy.online.options import DROP, ClientOptions

    done: list[int] = []
    outbox = Outbox(ClientOptions(queue_bytes=100, policy=DROP), lambda _: None, lambda: None)
    for i in range(6):
        outbox.offer({"i": i}, [b"x" * 15], lambda i=i: done.append(i))
    while outbox.next():
        pass
    outbox.rewind(1)
    assert not outbox.acknowledge(99)
    outbox.acknowledge(2, {2: "no"})
    outbox.give_up()
    assert sorted(done) == list(range(6))
    counts = outbox.counts(0)
    assert counts.offered == 6 == counts.acknowledged + counts.refused + counts.dropped + counts.lost
