"""The online path over a shared directory: whole files in order, nothing lost when it is full, nothing believed that lies there."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from online_ends import QUICK_CLIENT, QUICK_SERVER, Kept, until

from msprobe_engine.accuracy.online.connect import finish
from msprobe_engine.accuracy.online.directory import layout
from msprobe_engine.accuracy.online.directory.client import DirectoryClient
from msprobe_engine.accuracy.online.directory.server import DirectoryServer
from msprobe_engine.accuracy.online.events import LOST, Event
from msprobe_engine.accuracy.online.options import BLOCK, DROP
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.io.output_files import write_file

_SERVER = replace(QUICK_SERVER, gap_seconds=0.3)


@contextlib.contextmanager
def _serving(directory: Path, kept: Kept, **changes: Any) -> Iterator[DirectoryServer]:
    server = DirectoryServer(directory, kept, replace(_SERVER, **changes), kept.events.append, kept.last)
    try:
        yield server
    finally:
        server.close(2.0)


def _sending(directory: Path, events: list[Event], **changes: Any) -> DirectoryClient:
    return DirectoryClient(directory, replace(QUICK_CLIENT, **changes), events.append)


def _finished(kept: Kept, times: int = 1) -> bool:
    return until(lambda: kept.kinds().count("finished") >= times)


def test_messages_arrive_whole_once_and_in_order_and_the_directory_is_left_clean(tmp_path: Path) -> None:
    """Several ranks, with and without payload; names tell rank and step."""
    kept, events = Kept(), []
    clients = [_sending(tmp_path, events, rank=rank) for rank in (0, 3)]
    for i in range(50):
        for client in clients:
            assert client.send({"i": i, "step": i // 10}, [b"a" * (i * 1000), b"b"])
    assert until(lambda: all(c.counts().acknowledged == 50 for c in clients))
    listed = os.listdir(tmp_path / f"rank3-{clients[1].session}")  # the sign of life beside them is replaced now and then
    names = sorted(name for name in listed if name.endswith(".msg"))
    assert names[0] == "000000000001.step0.msg"
    assert names[49] == "000000000050.step4.msg"
    with _serving(tmp_path, kept) as server:
        for client in clients:
            assert client.close(60.0).acknowledged == 50
        assert _finished(kept, 2)
        assert sorted(s.peer.rank for s in server.sessions()) == [0, 3]
    for client in clients:
        assert kept.numbers(client.session) == list(range(50))
        assert kept.messages[client.session][2][2] == b"a" * 2000 + b"b"
    assert os.listdir(tmp_path) == [".msprobe-server"]


def test_a_server_that_is_closed_or_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """What its owner has is not handed over again, also when its file is still there."""
    kept, events = Kept(), []
    kept.delay = 0.002
    client = _sending(tmp_path, events)
    for i in range(100):
        client.send({"i": i}, [b"x" * 100])
    with _serving(tmp_path, kept):
        until(lambda: len(kept.numbers(client.session)) > 10)
    got = len(kept.numbers(client.session))
    assert 10 < got < 100
    folder = tmp_path / f"rank0-{client.session}"
    first_left = sorted(n for n in os.listdir(folder) if n.endswith(".msg"))[0]
    (folder / "000000000001.msg").write_bytes((folder / first_left).read_bytes())  # as if it had died before it removed it
    client.close(60.0)
    with _serving(tmp_path, kept):
        assert _finished(kept)
    assert kept.numbers(client.session) == list(range(100))


def test_only_one_server_reads_a_directory(tmp_path: Path) -> None:
    """A second one is told; a directory that is not there, too."""
    kept = Kept()
    with _serving(tmp_path, kept), pytest.raises(SettingsError, match="another server"):
        DirectoryServer(tmp_path, kept, _SERVER, kept.events.append)
    for end in (DirectoryClient, DirectoryServer):
        with pytest.raises(SettingsError, match="nfs_path"):
            end(
                tmp_path / "nowhere",
                *((kept,) if end is DirectoryServer else ()),
                _SERVER if end is DirectoryServer else QUICK_CLIENT,
                print,
            )  # type: ignore[arg-type, operator]


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "tiny"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_directory_loses_nothing_as_long_as_the_queue_has_room(tiny: Path) -> None:
    """It is said once, nothing half-written is seen, and everything comes through when the server has made room."""
    kept, events = Kept(), []
    client = _sending(tiny, events)
    for i in range(30):
        assert client.send({"i": i}, [b"x" * 100_000])
    assert until(lambda: "unreachable" in [e.kind for e in events])
    assert 5 < client.counts().acknowledged < 12
    assert not [n for n in os.listdir(tiny / f"rank0-{client.session}") if n.startswith(".")]
    with _serving(tiny, kept):
        assert client.close(60.0).acknowledged == 30
        assert _finished(kept)
    assert kept.numbers(client.session) == list(range(30))
    assert [e.kind for e in events if e.kind in ("unreachable", "recovered")][:2] == ["unreachable", "recovered"]


def test_a_full_directory_without_a_server_is_a_counted_loss(tiny: Path) -> None:
    """Policy drop: nobody waits, and the sums are right; what was written is whole."""
    kept, events = Kept(), []
    client = _sending(tiny, events, policy=DROP, queue_bytes=500_000)
    for i in range(40):
        client.send({"i": i}, [b"x" * 100_000])
        assert until(lambda i=i: client.counts().acknowledged > i or "unreachable" in [e.kind for e in events])
    counts = client.close(0.3)
    assert counts.dropped > 10
    assert counts.lost > 0
    assert counts.offered == 40 == counts.acknowledged + counts.dropped + counts.lost
    with _serving(tiny, kept, silence=0.5):
        assert until(lambda: len(kept.numbers(client.session)) == counts.acknowledged)
        assert until(lambda: {"finished", "gone"} & set(kept.kinds()))


def test_the_end_does_not_wait_for_a_directory_that_cannot_be_written(tiny: Path) -> None:
    """A full directory is no slow server: neither a send nor the end of the run waits for it as long as for one, and the reason is said."""
    events: list[Event] = []
    client = _sending(tiny, events, policy=BLOCK, longest_wait=60.0, queue_bytes=300_000)
    began = time.monotonic()
    for i in range(12):
        client.send({"i": i}, [b"x" * 100_000])
    counts = finish(client, 60.0, lambda: math.inf)
    took = time.monotonic() - began
    print(f"sends and end: {took:.1f} s")
    assert took < 30
    assert counts.lost
    assert counts.offered == counts.acknowledged + counts.dropped + counts.lost
    (lost,) = [event.message for event in events if event.kind == LOST]
    assert "No space left on device" in lost
    assert "messages are lost" in lost


def test_no_more_lies_there_than_allowed(tmp_path: Path) -> None:
    """``directory_bytes`` bounds what the server has not read, and is waited for."""
    kept, events = Kept(), []
    client = _sending(tmp_path, events, directory_bytes=50_000)
    for i in range(20):
        client.send({"i": i}, [b"x" * 10_000])
    assert until(lambda: any("is the server running" in e.message for e in events))
    assert client.counts().acknowledged == 4
    with _serving(tmp_path, kept):
        assert client.close(60.0).acknowledged == 20
        assert _finished(kept)


def test_what_is_no_message_is_set_aside_and_counted(tmp_path: Path) -> None:
    """Damaged, cut off, another's number, a link, a pipe, a directory, too large: none of them stops the others, or is followed."""
    kept, events = Kept(), []
    client = _sending(tmp_path, events)
    for i in range(10):
        client.send({"i": i}, [b"x" * 100])
    client.close(60.0)
    folder = tmp_path / f"rank0-{client.session}"
    path = lambda n: folder / layout.message_name(n, None)  # noqa: E731
    secret = tmp_path / "secret"
    secret.write_bytes(path(1).read_bytes())
    data = bytearray(path(2).read_bytes())
    data[-20] ^= 1
    path(2).write_bytes(data)
    path(3).write_bytes(path(3).read_bytes()[:-1])
    path(4).write_bytes(path(5).read_bytes())
    path(6).unlink()
    path(6).symlink_to(secret)
    path(7).unlink()
    os.mkfifo(path(7))
    path(8).unlink()
    path(8).mkdir()
    os.truncate(path(9), 50_000_000)
    (folder / "alive.json").write_text("[" * 100_000)
    (tmp_path / f"rank1-{'0' * 32}").symlink_to(folder)
    (tmp_path / "rank5-zz").mkdir()
    (folder / "000000000099.msg.txt").write_text("no")
    with _serving(tmp_path, kept, message_bytes=1_000_000) as server:
        assert _finished(kept)
        state = server.sessions()[0]
        assert len(server.sessions()) == 1
    assert kept.numbers(client.session) == [0, 4, 9]
    assert (state.received, state.refused, state.missing) == (3, 7, 0)
    assert len([n for n in os.listdir(folder) if n.endswith(".refused")]) == 7
    assert secret.exists()


def test_a_missing_message_is_waited_for_and_then_counted(tmp_path: Path) -> None:
    """A network file system may show names late; what never comes does not hold the rest up for ever."""
    kept, events = Kept(), []
    client = _sending(tmp_path, events)
    for i in range(10):
        client.send({"i": i}, [])
    client.close(60.0)
    folder = tmp_path / f"rank0-{client.session}"
    late = (folder / layout.message_name(3, None)).read_bytes()
    (folder / layout.message_name(3, None)).unlink()
    (folder / layout.message_name(8, None)).unlink()
    (folder / layout.message_name(10, None)).unlink()
    with _serving(tmp_path, kept, gap_seconds=0.8) as server:
        assert until(lambda: kept.numbers(client.session) == [0, 1])
        write_file(folder / layout.message_name(3, None), [late])
        assert _finished(kept)
        assert server.sessions()[0].missing == 2
    assert kept.numbers(client.session) == [0, 1, 2, 3, 4, 5, 6, 8]


def test_clocks_that_differ_change_nothing(tmp_path: Path) -> None:
    """Files from the future or from long ago live and die by their changes alone."""
    kept, events = Kept(), []
    client = _sending(tmp_path, events)
    folder = tmp_path / f"rank0-{client.session}"
    with _serving(tmp_path, kept):
        for i in range(12):
            client.send({"i": i}, [])
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    os.utime(folder / name, (0, 0) if i % 2 else (4e9, 4e9))
            time.sleep(0.1)
        assert "gone" not in kept.kinds()
        client.close(60.0)
        assert _finished(kept)
    assert kept.numbers(client.session) == list(range(12))


_TRAINING = """
import sys, time
sys.path[:0] = {here!r}
from test_shared_directory import *
from test_shared_directory import _sending
client = _sending(Path(sys.argv[1]), [])
print(client.session, flush=True)
i = 0
while True:
    client.send({{"i": i}}, [b"x" * 200_000])
    i += 1
    time.sleep(0.001)
"""


def test_a_killed_training_leaves_whole_messages_and_is_noticed(tmp_path: Path) -> None:
    """Signal 9 at any moment: what has a name is complete; the second training with this rank then has its turn."""
    kept, events = Kept(), []
    script = _TRAINING.format(here=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    session = process.stdout.readline().strip()
    with _serving(tmp_path, kept) as server:
        assert until(lambda: len(kept.numbers(session)) > 20)
        other = _sending(tmp_path, events)
        other.send({"i": 0}, [])
        assert until(lambda: "refused" in kept.kinds())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert until(lambda: "gone" in kept.kinds())
        numbers = kept.numbers(session)
        assert numbers == list(range(len(numbers)))
        assert server.sessions()[0].refused == 0
        assert until(lambda: kept.numbers(other.session) == [0])
        other.close(60.0)


def test_a_full_disk_at_the_server_keeps_the_files(tmp_path: Path) -> None:
    """What the handler cannot store now stays where it is."""
    kept, events = Kept(), []
    full = [True]
    kept.fail = lambda peer: OSError(28, "No space left on device") if full[0] and peer.sequence == 2 else None
    client = _sending(tmp_path, events)
    for i in range(5):
        client.send({"i": i}, [])
    with _serving(tmp_path, kept):
        client.close(60.0)
        assert until(lambda: "fault" in kept.kinds())
        assert kept.numbers(client.session) == [0]
        full[0] = False
        assert _finished(kept)
    assert kept.numbers(client.session) == [0, 1, 2, 3, 4]


def test_a_folder_that_is_removed_comes_back(tmp_path: Path) -> None:
    """Somebody cleans up: the training goes on, and what was not read is counted as missing."""
    import shutil

    kept, events = Kept(), []
    client = _sending(tmp_path, events)
    client.send({"i": 0}, [])
    assert until(lambda: client.counts().acknowledged == 1)
    shutil.rmtree(tmp_path / f"rank0-{client.session}")
    client.send({"i": 1}, [])
    with _serving(tmp_path, kept) as server:
        client.close(60.0)
        assert _finished(kept)
        assert server.sessions()[0].missing == 1
    assert kept.numbers(client.session) == [1]
