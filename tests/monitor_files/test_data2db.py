"""``msprobe data2db``: monitor files and dumps as trend data bases."""

from __future__ import annotations

import json
import math
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import monitor_frames as F
import pytest
from frames_of_lists import frame_of
from hypothesis import given, settings

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.formats.monitor.convert.data2db import data2db
from msprobe_engine.formats.monitor.convert.dump2db import micro_steps_of, place_of, renumber_calls
from msprobe_engine.formats.monitor.convert.monitor2db import MONITOR_DB, Options
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.csv.monitor import CsvSink


def sink(root: Path, rank: int = 0, steps: int = 100) -> CsvSink:
    return CsvSink(CsvSettings(steps_per_file=steps), MonitorSettings(ops=F.OPS), output_dir=root, rank=rank)


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


@given(frames=F.runs())
@settings(max_examples=15, deadline=None)
def test_every_number_comes_back(frames: list[Frame]) -> None:
    """Files to data base to reader: with the step as the axis, nothing is lost or changed."""
    if not any(frame.samples for frame in frames):
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        one = sink(root, steps=7)
        for frame in frames:
            one.write(frame, [])
        one.close()
        (done,) = data2db(root / "db", root, options=Options(micro_step=False))
        assert done.problems == {}
        F.check(open_run(done.path), frames)


def micro_run(root: Path) -> None:
    """Step 3 with two micro batches on rank 1, one on rank 0; step 5 with one."""
    for rank, steps in ((0, ((3, 0), (5, 0))), (1, ((3, 0), (3, 1), (5, 0)))):
        one = sink(root, rank)
        for step, micro in steps:
            one.write(frame_of({"fc.input": [10.0 * step + micro]}, step=step, family="actv", phase="", micro_step=micro), [])
        one.write(frame_of({"w": [1.0]}, step=5, scalars={"loss": math.nan}), [F.alert(5)])
        one.close()


def test_axis_of_micro_steps(tmp_path: Path) -> None:
    """micro_step true: steps are the running number over all ranks' micro batches, and a tensor is one target."""
    micro_run(tmp_path)
    (done,) = data2db(tmp_path / "db", tmp_path)
    query = "SELECT rank, step, target_name, max FROM trend_data JOIN monitoring_targets USING (target_id) ORDER BY rank, step, target_name"
    shown = [(0, 0, "fc.input", 30.0), (0, 2, "fc.input", 50.0), (0, 2, "w", 1.0)]
    assert rows(done.path, query) == [
        *shown,
        (1, 0, "fc.input", 30.0),
        (1, 1, "fc.input", 31.0),
        (1, 2, "fc.input", 50.0),
        (1, 2, "w", 1.0),
    ]
    assert rows(done.path, "SELECT min_step, max_step, max_rank FROM global_stats") == [(0, 2, 1)]
    run = open_run(done.path)
    assert math.isnan(run.scalars(1)["loss"].values[0])
    assert [a["step"] for a in run.alerts(0)] == [5]
    assert run.info(1)["rank"] == 1


def test_goes_on_and_takes_what_is_new(tmp_path: Path) -> None:
    """A second call reads only what has grown; when the axis would change it says so."""
    micro_run(tmp_path)
    out = tmp_path / "db"
    (first,) = data2db(out, tmp_path)
    (second,) = data2db(out, tmp_path)
    assert (second.rows, second.units, second.skipped) == (0, 0, first.units)
    one = sink(tmp_path, 2)
    one.write(frame_of({"w": [7.0]}, step=9), [])
    one.close()
    (third,) = data2db(out, tmp_path)
    assert (third.rows, third.units) == (1, 1)
    assert rows(third.path, "SELECT step, max FROM trend_data WHERE rank = 2") == [(3, 7.0)]
    one.write(frame_of({"w": [8.0]}, step=1), [])
    one.close()
    with pytest.raises(UsageError, match="its horizontal axis would change"):
        data2db(out, tmp_path)
    (fourth,) = data2db(out, tmp_path, options=Options(force=True))
    assert fourth.rows == first.rows + 2


def test_a_data_base_in_the_way(tmp_path: Path) -> None:
    """Other options, other data or a strange file: refused, untouched, and replaced with force only."""
    micro_run(tmp_path)
    out = tmp_path / "db"
    data2db(out, tmp_path)
    for options in (Options(micro_step=False), Options(mapping={"fc": "x"})):
        with pytest.raises(UsageError, match="--force"):
            data2db(out, tmp_path, options=options)
    (out / MONITOR_DB).write_text("precious")
    with pytest.raises(UsageError, match="by another tool"):
        data2db(out, tmp_path)
    assert (out / MONITOR_DB).read_text() == "precious"
    (done,) = data2db(out, tmp_path, options=Options(force=True))
    assert done.rows


def test_a_collective_is_one_target_of_all_ranks(tmp_path: Path) -> None:
    """The rank in a collective's tag is no part of its target, so the ranks of one call can be compared."""
    for rank in (0, 1):
        one = sink(tmp_path, rank)
        frame = frame_of({"all_reduce": [float(rank)]}, family="other", phase="", rank=rank)
        frame.samples[0] = frame.samples[0]._replace(extra={"tag": f"all_reduce/rank{rank}/post_0_0"})
        one.write(frame, [])
        one.close()
    (done,) = data2db(tmp_path / "db", tmp_path)
    query = "SELECT rank, target_name, max FROM trend_data JOIN monitoring_targets USING (target_id) ORDER BY rank"
    assert rows(done.path, query) == [(0, "all_reduce/post_0_0", 0.0), (1, "all_reduce/post_0_0", 1.0)]


def test_processes_and_mapping(tmp_path: Path) -> None:
    """Several processes give what one gives; replacements apply to names, also where two become one."""
    micro_run(tmp_path)
    query = "SELECT rank, step, target_name, metric_id, norm FROM trend_data JOIN monitoring_targets USING (target_id) ORDER BY 1, 2, 3"
    mapping = {"fc": "dense", "dense.input": "w"}
    (one,) = data2db(tmp_path / "one", tmp_path, options=Options(mapping=mapping))
    (two,) = data2db(tmp_path / "two", tmp_path, options=Options(mapping=mapping, process_num=2))
    assert rows(one.path, query) == rows(two.path, query)
    assert {row[2] for row in rows(one.path, query)} == {"w"}
    with pytest.raises(UsageError, match="1 to 128"):
        Options(process_num=129)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what it wrote and what it could not read; without data it is exit code 2."""
    micro_run(tmp_path)
    (damaged,) = (tmp_path / "monitor").glob("*rank0*/actv_*.csv")
    damaged.write_text(damaged.read_text() + "0,half")
    (tmp_path / "map.json").write_text(json.dumps({"fc": "x"}))
    arguments = ["--db", str(tmp_path / "db"), "--data", str(tmp_path / "monitor"), "--micro_step", "FALSE"]
    assert main(["data2db", *arguments, "--mapping", str(tmp_path / "map.json")]) == 0
    out = capsys.readouterr().out
    assert "7 rows from 4 tables" in out
    assert "last line is cut (1)" in out
    assert main(["data2db", "--db", str(tmp_path / "db2"), "--data", str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    (tmp_path / "map.json").write_text('["fc"]')
    assert main(["data2db", *arguments, "--mapping", str(tmp_path / "map.json")]) == 2


def test_rules_of_dumps() -> None:
    """Micro steps begin at module calls at the top; calls are counted anew in each; records tell metric, target and call."""
    construct = {
        "Module.m.M.forward.0": None, "Module.fc.L.forward.0": "Module.m.M.forward.0",
        "Functional.linear.0.forward": "Module.fc.L.forward.0",
        "Module.fc.L.backward.0": None, "Module.m.M.forward.1": None, "Module.fc.L.forward.1": "Module.m.M.forward.1",
        "Functional.linear.1.forward": "Module.fc.L.forward.1", "Tensor.add.0.forward": None, "a": "b", "b": "a",
    }  # fmt: skip
    steps = micro_steps_of(construct)
    assert steps == {
        "Module.m.M.forward.0": 0, "Module.fc.L.forward.0": 0, "Functional.linear.0.forward": 0, "Module.fc.L.backward.0": 0,
        "Module.m.M.forward.1": 1, "Module.fc.L.forward.1": 1, "Functional.linear.1.forward": 1,
    }  # fmt: skip
    names = renumber_calls(steps)
    assert names["Functional.linear.1.forward"] == "Functional.linear.0.forward"
    assert names["Module.fc.L.forward.1"] == "Module.fc.L.forward.0"
    assert place_of("Functional.linear.2.forward", False) == ("forward", "Functional.linear", 2)
    assert place_of("Module.fc.L.forward.1", True) == ("recompute", "Module.fc.L", 1)
    assert place_of("Module.fc.L.backward.1", True) == ("backward", "Module.fc.L", 1)
    assert place_of("Module.fc.parameters_grad", False) == ("parameters_grad", "Module.fc", 0)
    assert place_of("Module.fc.parameters_grad.2", False) == ("parameters_grad", "Module.fc", 2)
    assert place_of("optimizer.step.0", False) is None
