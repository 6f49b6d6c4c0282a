"""The writer thread: bounded waiting, forks, and a sink that fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from msprobe_engine import rows, writer
from msprobe_engine.guard import Faults
from msprobe_engine.records import Frame
from msprobe_engine.rules.base import Alert
from msprobe_engine.writer import Writer


class Sink:
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

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def frame(step: int) -> Frame:
    return Frame(step=step, rank=0, rows=rows.empty(0))


def test_a_failing_sink_loses_its_frames_only(tmp_path: Path) -> None:
    """A sink that fails in some steps loses these, which is counted; other sinks and steps do not notice."""
    one, two = Sink(tmp_path / "one", bad=(1, 3)), Sink(tmp_path / "two")
    faults = Faults()
    under_test = Writer([one, two], faults)
    for step in range(5):
        under_test.submit(frame(step), [])
    under_test.close()
    assert (tmp_path / "one").read_text().split() == ["0", "2", "4"]
    assert (tmp_path / "two").read_text().split() == ["0", "1", "2", "3", "4"]
    assert under_test.lost == {"test": 2}
    assert one.closed
    assert faults.counts == {"sink test": 2}
    assert faults.enabled("sink test")


def test_hanging_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink that hangs holds neither the training nor the end of the run for longer than the bounds; what is dropped is counted."""
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(writer, "QUEUE_LENGTH", 4)
    gate = threading.Event()
    under_test = Writer([Sink(tmp_path / "steps", gate=gate)], Faults())
    started = time.monotonic()
    for step in range(10):
        under_test.submit(frame(step), [])
    under_test.close()
    gate.set()
    assert time.monotonic() - started < 5
    assert under_test.lost["writer queue"] >= 5


def test_strict_error_reaches_the_training(tmp_path: Path) -> None:
    """With strict settings the error of a sink is raised at the next call on the training thread."""
    under_test = Writer([Sink(tmp_path / "steps", bad=(0,))], Faults(strict=True))
    under_test.submit(frame(0), [])
    under_test.flush()
    with pytest.raises(OSError, match="no room"):
        under_test.submit(frame(1), [])


def test_forked_child_writes_with_its_own_thread(tmp_path: Path) -> None:
    """In a forked child the writer starts a thread of its own instead of waiting for the parent's."""
    under_test = Writer([Sink(tmp_path / "steps")], Faults())
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
    assert (tmp_path / "steps").read_text().split() == ["0", "1", "2"]
