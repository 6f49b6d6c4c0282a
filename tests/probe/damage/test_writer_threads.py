"""The writer's threads: bounded waiting, forks, a sink that fails, a thread that dies; the same for the monitor's queue and the dump's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Frame
from msprobe_engine.core.statistics import rows
from msprobe_engine.probe import writer
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.writer import Writer


class FileSink(Sink):
    """Writes steps to a file; `gate` holds it back, steps in `bad` fail."""

    name = "test"

    def __init__(self, path: Path, bad: Sequence[int] = (), gate: threading.Event | None = None) -> None:
        self.path, self.bad, self.gate = path, bad, gate
        self.closed = False

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:  # noqa: ARG002 - the protocol's signature
        if self.gate is not None:
            self.gate.wait(20)
        if frame.step in self.bad:
            raise OSError("no room")
        with open(self.path, "a") as file:
            file.write(f"{frame.step}\n")

    def close(self) -> None:
        self.closed = True


def frame(step: int) -> Frame:
    return Frame(step=step, rank=0, rows=rows.empty(0))


class Heard(Faults):
    """Keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def fail(self, part: str, error: BaseException, *, disable: bool = True, hint: str = "") -> None:
        self.said.append(f"{part}: {error} ({hint})")
        super().fail(part, error, disable=disable, hint=hint)


QUEUES = {"sinks": "writer queue", "dump_sinks": "dump queue"}
each_queue = pytest.mark.parametrize("kind", QUEUES)


def make(kind: str, sinks: Sequence[Sink], faults: Faults) -> Writer:
    """A writer with these sinks in one of its queues."""
    made = Writer([], faults)
    getattr(made, kind).extend(sinks)
    return made


@each_queue
def test_a_failing_sink_loses_its_frames_only(tmp_path: Path, kind: str) -> None:
    """A sink that fails in some steps loses these, which is counted; other sinks and steps do not notice."""
    one, two = FileSink(tmp_path / "one", bad=(1, 3)), FileSink(tmp_path / "two")
    faults = Faults()
    under_test = make(kind, [one, two], faults)
    for step in range(5):
        under_test.submit(frame(step), [])
    under_test.close()
    assert (tmp_path / "one").read_text().split() == ["0", "2", "4"]
    assert (tmp_path / "two").read_text().split() == ["0", "1", "2", "3", "4"]
    assert under_test.lost == {"test": 2}
    assert one.closed
    assert faults.counts == {"sink test": 2}
    assert faults.is_enabled("sink test")


@each_queue
def test_hanging_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A sink that hangs holds neither the training nor the end of the run for longer than the bounds; what is dropped is counted, and
    the other queue's sink gets every frame."""
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(writer, "QUEUE_LENGTH", 4)
    gate = threading.Event()
    under_test = make(kind, [FileSink(tmp_path / "hangs", gate=gate)], Faults())
    (other,) = set(QUEUES) - {kind}
    written = threading.Semaphore(0)
    works = FileSink(tmp_path / "works")
    monkeypatch.setattr(works, "write", lambda *_: written.release())
    getattr(under_test, other).append(works)
    started = time.monotonic()
    for step in range(10):
        under_test.submit(frame(step), [])
        assert written.acquire(timeout=240)
    assert set(under_test.lost) == {QUEUES[kind]}
    assert under_test.lost[QUEUES[kind]] >= 5
    under_test.close()  # its bound is short here, so that on a busy machine the other queue may miss it: only the time is checked
    assert time.monotonic() - started < 10
    gate.set()


@pytest.mark.slow
def test_full_queues_hold_the_training_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both queues hang, a step waits as long as for one of them."""
    monkeypatch.setattr(writer, "QUEUE_LENGTH", 1)
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.1)
    gate = threading.Event()
    under_test = Writer([FileSink(tmp_path / "one", gate=gate)], Faults())
    under_test.dump_sinks.append(FileSink(tmp_path / "two", gate=gate))
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.05)
    for step in range(3):
        under_test.submit(frame(step), [])
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 4.0)
    before = dict(under_test.lost)
    started = time.monotonic()
    under_test.submit(frame(3), [])
    assert 4.0 <= time.monotonic() - started < 7.0
    assert under_test.lost == {name: count + 1 for name, count in before.items()}
    assert len(before) == 2
    gate.set()
    under_test.close()


@each_queue
def test_strict_error_reaches_the_training(tmp_path: Path, kind: str) -> None:
    """With strict settings the error of a sink is raised at the next call on the training thread."""
    under_test = make(kind, [FileSink(tmp_path / "steps", bad=(0,))], Faults(strict=True))
    under_test.submit(frame(0), [])
    under_test.flush()
    with pytest.raises(OSError, match="no room"):
        under_test.submit(frame(1), [])


def test_forked_child_writes_with_its_own_threads(tmp_path: Path) -> None:
    """In a forked child the writer starts threads of its own instead of waiting for the parent's."""
    under_test = Writer([FileSink(tmp_path / "monitor")], Faults())
    under_test.dump_sinks.append(FileSink(tmp_path / "dump"))
    under_test.submit(frame(0), [])
    under_test.flush()
    child = os.fork()
    if child == 0:
        try:
            under_test.flush()
            under_test.submit(frame(1), [])
            under_test.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    under_test.submit(frame(2), [])
    under_test.close()
    for name in ("monitor", "dump"):
        assert (tmp_path / name).read_text().split() == ["0", "1", "2"]


@each_queue
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_died_is_replaced(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink may end its thread (a library that calls sys.exit): that frame is lost, which is said and counted, and the next ones are
    written; the training hears nothing of it. Who waits for a thread that dies is told how long he has waited."""
    gate = threading.Event()
    sink = FileSink(tmp_path / "steps", gate=gate)
    write = sink.write

    def end_thread(given: Frame, alerts: Sequence[Alert]) -> None:
        write(given, alerts)
        if given.step == 1:
            raise SystemExit(1)

    monkeypatch.setattr(sink, "write", end_thread)
    faults = Heard()
    under_test = make(kind, [sink], faults)
    under_test.submit(frame(0), [])
    under_test.submit(frame(1), [])
    threading.Timer(0.2, gate.set).start()  # while `flush` waits
    under_test.flush()
    (said,) = faults.said
    assert float(said.split("within ")[1].split(" s")[0]) < writer.CLOSE_SECONDS / 2, said
    assert "has ended" in said
    for step in (2, 3):
        under_test.submit(frame(step), [])
    under_test.close()
    assert (tmp_path / "steps").read_text().split() == ["0", "1", "2", "3"]
    assert under_test.lost == {QUEUES[kind]: 2}  # the wait, and the frame
    assert "another one goes on" in faults.said[1]
