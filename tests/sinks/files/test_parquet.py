"""The Parquet sink and `Run.to_arrow`: what comes back by the reader of monitors, by pandas and by DuckDB."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.settings.schema import JsonLinesSettings, MonitorSettings, ParquetSettings
from msprobe_engine.formats.monitor.reader import Run, open_run
from msprobe_engine.probe.sinks.jsonlines import JsonLinesSink
from msprobe_engine.probe.sinks.one_file import OneFileSink
from msprobe_engine.probe.sinks.parquet import ParquetSink

ALERT = Alert("nan_inf", "critical", "loss", "loss", 3, 0, math.nan, "a number", "loss is NaN in step 3")


def write(sink: OneFileSink, steps: range) -> None:
    for step in steps:
        loss = math.nan if step == 3 else 1.0 / (step + 1)
        sink.write(
            frame_of({"a.weight": [3.0, 4.0 * step], "b.bias": [math.inf]}, step=step, scalars={"loss": loss}), [ALERT] * (step == 3)
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    sink = ParquetSink(ParquetSettings(steps_per_file=2), MonitorSettings(), output_dir=tmp_path, rank=0, world_size=1)
    write(sink, range(5))
    assert len(list((tmp_path / "parquet").glob("*.parquet"))) == 2  # the fifth step waits for the end
    sink.close()
    assert len(list((tmp_path / "parquet").glob("*.parquet"))) == 3
    return open_run(tmp_path)


def test_the_same_as_json_lines(run: Run, tmp_path: Path) -> None:
    """Series, scalars, alerts and what the run says of itself are those of another sink that had the same frames."""
    other = JsonLinesSink(JsonLinesSettings(), MonitorSettings(), output_dir=tmp_path / "other", rank=0, world_size=1)
    write(other, range(5))
    other.close()
    lines = open_run(tmp_path / "other")
    assert (run.format, lines.format) == ("parquet", "jsonl")
    assert run.ranks == lines.ranks == [0]
    assert run.families(0) == lines.families(0) == ["grad_reduced"]
    for op in ("norm", "min", "max", "mean", "nans"):
        mine, theirs = run.series(0, "grad_reduced", op), lines.series(0, "grad_reduced", op)
        assert mine.keys() == theirs.keys()
        for key, series in mine.items():
            np.testing.assert_array_equal(series.steps, theirs[key].steps)
            np.testing.assert_array_equal(series.values, theirs[key].values)
    assert run.kinds(0, "grad_reduced") == lines.kinds(0, "grad_reduced")
    np.testing.assert_array_equal(run.scalars(0)["loss"].values, lines.scalars(0)["loss"].values)
    assert [alert["message"] for alert in run.alerts(0)] == [ALERT.message]
    assert run.info(0)["world_size"] == 1
    assert not run.problems


def test_pandas(run: Run, tmp_path: Path) -> None:
    """The files as they are, and `to_arrow`."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(tmp_path / "parquet")
    assert len(frame) == 15
    norms = frame[frame.name == "a.weight"].sort_values("step").norm.tolist()
    assert norms == [math.hypot(3, 4 * step) for step in range(5)]
    arrow = run.to_arrow(families=["scalar"]).to_pandas()
    assert arrow.step.tolist() == [0, 1, 2, 3, 4]
    assert math.isnan(arrow.value[3])
    assert run.to_arrow().num_rows == 15


def test_duckdb(run: Run, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    query = f"SELECT step, norm FROM read_parquet('{tmp_path}/parquet/*.parquet') WHERE name = 'b.bias' ORDER BY step"
    assert duckdb.sql(query).fetchall() == [(step, math.inf) for step in range(5)]
    rows = duckdb.from_arrow(run.to_arrow())
    assert rows.filter("family = 'scalar' AND isnan(value)").project("step").fetchall() == [(3,)]


@pytest.mark.usefixtures("run")
def test_a_damaged_part_is_said(tmp_path: Path) -> None:
    """The rest is read; another file of that kind that is no part of a monitor is said, too."""
    import pyarrow
    import pyarrow.parquet

    first = sorted((tmp_path / "parquet").glob("*.parquet"))[0]
    first.write_bytes(first.read_bytes()[:-20])
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "parquet" / "foreign.parquet")
    again = open_run(tmp_path)
    assert again.scalars(0)["loss"].steps.tolist() == [2, 3, 4]
    assert sorted(text.partition(".parquet: ")[2] for text in again.problems) == [
        "a column that every file of a monitor has is missing or has another type: left out",
        "cannot be read: ArrowInvalid",
    ]


@pytest.mark.usefixtures("run")
def test_a_row_without_a_step_is_said(tmp_path: Path) -> None:
    """It is of no step, and all others are read."""
    import pyarrow
    import pyarrow.parquet

    first = sorted((tmp_path / "parquet").glob("*.parquet"))[0]
    part = pyarrow.parquet.read_table(first)
    steps = [None if step == 1 else step for step in part.column("step").to_pylist()]
    column = part.column_names.index("step")
    pyarrow.parquet.write_table(part.set_column(column, part.schema.field(column), pyarrow.array(steps, pyarrow.int64())), first)
    again = open_run(tmp_path)
    assert again.scalars(0)["loss"].steps.tolist() == [0, 2, 3, 4]
    assert {text.partition(".parquet: ")[2]: n for text, n in again.problems.items()} == {"row without a step: left out": 3}


def test_another_run_in_the_same_place(tmp_path: Path) -> None:
    """A launch that begins anew is another run; it alone is read, and the other is named. One that goes on is the same run."""
    for steps in (range(3, 7), range(5, 9)):
        sink = ParquetSink(ParquetSettings(), MonitorSettings(), output_dir=tmp_path / str(steps[0]), rank=0, world_size=1)
        write(sink, range(steps[0]))
        sink.close()
        sink = ParquetSink(ParquetSettings(), MonitorSettings(), output_dir=tmp_path / str(steps[0]), rank=0, world_size=1)
        write(sink, steps if steps[0] == 3 else range(2))
        sink.close()
    assert open_run(tmp_path / "3").scalars(0)["loss"].steps.tolist() == [0, 1, 2, 3, 4, 5, 6]
    other = open_run(tmp_path / "5")
    assert other.scalars(0)["loss"].steps.tolist() == [0, 1]
    assert len(other.other_runs(0)) == 1
