"""What sinks write, the reader gives back."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import monitor_frames as F
import pytest
from hypothesis import given

from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import CsvSettings, JsonLinesSettings, MonitorSettings, SqliteSettings
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink
from msprobe_engine.probe.sinks.sqlite import SqliteSink

MONITOR = MonitorSettings(ops=F.OPS)
SINKS: dict[str, Callable[[Path], Sink]] = {
    "csv": lambda path: CsvSink(CsvSettings(steps_per_file=7), MONITOR, output_dir=path, rank=0, world_size=2),
    "jsonl": lambda path: JsonLinesSink(JsonLinesSettings(ops=F.OPS), MONITOR, output_dir=path, rank=0, world_size=2),
    "sqlite": lambda path: SqliteSink(SqliteSettings(ops=F.OPS), MONITOR, output_dir=path, rank=0, world_size=2),
}


@pytest.mark.parametrize("kind", SINKS)
@given(frames=F.runs())
def test_every_number_comes_back(kind: str, frames: list[Frame]) -> None:
    """Any name, any family, NaN and Inf, values beyond 1e9: the reader gives the float64 that the row says, and no problem."""
    with tempfile.TemporaryDirectory() as directory:
        sink = SINKS[kind](Path(directory))
        for frame in frames:
            sink.write(frame, [])
        sink.close()
        if kind == "sqlite" and not any(frame.samples for frame in frames):
            return  # no rank has a row
        run = open_run(directory)
        assert (run.format, run.ranks) == (kind, [0])
        F.check(run, frames)
        assert run.problems == {}


@pytest.mark.parametrize("kind", SINKS)
def test_alerts_and_info_come_back(tmp_path: Path, kind: str) -> None:
    """Alerts keep their fields, NaN and Inf included; run.json has rank, world size, what the rank is, and the monitor's settings."""
    from frames_of_lists import frame_of

    sink = SINKS[kind](tmp_path)
    facts: dict[str, int] = {}
    sink.watch_info(facts)  # type: ignore[attr-defined]
    sink.write(frame_of({"w": [1.0]}, step=1), [F.alert(1), F.alert(1, -math.inf, words="a\nb")])
    facts["tp"] = 3
    sink.write(frame_of({"w": [1.0]}, step=2), [F.alert(2, 5.0)])
    sink.close()
    run = open_run(tmp_path)
    first, second, third = run.alerts(0)
    assert math.isnan(first["value"])
    assert (second["value"], third["value"], third["step"]) == (-math.inf, 5.0, 2)
    assert (first["rule"], first["severity"], first["kind"], first["name"]) == ("nan_inf", "critical", "grad", "w")
    assert second["extra"] == {"x": "Infinity", "words": "a\nb"}
    info = run.info(0)
    assert (info["rank"], info["world_size"], info["rank_info"]) == (0, 2, {"tp": 3})
    assert info["monitor"]["ops"] == list(F.OPS)
    assert run.problems == {}


def test_a_step_that_is_written_again_counts_last(tmp_path: Path) -> None:
    """After a resume steps may be there twice: the later one is the number, and the run says how often that was."""
    from frames_of_lists import frame_of

    for kind, make in SINKS.items():
        sink = make(tmp_path / kind)
        for step, value in ((0, 1.0), (1, 2.0), (1, 3.0)):
            sink.write(frame_of({"w": [value]}, step=step, scalars={"loss": value}), [])
        sink.close()
        run = open_run(tmp_path / kind)
        (series,) = run.series(0, "grad_reduced", "norm").values()
        assert (series.steps.tolist(), series.values.tolist()) == ([0, 1], [1.0, 3.0])
        assert run.scalars(0)["loss"].values.tolist() == [1.0, 3.0]
        assert len(run.problems) == (kind != "sqlite")  # there the row was replaced
