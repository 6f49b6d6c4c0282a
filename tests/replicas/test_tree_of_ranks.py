"""Ranks as a tree: who speaks to whom, what becomes of steps that not all have, and who is let in."""

from __future__ import annotations

import errno
import os
import random
import resource
import socket
import threading
import time
from collections import deque

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks

from msprobe_integrations.common.ranks import connections, links
from msprobe_integrations.common.ranks.exchange_thread import _check_files
from msprobe_integrations.common.ranks.step_exchange import StepExchange
from msprobe_integrations.common.ranks.tree import SELF, Kind, Lane, Message, shape_of
from msprobe_integrations.torch.ranks.merge import RowExchange

pytestmark = pytest.mark.framework


@pytest.mark.parametrize(("ranks", "deepest"), [(range(3), 1), (range(64), 4), (range(0, 640, 8), 4), (range(10_240), 9)])
@pytest.mark.fast_cells("ranks0-1", "ranks1-4", "ranks2-4")
def test_neighbours_are_few_and_near(ranks: range, deepest: int) -> None:
    """Every rank hangs below the first of the group, over few ranks; it has at most 7 neighbours, whatever the size of the group, and of
    each node one rank at most speaks to ranks of other nodes that are above it."""
    parents = {place: shape_of(ranks, place).parent for place in range(0, len(ranks), max(1, len(ranks) // 640))}
    for place, parent in parents.items():
        depth = 0
        while parent >= 0:
            assert ranks[parent] // 8 == ranks[place] // 8 or ranks[place] // 8 not in {ranks[p] // 8 for p in range(place)}
            place, parent, depth = parent, shape_of(ranks, parent).parent, depth + 1
        assert depth <= deepest
    assert all(len(shape_of(ranks, place).children) <= 6 for place in parents)


class _Mesh:
    """The lanes of all ranks of a group, with messages that take any time."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.lanes = [Lane(shape_of(range(ranks), place), np.maximum) for place in range(ranks)]
        self.answers: list[list[tuple[Kind, int, list[int]]]] = [[] for _ in range(ranks)]
        self._wires: dict[tuple[int, int], deque[Message]] = {}
        self._random = random.Random(seed)

    def send(self, place: int, number: int, identity: int, word: int) -> None:
        message = Message(Kind.UP, 0, number, identity, np.array([word]))
        self._spread(place, self.lanes[place].receive(SELF, message))

    def settle(self) -> None:
        while busy := [wire for wire, messages in self._wires.items() if messages]:
            source, place = self._random.choice(busy)
            self._spread(place, self.lanes[place].receive(source, self._wires[source, place].popleft()))

    def _spread(self, place: int, sent: list[tuple[int, Message]]) -> None:
        for to, message in sent:
            if to == SELF:
                self.answers[place].append((message.kind, message.number, message.words.tolist()))
            else:
                self._wires.setdefault((place, to), deque()).append(message)


@pytest.mark.parametrize("seed", range(20))
def test_what_all_have_is_answered_alike(seed: int) -> None:
    """Of each step all ranks get one answer: the same numbers where all have it, and that it is left out where one has not, or has
    something else; in the order of the steps as far as they are answered, however long messages take."""
    ranks, steps, chance = 40, 12, random.Random(seed)
    lacking = {(chance.randrange(ranks), step) for step in (3, 4, 8)}
    unlike = (chance.randrange(ranks), 6)
    mesh = _Mesh(ranks, seed)
    for step in range(steps):
        for place in chance.sample(range(ranks), ranks):
            if (place, step) not in lacking:
                mesh.send(place, step, 1 if (place, step) == unlike else 0, place + 100 * step)
    mesh.settle()
    for place, answers in enumerate(mesh.answers):
        told = {number: (kind, words) for kind, number, words in answers}
        assert sorted(told) == [step for step in range(steps) if (place, step) not in lacking]
        assert len(told) == len(answers)
        for step, (kind, words) in told.items():
            if step in (3, 4, 8):
                assert kind is Kind.MISSED
            elif step == 6:
                assert kind is Kind.UNLIKE
            else:
                assert (kind, words) == (Kind.ANSWER, [ranks - 1 + 100 * step])


def test_the_last_step_of_some_waits() -> None:
    """What one rank has not sent yet is no step that it lacks."""
    mesh = _Mesh(3, 0)
    for place in (0, 1):
        mesh.send(place, 1, 0, place)
    mesh.settle()
    assert mesh.answers == [[], [], []]
    mesh.send(2, 1, 0, 2)
    mesh.settle()
    assert mesh.answers == [[(Kind.ANSWER, 1, [2])]] * 3


def _crowded() -> tuple[str, float]:
    """The process may open hardly any more files than are open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, before[1]))
    said = ""
    try:
        _check_files(2, 1)
    except RuntimeError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, float(total)


def test_an_exchange_leaves_files_to_the_training() -> None:
    """A rank opens a connection to each neighbour. Where the limit of open files does not allow that, and some for the training, there is
    no exchange, and it says what to do."""
    for said, total in run_ranks(2, _crowded):
        assert "ulimit -n" in said
        assert total == 2.0


def _connect(port: int, data: bytes) -> bytes:
    """What a listener sends to somebody who sends `data`, until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(data)
        return sock.recv(16)


def test_strangers_are_sent_away() -> None:
    """Who does not know the secret, or says something else, gets no answer and no connection; nor does one who asks for a tree that has
    ended."""
    user = object()
    loop = connections.join_loop(user)
    secret, port, *_ = loop.address("").split(" ")
    key = b"k" * 20
    assert _connect(int(port), b"GET / HTTP/1.0\r\n\r\n".ljust(64)) == b""
    assert _connect(int(port), loop.hello(b"x" * 16, key, 1)) == b""
    loop.call(lambda: loop.end_links(key))
    assert _connect(int(port), loop.hello(bytes.fromhex(secret), key, 1)) == b""
    loop.users.discard(user)
    loop.call(lambda: None)
    loop.join(10)
    assert not loop.alive


def test_strangers_that_stay_take_no_files_from_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects and says nothing holds a small share of the files that the process may open, keeps no rank out, and does not keep
    the thread alive when the last exchange has ended."""
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (32, 32))
    user, adopted = object(), threading.Event()
    loop = connections.join_loop(user)
    secret, port, *_ = loop.address("").split(" ")
    key = b"s" * 20
    strangers = [socket.create_connection(("127.0.0.1", int(port)), timeout=10) for _ in range(40)]
    loop.call(lambda: links.Links(loop, key, 0, (1,), lambda *_: adopted.set(), lambda *_: None) and None)
    with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as sock:
        sock.sendall(loop.hello(bytes.fromhex(secret), key, 1) + connections.encode(Message(Kind.UP, 0, 1, 0)))
        assert adopted.wait(10)
        assert len(loop.connections) <= 32 // 8 + 1
    loop.users.discard(user)
    loop.call(lambda: None)
    loop.join(10)
    assert not loop.alive
    for each in strangers:
        each.close()


def test_a_connection_for_which_no_file_is_left_is_waited_for_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays ready to be accepted; the thread looks again later instead of without pause, and accepts it then."""
    monkeypatch.setattr(connections, "_FULL", 0.2)
    user = object()
    loop = connections.join_loop(user)
    _, port, *_ = loop.address("").split(" ")
    tries = 0
    accept = socket.socket.accept

    def full(sock: socket.socket) -> tuple[socket.socket, object]:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", full)
    begin = time.monotonic()
    assert _connect(int(port), b"GET / HTTP/1.0\r\n\r\n".ljust(64)) == b""
    assert tries == 3
    assert time.monotonic() - begin >= 0.4
    loop.users.discard(user)
    loop.call(lambda: None)
    loop.join(10)


def test_a_message_of_no_form_ends_its_connection() -> None:
    """What a neighbour sends is numbers of fixed form; anything else is taken for a neighbour that cannot be reached."""
    user, lost = object(), threading.Event()
    said: list[tuple[int, str]] = []
    loop = connections.join_loop(user)
    secret, port, *_ = loop.address("").split(" ")
    key = b"m" * 20

    def lose(place: int, why: str) -> None:
        said.append((place, why))
        lost.set()

    loop.call(lambda: links.Links(loop, key, 0, (1,), lambda *_: None, lose) and None)
    _connect(int(port), loop.hello(bytes.fromhex(secret), key, 1) + b"\xff" * 64)
    assert lost.wait(10)
    assert said[0][0] == 1
    assert "bytes" in said[0][1]
    loop.users.discard(user)
    loop.call(lambda: None)


def _sockets_and_threads() -> tuple[int, int, bool]:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    exchanges = [RowExchange(purpose=name) for name in ("one", "two", "three")]
    end = time.monotonic() + 30
    while not all(exchange.connected for exchange in exchanges) and time.monotonic() < end:
        time.sleep(0.01)
    dist.barrier()
    used = len(os.listdir("/proc/self/fd")) - before[0], threading.active_count() - before[1]
    connected = all(exchange.connected for exchange in exchanges)
    dist.barrier()
    for exchange in exchanges:
        exchange.close()
    return *used, connected


def test_files_and_threads_of_a_rank() -> None:
    """Three exchanges of 12 ranks: one thread in all, and at most 7 connections each beside what the thread itself needs."""
    for files, threads, connected in run_ranks(12, _sockets_and_threads, timeout=240):
        assert connected
        assert files <= 3 * 7 + 4
        assert threads == 1


class _StoreThatHangs:
    """Answers nothing."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def add(self, _key: str, _amount: int) -> int:
        self.over.wait(60)
        raise RuntimeError("the store is gone")

    set = get = check = add  # type: ignore[assignment]


def test_a_store_that_hangs_holds_nobody() -> None:
    """Who waits for the other ranks at the start goes on when the job's store does not answer, and hears why afterwards."""

    class Quiet(StepExchange):
        def _make_lanes(self) -> list[Lane]:
            return []

    store = _StoreThatHangs()
    exchange = Quiet(store, [0, 1], 0, "hanging", limit=2)
    began = time.monotonic()
    assert not exchange.meet(0.2)
    assert time.monotonic() < began + 30.0
    store.over.set()
    end = time.monotonic() + 60
    while not exchange.failed and time.monotonic() < end:
        time.sleep(0.01)
    assert exchange.failed == "the store is gone"
