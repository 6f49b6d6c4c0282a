"""Going on in the directory of an earlier run."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import frames_of_lists
import pytest
from frames_of_lists import TENSOR, frame_of

from msprobe_engine.core.errors import SettingsError, SinkError
from msprobe_engine.core.records import Sample, TensorRef
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.formats.monitor.reader import open_run
from msprobe_engine.probe.sinks.csv.monitor import CsvSink

ALWAYS = ("Jan01_00-00-00", "Dec31_23-59-59")
WINTER = ("Dec20_00-00-00", "Jan10_00-00-00")


def sink(root: Path, *stamps: str, rank: int = 0, ops: tuple[str, ...] = ("norm", "max")) -> CsvSink:
    settings = CsvSettings(path=str(root), append_output=stamps)
    return CsvSink(settings, MonitorSettings(ops=ops), output_dir=root, rank=rank)


def earlier(root: Path, stamp: str = "Dec31_23-59-59", rank: int = 0) -> Path:
    """A run of steps 0 and 1 whose directory has this stamp."""
    first = sink(root, rank=rank)
    for step in (0, 1):
        first.write(frame_of({"w": [float(step + 1)]}, step=step, scalars={"loss": 1.0}), [])
    first.close()
    return first.directory.rename(root / f"{stamp}-rank{rank}-0123abcd")


def norms(root: Path) -> dict[int, float]:
    (series,) = open_run(root).series(0, "grad_reduced", "norm").values()
    return dict(zip(series.steps.tolist(), series.values.tolist()))


def test_goes_on_over_new_year(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory whose stamp lies in the range is taken, the youngest of several, of this rank only; steps go on in its files."""
    there = earlier(tmp_path)
    earlier(tmp_path, "Jul01_00-00-00")
    earlier(tmp_path, "Dec31_23-59-59", rank=1)
    again = sink(tmp_path, *WINTER)
    assert again.directory == there
    again.write(frame_of({"w": [9.0]}, step=2), [])
    again.close()
    (table,) = there.glob("grad_reduced_*.csv")
    assert [line.split(",")[2] for line in table.read_text().splitlines()[1:]] == ["0", "1", "2"]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_steps_that_are_there_are_said_and_the_later_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Going back to a checkpoint writes steps again: one warning, and readers take the later row."""
    earlier(tmp_path)
    again = sink(tmp_path, *WINTER)
    for step in (1, 2):
        again.write(frame_of({"w": [8.0]}, step=step), [])
    again.close()
    assert norms(tmp_path) == {0: 1.0, 1: 8.0, 2: 8.0}
    assert [r.getMessage() for r in caplog.records if "are written again" in r.getMessage()]


def test_other_statistics_get_their_columns(tmp_path: Path) -> None:
    """When the resumed run has other statistics, old rows get nan in the new columns and lose none they share."""
    earlier(tmp_path)
    again = sink(tmp_path, *WINTER, ops=("mean", "norm"))
    again.write(frame_of({"w": [4.0]}, step=2), [])
    again.close()
    run = open_run(tmp_path)
    assert run.ops(0, "grad_reduced") == ["mean", "norm"]
    assert norms(tmp_path) == {0: 1.0, 1: 2.0, 2: 4.0}
    assert run.problems == {}


def test_settings_that_change_while_it_runs(tmp_path: Path) -> None:
    """`follow` takes new statistics over within a file."""
    one = sink(tmp_path)
    one.write(frame_of({"w": [1.0]}, step=0), [])
    one.follow(MonitorSettings(ops=("norm", "rms"), micro_batch_gradients=True))
    one.write(frame_of({"w": [2.0]}, step=1), [])
    one.close()
    assert open_run(tmp_path).ops(0, "grad_reduced") == ["norm", "rms"]
    assert norms(tmp_path) == {0: 1.0, 1: 2.0}


def test_columns_of_features_that_come_later(tmp_path: Path) -> None:
    """A derived number that appears in a later step, or that an earlier run had, is a column of all rows of the file."""

    def write(to: CsvSink, step: int, *columns: str) -> None:
        frame = frame_of({c: [float(step)] for c in columns}, step=step)
        frame.samples[:] = [Sample("linear_hook", "fc", TensorRef(i, TENSOR), extra={"column": c}) for i, c in enumerate(columns)]
        to.write(frame, [])

    first = sink(tmp_path)
    write(first, 0, "sr")
    write(first, 1, "sr", "stable,rank")
    first.close()
    place = first.directory.rename(tmp_path / "Dec31_23-59-59-rank0-0123abcd")
    again = sink(tmp_path, *WINTER)
    write(again, 2, "kernel_norm", "new")
    again.close()
    assert next(iter(place.glob("linear_hook*"))).read_text().count("\n") == 4
    run = open_run(tmp_path)
    assert sorted(run.ops(0, "linear_hook")) == ["kernel_norm", "new", "sr", "stable,rank"]
    assert run.problems == {}
    (series,) = run.series(0, "linear_hook", "new").values()
    assert series.values.tolist()[2] == 2.0


def test_no_directory_there(tmp_path: Path) -> None:
    """None in the range is an error that names the stamps that are there; a wrong range is a settings error."""
    earlier(tmp_path, "Jul01_00-00-00")
    with pytest.raises(SinkError, match="of this rank there: Jul01_00-00-00"):
        sink(tmp_path, *WINTER)
    with pytest.raises(SettingsError, match="two time stamps"):
        sink(tmp_path, "Dec20_00-00-00")
    with pytest.raises(SettingsError, match="'tomorrow' is no time stamp"):
        sink(tmp_path, "Dec20_00-00-00", "tomorrow")


def test_half_a_line_of_a_killed_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A half line at the end, as a killed writer can leave it, is cut off and said; no whole row is lost."""
    place = earlier(tmp_path)
    (table,) = place.glob("grad_reduced_*.csv")
    with table.open("a") as file:
        file.write('0,w,2,1.0,2.0,"[4')
    again = sink(tmp_path, *WINTER)
    again.write(frame_of({"w": [5.0]}, step=2), [])
    again.close()
    assert norms(tmp_path) == {0: 1.0, 1: 2.0, 2: 5.0}
    assert open_run(tmp_path).problems == {}
    assert [r for r in caplog.records if "bytes removed" in r.getMessage()]


def test_cut_at_any_byte(tmp_path: Path) -> None:
    """Wherever a file ends, also inside of a quoted name with a line break: no row that is written afterwards is lost, and no whole row
    from before."""
    name = 'new\nline,"x'
    one = CsvSink(CsvSettings(path=str(tmp_path)), None, output_dir=tmp_path, rank=0)
    for step in range(2):
        one.write(frame_of({name: [1.0], "w": [2.0]}, step=step), [])
    one.close()
    (path,) = tmp_path.glob("*/grad_reduced_*.csv")
    data = path.read_bytes()
    ends = [i + 1 for i in range(len(data)) if data[i : i + 1] == b"\n" and data[i - 7 : i] == b"reduced"]  # of rows
    assert len(ends) == 4
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        again = CsvSink(CsvSettings(path=str(tmp_path), append_output=ALWAYS), None, output_dir=tmp_path, rank=0)
        again.write(frame_of({name: [1.0], "w": [2.0]}, step=10), [])
        again.close()
        found = {key.name: series.steps.tolist() for key, series in open_run(tmp_path).series(0, "grad_reduced", "norm").items()}
        whole = sum(end <= cut for end in ends)
        assert found == {name: [*[0, 1][: (whole + 1) // 2], 10], "w": [*[0, 1][: whole // 2], 10]}, cut


def test_killed_and_resumed(tmp_path: Path) -> None:
    """After kill -9 in the middle of writing, a resumed run has all steps once and no damage."""
    code = f"""
import sys
from pathlib import Path
sys.path.append({str(Path(frames_of_lists.__file__).parent)!r})
from frames_of_lists import frame_of
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.core.settings.schema import CsvSettings
sink = CsvSink(CsvSettings(path={str(tmp_path)!r}, steps_per_file=20), None, output_dir=Path("."), rank=0)
for step in range(10**9):
    sink.write(frame_of({{f"p{{i}}": [1.0] for i in range(50)}}, step=step), [])
    print(step, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = [int(process.stdout.readline()) for _ in range(30)][-1]
        process.send_signal(signal.SIGKILL)
    (place,) = tmp_path.iterdir()
    place.rename(tmp_path / "Dec31_23-59-59-rank0-0123abcd")
    there = max(open_run(tmp_path).series(0, "grad_reduced", "norm").popitem()[1].steps.tolist())
    again = sink(tmp_path, *WINTER)
    again.write(frame_of({f"p{i}": [1.0] for i in range(50)}, step=there + 1), [])
    again.close()
    run = open_run(tmp_path)
    found = run.series(0, "grad_reduced", "norm")
    assert there >= last
    assert all(series.steps.tolist() == list(range(there + 2)) for series in found.values())
    assert len(found) == 50


def test_links_in_the_directory_are_not_followed(tmp_path: Path) -> None:
    """A link in place of a table is an error, and what it points to stays as it is."""
    place = earlier(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text("no line end")
    (place / "actv_0-99.csv").symlink_to(secret)
    with pytest.raises(SinkError, match="cannot go on in"):
        sink(tmp_path, *WINTER)
    assert secret.read_text() == "no line end"
