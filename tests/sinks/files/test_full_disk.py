"""A full disk, or the limit of the size of a file: the sink says the cause, how much is free and what to do; the run says which sink lost
how many steps and alerts, and no command takes the rest for the whole."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from frames_of_lists import frame_of

from msprobe_engine.cli.main import main
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import CsvSettings, JsonLinesSettings, MonitorSettings, SqliteSettings, TensorBoardSettings
from msprobe_engine.formats.monitor.losses import BYTES, FILE, Kept, Loss, LossFile, read_losses
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink
from msprobe_engine.probe.sinks.sqlite import SqliteSink
from msprobe_engine.probe.sinks.tensorboard import TensorBoardSink
from msprobe_engine.probe.writer import Writer

FILES: dict[str, Callable[[Path], Sink]] = {
    "csv": lambda root: CsvSink(CsvSettings(), MonitorSettings(), output_dir=root, rank=0),
    "jsonl": lambda root: JsonLinesSink(JsonLinesSettings(), None, output_dir=root, rank=0),
    "sqlite": lambda root: SqliteSink(SqliteSettings(), None, output_dir=root, rank=0),
    "tensorboard": lambda root: TensorBoardSink(TensorBoardSettings(), output_dir=root, rank=0),
}
MOST_STEPS = 5000
SMALL_FRAME = {f"layers.{i}.weight": [1.0, 2.0] for i in range(50)}


@contextmanager
def file_limit(most: int) -> Iterator[None]:
    """Python would keep what it compiles of a module that is imported meanwhile, cut off, for all processes after this one."""
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled


def error_of(make: Callable[[Path], Sink], root: Path) -> str:
    """What a sink says when it can write no more."""
    sink = None
    try:
        sink = make(root)
        for step in range(MOST_STEPS):
            sink.write(frame_of(SMALL_FRAME, step=step, rank=0), [])
            sink.flush()
    except SinkError as error:
        return str(error)
    finally:
        if sink is not None:
            sink.close()
    return ""


@pytest.mark.parametrize("taken", [0, 1000 << 10], ids=["filled by the run", "full before"])
@pytest.mark.parametrize("name", FILES)
def test_full_disk(name: str, taken: int, small: Path) -> None:
    (small / "others").write_bytes(bytes(taken))
    said = error_of(FILES[name], small / "out")
    assert str(small / "out") in said
    assert "the disk is full (0." in said
    assert f"of 1.0 MiB are free at {small}" in said
    assert "free some space there or name another place" in said
    assert "remove" not in said


@pytest.mark.parametrize("most", [4096, 40_000, 400_000])
@pytest.mark.parametrize("name", FILES)
def test_limit_of_the_size_of_a_file(name: str, most: int, tmp_path: Path) -> None:
    with file_limit(most):
        said = error_of(FILES[name], tmp_path / "out")
    assert str(tmp_path / "out") in said
    assert f"a file of this process may have {most:,} bytes and no more" in said
    assert "ulimit -f" in said
    assert "free some space" not in said
    assert "remove" not in said


SINKS: dict[str, Callable[[Path], Sink]] = {
    "csv": lambda root: CsvSink(CsvSettings(), MonitorSettings(), output_dir=root, rank=0),
    "jsonl": lambda root: JsonLinesSink(JsonLinesSettings(), MonitorSettings(), output_dir=root, rank=0),
    "sqlite": lambda root: SqliteSink(SqliteSettings(), MonitorSettings(), output_dir=root, rank=0),
    "tensorboard": lambda root: TensorBoardSink(TensorBoardSettings(), output_dir=root, rank=0),
}
READ = ("csv", "jsonl", "sqlite")
"""Sinks whose files the commands read."""
FRAME = {f"layers.{i}.weight": [1.0, 2.0] for i in range(200)}
STEPS = 64


def alert(step: int) -> Alert:
    """One that is too long for what is left of a page."""
    return Alert(
        step=step, rank=0, rule="nan_inf", severity="critical", kind="loss", name="loss", value=1.0, expected="", message="odd " * 5000
    )


def write(root: Path, names: list[str], steps: int, alerts: Callable[[int], bool] = lambda _: False) -> dict[str, int]:
    """Run sinks behind a writer; what each has lost."""
    writer = Writer([SINKS[name](root) for name in names], Faults(strict=False))
    with closing(writer):
        for step in range(steps):
            frame = replace(frame_of(FRAME, step=step, rank=0), scalars={"loss": 1.0})
            writer.submit(frame, [alert(step)] if alerts(step) else [])
            if step % 32 == 31:
                writer.flush()
    return dict(writer.lost)


@pytest.mark.fast_cells("csv")
@pytest.mark.parametrize("name", READ)
def test_a_full_disk(name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that was there from the start has the counts, though nothing new finds room any more."""
    (small / "others").write_bytes(bytes(700 << 10))
    lost = write(small / "out", [name, "tensorboard"], STEPS)
    assert set(lost) == {name, "tensorboard"}
    for file in (small / "out").rglob("*losses.json"):
        kept = read_losses(file)
        assert kept is not None
        assert {sink: loss.steps for sink, loss in kept.lost.items()} == lost
        assert all(loss.last == STEPS - 1 for loss in kept.lost.values())
    assert main(["monitor", "analyze", str(small / "out"), "-o", str(tmp_path)]) == 3
    out, said = capsys.readouterr()
    assert "No alerts in what is here" in out
    for sink, count in lost.items():
        assert f"sink {sink} of rank 0 has lost {count} steps" in said
    assert main(["monitor", "learn", str(small / "out"), "-o", str(tmp_path / "bands.json")]) in (2, 3)


@pytest.mark.parametrize("name", READ)
def test_alerts_that_are_lost(name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An alert of a step that was lost is counted, so the run is not called one without alerts."""
    (small / "others").write_bytes(bytes(700 << 10))
    write(small / "out", [name], STEPS, alerts=lambda step: step == STEPS - 1)
    assert main(["monitor", "analyze", str(small / "out"), "-o", str(tmp_path)]) == 3
    assert "with 1 alerts" in capsys.readouterr().err


@pytest.mark.parametrize("name", READ)
def test_alerts_that_were_taken_away(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alerts are counted beside the files, and the count goes on when a run goes on: a file without them is told."""
    write(tmp_path, [name], 3, alerts=lambda step: step == 1)
    assert main(["monitor", "analyze", str(tmp_path)]) == 1
    if name == "csv":
        next(tmp_path.rglob("alerts.jsonl")).write_text("")
    elif name == "jsonl":
        file = next(tmp_path.rglob("rank0.jsonl"))
        file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if '"alerts":[' not in line))
    else:
        from msprobe_engine.formats.monitor.trend_db import TrendDatabase

        db = TrendDatabase(next(tmp_path.rglob("*.trend.db")))
        db._db.execute("DELETE FROM alerts")
        db.close()
    capsys.readouterr()
    assert main(["monitor", "analyze", str(tmp_path)]) == 3
    assert "0 alerts" in capsys.readouterr().err


@pytest.mark.parametrize("name", READ)
def test_a_run_without_a_step(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed before its first step: not a run without alerts."""
    SINKS[name](tmp_path)  # and nothing more
    assert main(["monitor", "analyze", str(tmp_path)]) == 3
    assert "no step is there" in capsys.readouterr().err


def test_a_run_that_lost_nothing(tmp_path: Path) -> None:
    assert write(tmp_path, list(SINKS), 3) == {}
    assert [read_losses(file) for file in tmp_path.rglob("*losses.json")] == 4 * [Kept(0, {})]
    assert main(["monitor", "analyze", str(tmp_path)]) == 0


def test_counts_go_on(tmp_path: Path) -> None:
    """A file that is opened again keeps what it said."""
    for first in (5, 90):
        file = LossFile(tmp_path / FILE)
        file.count_alerts(2)
        file.write_losses({"csv": Loss(3, first, first + 4, 1)})
        file.close()
    assert read_losses(tmp_path / FILE) == Kept(4, {"csv": Loss(6, 5, 94, 2)})
    assert (tmp_path / FILE).stat().st_size == BYTES
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("content", [b"", b"[]", b'{"lost": 3}', b'{"alerts": 1, "lost": {"csv": {}}}', b"x" * (BYTES + 1)])
def test_a_damaged_file(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be read is said, and the run is not called whole."""
    write(tmp_path, ["csv"], 3)
    file = next(tmp_path.rglob(FILE))
    file.write_bytes(content)
    assert main(["monitor", "analyze", str(tmp_path)]) == 3
    assert f"{file}: cannot be read" in capsys.readouterr().err


def test_frames_that_were_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that hangs longer than the queue is: what was dropped is told when it goes on."""
    monkeypatch.setattr("msprobe_engine.probe.writer.PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("msprobe_engine.probe.writer.QUEUE_LENGTH", 1)
    sink = SINKS["csv"](tmp_path)
    write_now = sink.write
    monkeypatch.setattr(sink, "write", lambda frame, alerts: (time.sleep(0.3), write_now(frame, alerts)))
    writer = Writer([sink], Faults(strict=False))
    with closing(writer):
        for step in range(8):
            writer.submit(frame_of(FRAME, step=step, rank=0), [])
    kept = read_losses(next(tmp_path.rglob(FILE)))
    assert kept is not None
    assert kept.lost["csv"].steps == writer.lost["writer queue"] > 0


@pytest.mark.slow
def test_what_learning_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bands of a run that lost steps are made, and what they were not learned from is named."""
    write(tmp_path / "run", ["csv"], STEPS)
    words = ["monitor", "learn", str(tmp_path / "run"), "-o", str(tmp_path / "bands.json")]
    assert main(words) == 0
    LossFile(next(tmp_path.rglob(FILE))).write_losses({"csv": Loss(7, 60, 66, 0)})
    capsys.readouterr()
    assert main(words) == 3
    assert "sink csv of rank 0 has lost 7 steps, or parts of them (from step 60 to step 66)" in capsys.readouterr().err
