"""Events between ranks, over a real torch store and over a directory."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.probe.incident.notify import MOST_NAMES, DirectoryNotifier, Notifier, SilentNotifier, StoreNotifier


def test_store_reaches_every_rank_once(store: Any) -> None:
    """An event reaches every rank at its next poll, once, and the announcing rank too; not one that is made later: it would be of an
    earlier probe of the same job."""
    a, b = StoreNotifier(store, patience=2), StoreNotifier(store, patience=2)
    assert isinstance(a, Notifier)
    assert b.poll() == []
    a.announce({"id": "x"})
    assert b.poll() == [{"id": "x"}]
    assert b.poll() == []
    assert a.poll() == [{"id": "x"}]
    late = StoreNotifier(store, patience=2)
    assert late.poll() == []
    a.announce({"id": "y"})
    assert late.poll() == [{"id": "y"}]
    for notifier in (a, b, late):
        notifier.close()


def test_store_counter_before_value(store: Any) -> None:
    """A rank that sees the counter before the value comes back for it and does not wait in get."""
    reader = StoreNotifier(store, patience=60)
    store.add("msprobe/incident/count", 1)
    start = time.monotonic()
    assert reader.poll() == []
    assert time.monotonic() - start < 30
    store.set("msprobe/incident/1", '{"id": "y"}')
    assert reader.poll() == [{"id": "y"}]
    reader.close()


class _Hanging:
    """A store whose server does not answer."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls = 0

    def add(self, _key: str, _amount: int) -> int:
        self.calls += 1
        self.release.wait(30)
        return 0

    def set(self, _key: str, _value: str) -> None: ...

    def get(self, _key: str) -> bytes:
        return b""

    def check(self, _keys: list[str]) -> bool:
        return False


def test_a_hanging_store_costs_one_patience() -> None:
    """A store that does not answer holds the training once for `patience`, and never again while it hangs."""
    store = _Hanging()
    notifier = StoreNotifier(store, patience=0.05)
    start = time.monotonic()
    for _ in range(200):
        assert notifier.poll() == []
    assert time.monotonic() - start < 8
    assert store.calls == 1
    store.release.set()
    notifier.close()


def test_a_failing_store_is_given_up(caplog: Any) -> None:
    """After three errors in a row the store is left alone and that is said once."""

    class Broken(_Hanging):
        def add(self, _key: str, _amount: int) -> int:
            self.calls += 1
            raise ConnectionError("gone")

    store = Broken()
    notifier = StoreNotifier(store, patience=1)
    for _ in range(10):
        assert notifier.poll() == []
    assert store.calls == 3
    assert caplog.text.count("no longer announced") == 1
    notifier.close()


def test_foreign_text_is_ignored(store: Any) -> None:
    """What is no JSON object, or too long, is not delivered."""
    notifier = StoreNotifier(store, patience=2)
    for n, text in enumerate(["[1]", "{", "x" * 20_000, '{"id": "z"}'], 1):
        store.add("msprobe/incident/count", 1)
        store.set(f"msprobe/incident/{n}", text)
    assert notifier.poll() == [{"id": "z"}]
    notifier.close()


def test_directory(tmp_path: Path) -> None:
    """A shared directory carries events; those of an earlier run are not reported."""
    old = DirectoryNotifier(tmp_path / "events", patience=2)
    old.announce({"id": "old"})
    a, b = DirectoryNotifier(tmp_path / "events", patience=2), DirectoryNotifier(tmp_path / "events", patience=2)
    assert a.poll() == b.poll() == []
    a.announce({"id": "new"})
    b.announce({"id": "too"})
    assert sorted(e["id"] for e in b.poll()) == ["new", "too"]
    assert sorted(e["id"] for e in a.poll()) == ["new", "too"]
    assert a.poll() == []
    assert all(p.stat().st_mode & 0o777 == 0o640 for p in (tmp_path / "events").iterdir())
    for notifier in (old, a, b):
        notifier.close()


def test_ranks_that_announce_the_same_event_make_one_file(tmp_path: Path) -> None:
    """A NaN that a collective has spread is announced by every rank: each hears of it once, and no rank lists more names than there are
    events. The same event of a later run in the directory is heard, too. A directory with more names than a run can make is left
    alone, and the training goes on."""
    for run in range(2):
        ranks = [DirectoryNotifier(tmp_path, patience=2) for _ in range(20)]
        for rank, notifier in enumerate(ranks):
            notifier.announce({"id": "step5-nan_inf", "rank": rank})
        assert [[event["id"] for event in notifier.poll()] for notifier in ranks[:2]] == [["step5-nan_inf"]] * 2
        assert len(list(tmp_path.iterdir())) == run + 1
        for notifier in ranks:
            notifier.close()
    for number in range(MOST_NAMES + 1):
        (tmp_path / f"event-{number}").touch()
    full = DirectoryNotifier(tmp_path, patience=2)
    assert "empty it" in full.failed
    full.announce({"id": "step6-nan_inf"})
    assert full.poll() == []


def test_silent() -> None:
    """One process tells nobody and hears nothing."""
    notifier = SilentNotifier()
    notifier.announce({"id": "x"})
    assert notifier.poll() == []


ENDING = """
import os, signal, sys, time
import torch.distributed as dist
from msprobe_engine.probe.incident.notify import StoreNotifier

closed = os.pipe()
host = os.getpid()
if not os.fork():  # lets the host of the store go on, a moment after the notifier was closed
    os.close(closed[1])
    os.read(closed[0], 1)
    time.sleep(0.3)
    os.kill(host, signal.SIGCONT)
    os._exit(0)
client = os.fork()
os.close(closed[0])
if client:
    os.close(closed[1])
    store = dist.FileStore(sys.argv[1] + "port", 2)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("port", str(server.port))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(client, 0)[1]))


class Last:
    def __del__(self, sleep=time.sleep):  # the interpreter is ending, and other threads may have its lock
        sleep(1.5)


last = Last()
port = int(dist.FileStore(sys.argv[1] + "port", 2).get("port"))
notifier = StoreNotifier(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
notifier.poll()
os.kill(host, signal.SIGSTOP)
notifier.poll()
notifier.close()
os.write(closed[1], b"1")
"""


@pytest.mark.slow
def test_a_store_that_answers_while_the_process_ends(tmp_path: Path) -> None:
    """The host of the store has stopped when the notifier is closed and goes on while the process ends: exit code 0, nothing said."""
    done = subprocess.run([sys.executable, "-c", ENDING, tmp_path / "place"], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_announcement_that_fails_is_said_once(caplog: Any) -> None:
    """The other ranks do not capture then; whoever looks for their files finds out why."""

    class Full:
        """Answers questions and takes nothing."""

        def add(self, key: str, amount: int) -> int:  # noqa: ARG002
            return 0

        def check(self, keys: list[str]) -> bool:  # noqa: ARG002
            return False

        def get(self, key: str) -> bytes:
            raise KeyError(key)

        def set(self, key: str, value: str) -> None:  # noqa: ARG002
            raise OSError("the store is full")

    notifier = StoreNotifier(Full(), patience=5.0)
    for step in range(2):
        notifier.announce({"step": step})
        notifier.poll()
    notifier.close()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "OSError: the store is full" in line
