"""`csv2tensorboard_by_step` and ``msprobe monitor csv2tb``, read with TensorBoard's own reader."""

from __future__ import annotations

import tempfile
from pathlib import Path

import monitor_frames as F
import numpy as np
import pytest
from frames_of_lists import frame_of
from hypothesis import given, settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.formats.monitor.convert.csv2tb import csv2tensorboard_by_step
from msprobe_engine.probe.sinks.csv.features import FEATURES
from msprobe_engine.probe.sinks.csv.monitor import CsvSink


def sink(root: Path, rank: int = 0, micro: bool = False) -> CsvSink:
    monitor = MonitorSettings(ops=F.OPS, micro_batch_gradients=micro)
    return CsvSink(CsvSettings(path=str(root), steps_per_file=3), monitor, output_dir=root, rank=rank)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_places_and_tags(tmp_path: Path) -> None:
    """One directory per rank and family, tags of the existing tool; a second phase of a name says what it is."""
    one = sink(tmp_path, 3)
    for step in (4, 5, 6):
        one.write(frame_of({"w": [float(step)]}, step=step), [])
        one.write(frame_of({"w": [1.0]}, step=step, phase="clipped"), [])
        one.write(frame_of({"fc.output": [2.0]}, step=step, family="actv", phase="", micro_step=1), [])
    one.close()
    out = csv2tensorboard_by_step(str(tmp_path))
    assert out.parent == tmp_path
    assert out.name.endswith("-csv2tensorboard_by_step")
    assert sorted(p.name for p in (out / "rank3").iterdir()) == ["actv", "grad_reduced"]
    found = scalars(out / "rank3" / "grad_reduced")
    assert found["vp0:w/norm"] == [(4, 4.0), (5, 5.0), (6, 6.0)]
    assert found["vp0:w:clipped/norm"] == [(4, 1.0), (5, 1.0), (6, 1.0)]
    assert scalars(out / "rank3" / "actv")["vp0:fc.output:micro1/max"] == [(4, 2.0), (5, 2.0), (6, 2.0)]


@given(frames=F.runs())
@settings(max_examples=12, deadline=None)
def test_every_number_is_there(frames: list[Frame]) -> None:
    """As many values as the files have, each the float32 of its number."""
    if not any(frame.samples for frame in frames):
        return
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        one = sink(root)
        for frame in frames:
            one.write(frame, [])
        one.close()
        out = csv2tensorboard_by_step(root)
        found: list[float] = []
        for place in (out / "rank0").iterdir():
            if place.name not in FEATURES:
                found += [value for series in scalars(place).values() for _, value in series]
        with np.errstate(over="ignore"):
            numbers = [float(np.float32(v)) for (family, *_), v in F.wanted(frames).items() if family not in FEATURES]
        np.testing.assert_equal(np.sort(found), np.sort(numbers))


def test_several_directories_of_a_rank(tmp_path: Path) -> None:
    """After a resume all directories in the range survive; a range chooses; a second conversion into a directory replaces the first."""
    for stamp, step in (("Dec31_10-00-00", 0), ("Jan01_10-00-00", 1), ("Jul01_10-00-00", 2)):
        one = sink(tmp_path)
        one.write(frame_of({"w": [1.0]}, step=step), [])
        one.close()
        one.directory.rename(tmp_path / f"{stamp}-rank0-aa")
    out = tmp_path / "curves"
    for _ in range(2):
        csv2tensorboard_by_step(tmp_path, "Dec01_00-00-00", "Jan31_00-00-00", 1, ["grad_reduced"], str(out))
    assert [step for step, _ in scalars(out / "rank0" / "grad_reduced")["vp0:w/norm"]] == [0, 1]
    assert len(list((out / "rank0" / "grad_reduced").iterdir())) == 1


def test_processes(tmp_path: Path) -> None:
    """Several processes write what one writes."""
    for rank in range(3):
        one = sink(tmp_path / "run", rank)
        one.write(frame_of({"w": [float(rank)]}, rank=rank), [])
        one.close()
    outs = [csv2tensorboard_by_step(tmp_path / "run", process_num=n, output_dirpath=tmp_path / str(n)) for n in (1, 2)]
    found = [{r: scalars(out / f"rank{r}" / "grad_reduced") for r in range(3)} for out in outs]
    assert found[0] == found[1]
    assert found[0][2]["vp0:w/norm"] == [(0, 2.0)]


def test_wrong_arguments(tmp_path: Path) -> None:
    """What is wrong is said with what is allowed."""
    one = sink(tmp_path)
    one.write(frame_of({"w": [1.0]}), [])
    one.close()
    for arguments, message in (
        ({"process_num": 0}, "1 to 128"),
        ({"process_num": True}, "1 to 128"),
        ({"data_type_list": ["grads"]}, "'grads' is no family"),
        ({"data_type_list": "actv"}, "a list of families"),
        ({"data_type_list": ["actv"]}, "none of the families actv"),
        ({"time_start": "today"}, "no time stamp"),
        ({"time_start": "Jan01_00-00-00", "time_end": "Jan01_00-00-01"}, "no directory has a time stamp"),
    ):
        with pytest.raises(UsageError, match=message):
            csv2tensorboard_by_step(tmp_path, **arguments)  # type: ignore[arg-type]


def test_command_and_existing_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints where the result is; the function has its name of the existing tool."""
    from msprobe.pytorch.monitor.csv2tb import csv2tensorboard_by_step as existing

    assert existing is csv2tensorboard_by_step
    one = sink(tmp_path)
    one.write(frame_of({"w": [1.0]}), [])
    one.close()
    out = tmp_path / "o"
    assert main(["monitor", "csv2tb", str(tmp_path), "--data_type_list", "grad_reduced, actv", "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert (out / "rank0" / "grad_reduced").is_dir()
    assert main(["monitor", "csv2tb", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("processes", ["1", "2"])
def test_what_is_left_out_is_counted_and_the_code_says_so(tmp_path: Path, processes: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that are damaged, in two families; a last line that was cut when the writer was killed is no damage."""
    one = sink(tmp_path)
    for step in range(3):
        one.write(frame_of({"w": [1.0]}, step=step), [])
        one.write(frame_of({"w": [1.0]}, step=step, family="param_origin", phase=""), [])
    one.close()
    files = sorted(tmp_path.rglob("*_*-*.csv"))
    assert len(files) == 2
    command = ["monitor", "csv2tb", str(tmp_path), "--process_num", processes, "-o"]
    for path in files:
        path.write_text(path.read_text() + "vpp_sta")
    assert main([*command, str(tmp_path / "cut")]) == 0
    for path in files:
        head, *rows = path.read_text().splitlines()[:-1]
        path.write_text("\n".join([head, rows[0].replace("w", "w,x,y,z", 1), *rows[1:], ""]))
    capsys.readouterr()
    assert main([*command, str(tmp_path / "o")]) == 3
    said = capsys.readouterr()
    assert "2 rows, records or files could not be read and are not in the result" in said.err
    assert said.out.strip() == str(tmp_path / "o")
