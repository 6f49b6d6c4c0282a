"""``sinks.max_gb``: the files of the monitor stay within a bound, and whoever reads them hears what is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.settings.schema import CsvSettings, JsonLinesSettings, MonitorSettings, SqliteSettings, TensorBoardSettings
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_engine.probe.sinks.sqlite import SqliteSink
from msprobe_engine.probe.sinks.tensorboard import TensorBoardSink
from msprobe_engine.probe.writer import Writer
from msprobe_engine.report.trends.collect import collect
from msprobe_engine.report.trends.sources.open_source import open_source

STEPS = 1200
MONITOR = MonitorSettings(ops=("norm", "max"))
SINKS: dict[str, Callable[[Path], Sink]] = {
    "csv": lambda root: CsvSink(CsvSettings(path=str(root)), MONITOR, output_dir=root, rank=0),
    "jsonl": lambda root: JsonLinesSink(JsonLinesSettings(ops=MONITOR.ops), MONITOR, output_dir=root, rank=0),
    "sqlite": lambda root: SqliteSink(SqliteSettings(ops=MONITOR.ops), MONITOR, output_dir=root, rank=0),
    "tensorboard": lambda root: TensorBoardSink(TensorBoardSettings(ops=MONITOR.ops), output_dir=root, rank=0, monitor=MONITOR),
}


def size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def write(root: Path, limit: int, *names: str, alert: int = -1) -> MemorySink:
    memory = MemorySink(STEPS)
    writer = Writer([*(SINKS[name](root) for name in names), memory], Faults(strict=True), limit)
    for step in range(STEPS):
        frame = frame_of({f"layer{i}.weight": [float(step), 1.0] for i in range(20)}, step=step, scalars={"loss": 1.0})
        alerts = [Alert("nan_inf", "critical", "grad", "layer0.weight", step, 0, 1.0, "finite", "planted")] if step == alert else []
        writer.submit(frame, alerts)
    writer.close()
    return memory


@pytest.mark.fast_cells("csv")  # the others share the bound with it in the next test
@pytest.mark.parametrize("name", ["csv", "jsonl", "sqlite"])
@pytest.mark.slow
def test_a_long_run_stays_within_the_bound(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first steps are whole, the last ones are there more seldom, scalars of all; said once in the log, by the files to their
    readers, and other sinks get everything. The step of an alert is whole."""
    write(tmp_path / "all", 0, name)
    whole = size(tmp_path / "all")
    assert not open_run(tmp_path / "all").problems
    limit = whole // 2
    with caplog.at_level(logging.WARNING):
        memory = write(tmp_path / "some", limit, name, alert=STEPS - 3)
    assert all(frame.samples for frame in memory.frames)
    assert len(memory.frames) == STEPS
    assert size(tmp_path / "some") <= limit
    assert [record.getMessage().partition(":")[0] for record in caplog.records].count(f"sinks.max_gb ({limit / 1e9:g})") == 2
    run = open_run(tmp_path / "some")
    assert run.scalars(0)["loss"].steps.tolist() == list(range(STEPS))
    (series, *others) = run.series(0, "grad_reduced", "norm").values()
    steps = series.steps.tolist()
    assert all(other.steps.tolist() == steps for other in others)
    begin = next(i for i, step in enumerate(steps) if step != i)
    assert begin > 50
    assert STEPS - 3 in steps
    gaps = np.diff([step for step in steps if step != STEPS - 3])
    assert gaps.max() <= 16
    assert steps[-2] > STEPS - 2 * gaps.max()
    assert f"samples of {STEPS - len(steps)} steps are not in the files" in caplog.text
    (problem,) = run.problems
    first = int(run.scalars(0)["samples_every"].steps[0])
    assert first == begin or first == begin - 1
    assert problem.startswith(f"the samples of steps are missing from step {first} on: sinks.max_gb was nearly used up")
    assert problem in collect([open_source(run.path)]).runs[0].problems


def test_a_bound_that_is_used_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scalars take place, too: in the end nothing is written, which is said aloud, counted, and stands in the files."""
    limit = 40_000
    with caplog.at_level(logging.WARNING):
        write(tmp_path, limit, "csv")
    assert size(tmp_path) < limit + 2000
    run = open_run(tmp_path)
    last = int(run.scalars(0)["samples_every"].steps[-1])
    assert last < STEPS - 100
    assert f"used up; from step {last} on nothing is written" in caplog.text
    assert f"nothing of {STEPS - last} more" in caplog.text
    (problem,) = run.problems
    assert f"used up, nothing was written after step {last}" in problem


@pytest.mark.slow
def test_all_sinks_share_the_bound(tmp_path: Path) -> None:
    """The bound is of the rank, not of a sink."""
    write(tmp_path / "all", 0, *SINKS)
    limit = size(tmp_path / "all") // 3
    write(tmp_path / "some", limit, *SINKS)
    assert size(tmp_path / "some") <= limit + 20_000
