"""The existing tool's converters take our files and say what ours say."""

from __future__ import annotations

import json
import math
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from existing_environment import SOURCES, existing_tool, reference
from frames_of_lists import frame_of

from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.formats.monitor.convert.csv2tb import csv2tensorboard_by_step
from msprobe_engine.formats.monitor.convert.data2db import data2db
from msprobe_engine.formats.monitor.convert.monitor2db import Options
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.csv.monitor import CsvSink

OPS = ("norm", "min", "max", "mean", "nans", "zeros")
FIXTURES = Path(__file__).parent.parent / "fixtures"
MICRO_STEP = ("true", "false")
VALUES: tuple[list[float], ...] = ([1.0, -2.5], [math.nan], [1e12, 3.0], [-math.inf, 1.0], [0.0, 0.25], [-1e-30])


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


def global_numbers(path: Path) -> dict[str, set[str]]:
    """Each column of the global numbers; where it is a list, without order."""
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT * FROM global_stats")
        return {c[0]: set(str(v).split(",")) for c, v in zip(rows.description, next(rows))}


def dumps(version: str) -> list[Path]:
    """Dumps of the existing tool."""
    return sorted({path.parents[2] for path in (FIXTURES / version).glob("*/step*/rank[0-9]/dump.json")})[:3]


def scalars(directory: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Steps and values of every tag, by directory of event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for place in sorted({path.parent for path in directory.rglob("events.*")}):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0})
        events.Reload()
        values = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        found[str(place.relative_to(directory))] = values
    return found


def make(out: Path) -> None:
    """What the converters of the existing tool make of our files and of its own dumps: data bases of 26.2.0, events of 8.1.1."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        root = run_of(work / "run")
        new, old = existing_tool("26.2.0"), existing_tool("8.1.1")
        for micro_step in MICRO_STEP:
            new.run("msprobe", "data2db", "--db", out / micro_step, "--data", root, "--micro_step", micro_step, cwd=work)
            for version in ("26.2.0", "8.1.1"):
                for source in dumps(version):
                    place = out / f"{micro_step}-{version}-{source.name}"
                    options = ("--format", "dump", "--micro_step", micro_step)
                    new.run("msprobe", "data2db", "--db", place, "--data", source, *options, cwd=work)
        call = f"csv2tensorboard_by_step({str(root)!r}, output_dirpath={str(work / 'events')!r})"
        old.run("python", "-c", f"from msprobe.pytorch.monitor.csv2tb import csv2tensorboard_by_step\n{call}", cwd=work)
        (out / "events.json").write_text(json.dumps(scalars(work / "events")))


@pytest.fixture(scope="module", params=SOURCES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make` has made."""
    return reference("monitor_files", request.param, tmp_path_factory.mktemp("theirs"), make)


@pytest.mark.parametrize("micro_step", MICRO_STEP)
def test_data2db_of_our_files(tmp_path: Path, theirs: Path, micro_step: str) -> None:
    """26.2's data2db on our CSV gives the rows, tags and global numbers that ours gives."""
    (ours,) = data2db(tmp_path / "new", run_of(tmp_path / "run"), options=Options(micro_step=micro_step == "true"))
    old = theirs / micro_step / "monitor_data.trend.db"
    assert trend(ours.path) == trend(old)
    assert len(trend(old)) == 2 * (6 * 6 + 5 * 6 + 5)
    assert tags(ours.path) == tags(old)
    assert global_numbers(ours.path) == global_numbers(old)


def test_our_reader_on_the_existing_data_base(theirs: Path) -> None:
    """A data base that 26.2 made is read with what it has kept: NaN where it has NULL, its limits where it has clamped."""
    run = open_run(theirs / "false")
    assert (run.ranks, run.families(0)) == ([0, 1], ["actv", "grad_reduced", "exp_avg"])
    found = {key.name: series.values[0] for key, series in run.series(0, "grad_reduced", "max").items()}
    np.testing.assert_equal([found[f"w{i}"] for i in range(6)], [1.0, math.nan, 1e9, 1.0, 0.25, float(np.float64(-1e-30))])


@pytest.mark.parametrize("micro_step", MICRO_STEP)
@pytest.mark.parametrize("version", ["26.2.0", "8.1.1"])
def test_data2db_of_dumps(tmp_path: Path, theirs: Path, micro_step: str, version: str) -> None:
    """26.2's data2db on a dump of the existing tool gives rows that ours gives too; ours has further tensors (keyword arguments, other
    dtypes)."""
    assert dumps(version)
    for source in dumps(version):
        (ours,) = data2db(tmp_path / source.name, source, "dump", Options(micro_step=micro_step == "true"))
        old, new = trend(theirs / f"{micro_step}-{version}-{source.name}" / "dump_data.trend.db"), trend(ours.path)
        assert old
        assert {place: new.get(place) for place in old} == old


def test_csv2tb_of_our_files(tmp_path: Path, theirs: Path) -> None:
    """8.1.1's csv2tensorboard_by_step on our CSV gives the tags, steps and values that ours gives."""
    csv2tensorboard_by_step(run_of(tmp_path / "run"), output_dirpath=tmp_path / "new")
    old = json.loads((theirs / "events.json").read_text())
    assert set(old) == {f"rank{rank}/{family}" for rank in (0, 1) for family in ("actv", "grad_reduced", "exp_avg")}
    np.testing.assert_equal(json.loads(json.dumps(scalars(tmp_path / "new"))), old)
