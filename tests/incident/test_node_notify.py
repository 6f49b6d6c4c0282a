"""Events in a large job: one rank of a node asks the store, the others read what it heard, and nobody waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.probe.incident import node_notify
from msprobe_engine.probe.incident.node_notify import NodeNotifier


class Counted:
    """A store that counts what it is asked; each answer takes `seconds`."""

    def __init__(self, store: Any, seconds: float = 0.0) -> None:
        self.store, self.seconds, self.asked = store, seconds, 0

    def __getattr__(self, name: str) -> Any:
        def ask(*words: Any) -> Any:
            self.asked += 1
            time.sleep(self.seconds)
            return getattr(self.store, name)(*words)

        return ask


def _settle(*notifiers: NodeNotifier) -> None:
    """Until what the ranks have asked is answered: a step of a training takes longer."""
    for notifier in notifiers:
        if notifier._pending is not None:
            assert notifier._pending.wait(10)


def _node(store: Any, name: str = "a", ranks: int = 4, watched: Any = None) -> list[NodeNotifier]:
    made = [NodeNotifier(store, name, first=rank == 0, watched=watched) for rank in range(ranks)]
    for notifier in made:  # the first rank has made the file before the others look for it
        _settle(notifier)
        notifier.poll()
        _settle(notifier)
    return made


def test_an_event_reaches_every_rank_of_every_node_once_two_steps_later(store: Any) -> None:
    """It is announced at the end of step k; each rank has it when it ends step k + 2, so that all capture step k + 3."""
    ranks = [*_node(store, "a"), *_node(store, "b")]
    ranks[5].announce({"id": "x"})
    _settle(ranks[5])
    seen: list[list[dict[str, Any]]] = [[] for _ in ranks]
    for _ in range(2):
        for heard, notifier in zip(seen, ranks):
            heard += notifier.poll()
        _settle(*ranks)
    assert seen == [[{"id": "x"}]] * len(ranks)
    assert ranks[0].lead_steps == 3
    assert all(notifier.poll() == [] for notifier in ranks)
    for notifier in ranks:
        notifier.close()


@pytest.fixture
def server() -> Any:
    """A store as a job has it, with a connection for each that asks."""
    torch = pytest.importorskip("torch")
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_nothing_is_asked_until_something_happens(server: Any) -> None:
    """The first rank of each node waits on a connection of its own; an event comes without a question, and every rank has it once."""
    counted = [Counted(server), Counted(server)]
    ranks = [*_node(counted[0], "a", 8, server.clone()), *_node(counted[1], "b", 8, server.clone())]
    asked = [store.asked for store in counted]
    for _ in range(20):
        assert [notifier.poll() for notifier in ranks] == [[]] * 16
    assert [store.asked for store in counted] == asked
    for name in ("x", "y"):
        ranks[11].announce({"id": name})
        heard: list[list[dict[str, Any]]] = [[] for _ in ranks]
        until = time.monotonic() + 60
        while not all(heard) and time.monotonic() < until:
            time.sleep(0.01)
            for seen, notifier in zip(heard, ranks):
                seen += notifier.poll()
        assert heard == [[{"id": name}]] * 16
    begin = time.monotonic()
    for notifier in ranks:
        notifier.close()
    assert time.monotonic() - begin < 5, "a thread that waits is woken"
    assert not any(notifier._watcher is not None and notifier._watcher.is_alive() for notifier in ranks)


def test_an_event_whose_rank_died_before_it_woke_the_others_is_heard_later(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = _node(server, ranks=1, watched=server.clone())
    server.set("msprobe/incident/1", '{"id": "x"}')
    server.add("msprobe/incident/count", 1)
    assert first.poll() == []
    monkeypatch.setattr(node_notify, "_LOOKS", 0.0)
    first.poll()
    _settle(first)
    assert first.poll() == [{"id": "x"}]
    first.announce({"id": "y"})
    until = time.monotonic() + 60
    while not (heard := first.poll()) and time.monotonic() < until:
        time.sleep(0.01)
    assert heard == [{"id": "y"}]
    first.close()


def test_only_the_first_rank_of_a_node_asks_step_by_step(store: Any) -> None:
    counted = Counted(store)
    ranks = _node(counted, ranks=8)
    begun = counted.asked
    for _ in range(5):
        for notifier in ranks:
            notifier.poll()
        _settle(*ranks)
    assert counted.asked - begun == 5, "one request for each step of a node"
    for notifier in ranks:
        notifier.close()


def test_nobody_waits_for_a_slow_store(store: Any) -> None:
    ranks = _node(store)
    for notifier in ranks:
        notifier._store = Counted(store, seconds=2.0)
    begin = time.perf_counter()
    for notifier in ranks:
        notifier.poll()
    assert time.perf_counter() - begin < 1.8
    _settle(*ranks)
    for notifier in ranks:
        notifier.close()


def test_a_rank_that_shares_no_memory_with_the_first_asks_itself(store: Any) -> None:
    """A container of its own: it sees what is announced from the start of the first rank on."""
    first = NodeNotifier(store, "a", first=True)
    _settle(first)
    count = int(store.add("msprobe/incident/count", 0))
    store.set("msprobe/incident/node/a", f"{count} /nowhere/there")
    apart = NodeNotifier(store, "a", first=False)
    _settle(apart)
    apart.poll()
    _settle(apart)
    first.announce({"id": "x"})
    _settle(first)
    heard = []
    for _ in range(2):
        heard += apart.poll()
        _settle(apart)
    assert heard + apart.poll() == [{"id": "x"}]
    for notifier in (first, apart):
        notifier.close()


def test_events_of_an_earlier_probe_are_not_reported(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its file is gone with it."""
    monkeypatch.setattr(node_notify, "_SHARED_MEMORY", tmp_path)
    earlier = _node(store)
    earlier[0].announce({"id": "old"})
    _settle(earlier[0])
    for _ in range(2):
        for notifier in earlier:
            notifier.poll()
        _settle(*earlier)
    for notifier in reversed(earlier):
        notifier.close()
    assert list(tmp_path.iterdir()) == []
    later = _node(store)
    for _ in range(2):
        assert [notifier.poll() for notifier in later] == [[]] * len(later)
        _settle(*later)
    later[3].announce({"id": "new"})
    _settle(later[3])
    heard: list[dict[str, Any]] = []
    for _ in range(2):
        for notifier in later:
            heard += notifier.poll()
        _settle(*later)
    assert heard == [{"id": "new"}] * len(later)
    for notifier in later:
        notifier.close()


def test_a_file_of_somebody_else_is_not_read(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can write into shared memory says nothing to the training: the rank asks the store itself."""
    other = tmp_path / "other.events"
    other.write_text('{"id": "planted"}\n')
    store.set("msprobe/incident/node/a", f"0 {other}")
    monkeypatch.setattr(node_notify.os, "getuid", lambda: -7)
    notifier = NodeNotifier(store, "a", first=False)
    _settle(notifier)
    assert notifier.poll() == []
    _settle(notifier)
    assert notifier.poll() == []
    notifier.close()
