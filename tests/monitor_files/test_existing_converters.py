"""The existing tool's converters take our files and say what ours say.

Opt-in: MSPROBE_EXISTING_VENV_26 and MSPROBE_EXISTING_VENV_81 name virtual environments with versions 26.2.0 and 8.1.1.
"""

from __future__ import annotations

import math
import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msprobe_engine.monitor.csv2tb import csv2tensorboard_by_step
from msprobe_engine.monitor.data2db import Options, data2db
from msprobe_engine.monitor.reader import open_run
from msprobe_engine.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.sinks.csv import CsvSink
from msprobe_engine.testing import frame_of

OPS = ("norm", "min", "max", "mean", "nans", "zeros")
FIXTURES = Path(__file__).parent.parent / "fixtures"
VALUES: tuple[list[float], ...] = ([1.0, -2.5], [math.nan], [1e12, 3.0], [-math.inf, 1.0], [0.0, 0.25], [-1e-30])


def existing(variable: str, *command: str) -> None:
    place = os.environ.get(variable)
    if not place:
        pytest.skip(f"{variable} does not name a virtual environment")
    done = subprocess.run([f"{place}/bin/{command[0]}", *command[1:]], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]


def run_of(root: Path) -> Path:
    """Two ranks, five steps, micro batches, NaN, Inf and numbers beyond 1e9."""
    for rank in (0, 1):
        sink = CsvSink(CsvSettings(path=str(root), steps_per_file=2), MonitorSettings(ops=OPS), output_dir=root, rank=rank)
        for step in range(1, 6):
            for micro in range(1 + (step == 3)):
                tensors = {f"decoder.layers.{i}.output": [v + micro + rank for v in values] for i, values in enumerate(VALUES)}
                sink.write(frame_of(tensors, family="actv", phase="", micro_step=micro, step=step, rank=rank), [])
            sink.write(frame_of({f"w{i}": v for i, v in enumerate(VALUES)}, step=step, rank=rank, scalars={"loss": 1.0}), [])
            sink.write(frame_of({"w": [float(step)]}, family="exp_avg", phase="", step=step, rank=rank), [])
        sink.close()
    return root


def trend(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rank, step, target and metric to the statistics."""
    query = """SELECT m.metric_name, g.target_name, g.vpp_stage, g.micro_step, t.* FROM trend_data t
               JOIN monitoring_metrics m USING (metric_id) JOIN monitoring_targets g USING (target_id)"""
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute(query)
        columns = [column[0] for column in rows.description]
        out = {}
        for row in rows:
            facts = dict(zip(columns, row))
            place = tuple(facts.pop(k) for k in ("rank", "step", "metric_name", "target_name", "vpp_stage", "micro_step"))
            out[place] = {k: v for k, v in facts.items() if k not in ("target_id", "metric_id")}
        return out


def tags(path: Path) -> set[tuple[Any, ...]]:
    query = """SELECT tag_name, category, metric_name, target_name FROM tag_target_mapping JOIN monitoring_tags USING (tag_id)
               JOIN monitoring_metrics USING (metric_id) JOIN monitoring_targets USING (target_id)"""
    with closing(sqlite3.connect(path)) as db:
        return set(db.execute(query))


@pytest.mark.parametrize("micro_step", ["true", "false"])
def test_data2db_of_our_files(tmp_path: Path, micro_step: str) -> None:
    """26.2's data2db on our CSV gives the rows, tags and global numbers that ours gives."""
    root = run_of(tmp_path / "run")
    existing(
        "MSPROBE_EXISTING_VENV_26", "msprobe", "data2db", "--db", str(tmp_path / "old"), "--data", str(root), "--micro_step", micro_step
    )
    (ours,) = data2db(tmp_path / "new", root, options=Options(micro_step=micro_step == "true"))
    old = tmp_path / "old" / "monitor_data.trend.db"
    assert trend(ours.path) == trend(old)
    assert len(trend(old)) == 2 * (6 * 6 + 5 * 6 + 5)
    assert tags(ours.path) == tags(old)
    facts = []
    for path in (ours.path, old):
        with closing(sqlite3.connect(path)) as db:
            rows = db.execute("SELECT * FROM global_stats")
            facts.append({c[0]: set(str(v).split(",")) for c, v in zip(rows.description, next(rows))})
    assert facts[0] == facts[1]


def test_our_reader_on_the_existing_data_base(tmp_path: Path) -> None:
    """A data base that 26.2 made is read with what it has kept: NaN where it has NULL, its limits where it has clamped."""
    root = run_of(tmp_path / "run")
    existing("MSPROBE_EXISTING_VENV_26", "msprobe", "data2db", "--db", str(tmp_path / "old"), "--data", str(root), "--micro_step", "false")
    run = open_run(tmp_path / "old")
    assert (run.ranks, run.families(0)) == ([0, 1], ["actv", "grad_reduced", "exp_avg"])
    found = {key.name: series.values[0] for key, series in run.series(0, "grad_reduced", "max").items()}
    np.testing.assert_equal([found[f"w{i}"] for i in range(6)], [1.0, math.nan, 1e9, 1.0, 0.25, float(np.float64(-1e-30))])


@pytest.mark.parametrize("micro_step", ["true", "false"])
@pytest.mark.parametrize("fixture", ["26.2.0", "8.1.1"])
def test_data2db_of_dumps(tmp_path: Path, micro_step: str, fixture: str) -> None:
    """26.2's data2db on a dump of the existing tool gives rows that ours gives too; ours has further tensors (keyword arguments, other
    dtypes)."""
    sources = sorted({path.parents[2] for path in (FIXTURES / fixture).glob("*/step*/rank[0-9]/dump.json")})[:3]
    assert sources
    for i, source in enumerate(sources):
        out = tmp_path / str(i)
        command = ("data2db", "--db", str(out / "old"), "--data", str(source), "--format", "dump", "--micro_step", micro_step)
        existing("MSPROBE_EXISTING_VENV_26", "msprobe", *command)
        (ours,) = data2db(out / "new", source, "dump", Options(micro_step=micro_step == "true"))
        old, new = trend(out / "old" / "dump_data.trend.db"), trend(ours.path)
        assert old
        assert {place: new.get(place) for place in old} == old


def test_csv2tb_of_our_files(tmp_path: Path) -> None:
    """8.1.1's csv2tensorboard_by_step on our CSV gives the tags, steps and values that ours gives."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = run_of(tmp_path / "run")
    call = f"csv2tensorboard_by_step({str(root)!r}, output_dirpath={str(tmp_path / 'old')!r})"
    existing("MSPROBE_EXISTING_VENV_81", "python", "-c", f"from msprobe.pytorch.monitor.csv2tb import csv2tensorboard_by_step\n{call}")
    csv2tensorboard_by_step(root, output_dirpath=tmp_path / "new")
    for rank in (0, 1):
        for family in ("actv", "grad_reduced", "exp_avg"):
            both = []
            for place in ("old", "new"):
                events = EventAccumulator(str(tmp_path / place / f"rank{rank}" / family), size_guidance={"scalars": 0})
                events.Reload()
                both.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
            np.testing.assert_equal(both[1], both[0])
            assert both[0]
