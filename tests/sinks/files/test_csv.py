"""CSV files of the monitor."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import frames_of_lists
import pytest
from frames_of_lists import TENSOR, frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.errors import SinkError
from msprobe_engine.core.io.safe_cells import plain_name
from msprobe_engine.core.records import FAMILIES, TensorRef
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.formats.monitor.losses import FILE, Kept, read_losses
from msprobe_engine.probe.sinks.csv.features import FEATURES
from msprobe_engine.probe.sinks.csv.monitor import CsvSink, safe_cell

OPS = ("norm", "min", "max", "mean", "nans", "zeros")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(None not in row and None not in row.values() for row in rows), "cells and columns differ in number"
    return rows


def test_directory_name_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`{MonDD}_{HH-MM-SS}-rank{R}-{8 hex}` under the settings' path, MONITOR_OUTPUT_DIR, or output_dir/monitor, in this order."""
    first = CsvSink(CsvSettings(), None, output_dir=tmp_path, rank=12).directory
    assert first.parent == tmp_path / "monitor"
    assert re.fullmatch(r"[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d-rank12-[0-9a-f]{8}", first.name)
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "env"))
    assert CsvSink(CsvSettings(), None, output_dir=tmp_path, rank=0).directory.parent == tmp_path / "env"
    assert CsvSink(CsvSettings(path=str(tmp_path / "own")), None, output_dir=tmp_path, rank=0).directory.parent == tmp_path / "own"


@pytest.mark.parametrize("family", FAMILIES)
def test_columns_of_every_family(tmp_path: Path, family: str) -> None:
    """The header has the columns of the existing tool, ours (phase, state, tag) last, and every row as many cells."""
    sink = CsvSink(CsvSettings(), MonitorSettings(ops=("norm", "shape", "max")), output_dir=tmp_path, rank=0)
    sink.write(frame_of({"a.weight": [1.0, 2.0]}, family=family, step=3), [])
    path = sink.directory / f"{family}_0-99.csv"
    micro = ["micro_step"] if family in ("actv", "actv_grad", "attention_hook", "moe_router_logit_hook") else []
    statistics = ["norm", "max", "shape", "dtype"]
    ours = {"grad_unreduced": ["phase"], "grad_reduced": ["phase"], "opt_state": ["state"], "other": ["tag"]}.get(family, [])
    (row,) = table(path)
    assert (row["name"], row["step"]) == ("a.weight", "3")
    if family in FEATURES:
        assert list(row) == ["vpp_stage", "name", "step", *micro, *FEATURES[family], "value"]
    else:
        assert list(row) == ["vpp_stage", "name", "step", *micro, *statistics, *ours]
        assert (row["max"], row["shape"], row["dtype"]) == ("2.0", "[4]", "torch.float32")


def test_steps_with_alerts_replace_no_file(tmp_path: Path) -> None:
    """Alerts are appended and counted in place: on the file system that thousands of ranks share a step makes and renames no file."""
    sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=tmp_path, rank=0)
    alert = Alert("nan_inf", "critical", "grad", "w", 0, 0, math.nan, "finite", "w is NaN")
    seen = []
    for step in range(3):
        sink.write(frame_of({"w": [1.0]}, step=step), [dataclasses.replace(alert, step=step)])
        seen.append({path.name: path.stat().st_ino for path in sink.directory.iterdir()})
    sink.close()
    assert seen[0] == seen[1] == seen[2]
    assert (
        len((sink.directory / "alerts.jsonl").read_text().splitlines()) == (read_losses(sink.directory / FILE) or Kept(0, {})).alerts == 3
    )


def test_micro_steps_of_gradients_on_request(tmp_path: Path) -> None:
    """Unreduced gradients have micro_step only when every micro batch is monitored."""
    sink = CsvSink(CsvSettings(), MonitorSettings(micro_batch_gradients=True), output_dir=tmp_path, rank=0)
    sink.write(frame_of({"w": [1.0]}, family="grad_unreduced", phase="local", micro_step=5), [])
    (row,) = table(sink.directory / "grad_unreduced_0-99.csv")
    assert (row["micro_step"], row["phase"]) == ("5", "local")


def test_blocks_of_steps(tmp_path: Path) -> None:
    """A file holds the steps a to b of its name, one header, and all steps are somewhere."""
    sink = CsvSink(CsvSettings(steps_per_file=10), None, output_dir=tmp_path, rank=0)
    for step in (0, 9, 10, 11, 25, 9):
        sink.write(frame_of({"w": [1.0]}, step=step), [])
    sink.close()
    found = {path.name: [row["step"] for row in table(path)] for path in sink.directory.glob("*.csv")}
    assert found == {"grad_reduced_0-9.csv": ["0", "9", "9"], "grad_reduced_10-19.csv": ["10", "11"], "grad_reduced_20-29.csv": ["25"]}


@given(st.lists(st.floats(width=32), max_size=4))
def test_numbers_read_back_exactly(tmp_path: Path, values: list[float]) -> None:
    """Every number is the float64 that `rows.read_row` gives; what does not exist is nan; counts are whole numbers."""
    sink = CsvSink(CsvSettings(), MonitorSettings(ops=OPS), output_dir=tmp_path, rank=0)
    frame = frame_of({"w": values})
    sink.write(frame, [])
    sink.close()
    (row,) = table(sink.directory / "grad_reduced_0-99.csv")
    wanted = _rows.read_row(frame.rows[0])
    for op in ("norm", "min", "max", "mean"):
        value = getattr(wanted, op)
        assert row[op] == repr(math.nan if value is None else float(value))
    assert row["nans"] == str(wanted.nans)


def test_integers_above_2_to_the_53(tmp_path: Path) -> None:
    """Minimum and maximum of integer tensors are exact."""
    frame = frame_of({"w": [1.0]})
    ints = _rows.as_int64(frame.rows)
    ints[0, _rows.FLAGS] |= _rows.HAS_INTEGERS
    ints[0, _rows.IMIN], ints[0, _rows.IMAX] = -(2**53) - 1, 2**53 + 1
    sink = CsvSink(CsvSettings(), MonitorSettings(ops=("min", "max")), output_dir=tmp_path, rank=0)
    sink.write(frame, [])
    (row,) = table(sink.directory / "grad_reduced_0-99.csv")
    assert (row["min"], row["max"]) == ("-9007199254740993", "9007199254740993")


def test_sample_without_statistics(tmp_path: Path) -> None:
    """A tensor without a row (meta tensor) has nan in every statistic, also when the frame has no row at all."""
    frame = frame_of({"a": [1.0], "b": [2.0]})
    frame.samples[1] = frame.samples[1]._replace(ref=TensorRef(-1, TENSOR))
    sink = CsvSink(CsvSettings(), MonitorSettings(ops=OPS), output_dir=tmp_path, rank=0)
    sink.write(frame, [])
    sink.write(dataclasses.replace(frame, rows=_rows.empty(0), samples=frame.samples[1:]), [])
    rows = table(sink.directory / "grad_reduced_0-99.csv")
    assert [row["norm"] for row in rows] == ["1.0", "nan", "nan"]
    assert all(rows[1][op] == "nan" for op in OPS)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20))
def test_cells(text: str) -> None:
    """Any name survives a CSV reader and comes back, and none begins with what a spreadsheet would run."""
    cell = safe_cell(text)
    ((back,),) = list(csv.reader(io.StringIO(cell + "\n", newline=""))) or [[""]] if cell else [[""]]
    assert plain_name(back) == text
    assert back in (text, f"'{text}")
    assert not back.startswith(("=", "+", "-", "@", "\t", "\r"))


def test_pandas_reads_it(tmp_path: Path) -> None:
    """pandas gets numbers, nan and text without help."""
    import pandas as pd

    sink = CsvSink(CsvSettings(), MonitorSettings(ops=(*OPS, "digest")), output_dir=tmp_path, rank=0)
    sink.write(frame_of({"w": [1.0, math.nan], "=1+1": [3.0, 4.0]}), [])
    data = pd.read_csv(sink.directory / "grad_reduced_0-99.csv")
    assert data["norm"].isna().tolist() == [True, False]
    assert data["norm"][1] == 5.0
    assert data["nans"].tolist() == [1, 0]
    assert data["name"].tolist() == ["w", "'=1+1"]


def test_killed_process_leaves_whole_steps(tmp_path: Path) -> None:
    """After kill -9 every step that was written is there, and no row is cut."""
    code = f"""
import sys
from pathlib import Path
sys.path.append({str(Path(frames_of_lists.__file__).parent)!r})
from frames_of_lists import frame_of
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.core.settings.schema import CsvSettings
sink = CsvSink(CsvSettings(), None, output_dir=Path({str(tmp_path)!r}), rank=0)
for step in range(10**9):
    sink.write(frame_of({{f"p{{i}}": [1.0] for i in range(50)}}, step=step % 100), [])
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = [int(process.stdout.readline()) for _ in range(20)][-1]
        process.send_signal(signal.SIGKILL)
    (path,) = tmp_path.glob("monitor/*/grad_reduced_0-99.csv")
    rows = table(path)
    assert path.read_text().endswith("\n")
    assert len(rows) % 50 == 0
    assert len(rows) >= 50 * (last + 1)


def test_write_error_is_a_sink_error(tmp_path: Path) -> None:
    """When the directory is gone, the error says which file could not be opened; nothing else breaks."""
    sink = CsvSink(CsvSettings(steps_per_file=1), None, output_dir=tmp_path, rank=0)
    sink.write(frame_of({"w": [1.0]}), [])
    moved = sink.directory.with_name("moved")
    os.rename(sink.directory, moved)
    with pytest.raises(SinkError, match=r"grad_reduced_1-1\.csv"):
        sink.write(frame_of({"w": [1.0]}, step=1), [])
    os.rename(moved, sink.directory)
    sink.write(frame_of({"w": [1.0]}, step=1), [])
    sink.close()
    sink.close()
    assert sorted(path.name for path in sink.directory.iterdir()) == [
        "grad_reduced_0-0.csv",
        "grad_reduced_1-1.csv",
        "losses.json",
        "run.json",
    ]
