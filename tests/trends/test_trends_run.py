"""The page of a run: what it says beside the numbers (alerts at their steps, facts, ranks that stand apart, masks), and the two commands
that write it."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from frames_of_lists import frame_of

from msprobe_engine.cli.main import main
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Sample
from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings
from msprobe_engine.probe.sinks.csv.monitor import CsvSink
from msprobe_engine.report.trends.alerts import MAX_ALERTS
from msprobe_engine.report.trends.collect import collect
from msprobe_engine.report.trends.model import Trends
from msprobe_engine.report.trends.page import manifest
from msprobe_engine.report.trends.sources.open_source import open_source
from msprobe_engine.report.trends.sources.source import SCALARS, Wanted

FIXTURES = Path(__file__).parents[1] / "fixtures"


def write(
    root: Path, rank: int, steps: dict[int, dict[str, list[float]]], *, alerts: dict[int, list[Alert]] | None = None, loss: float = 1.0
) -> None:
    """One rank of a run by the CSV sink: step to tensors."""
    sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=root, rank=rank)
    for step, tensors in steps.items():
        scalars = {"step_seconds": 2.0, "loss": loss / (step + 1)} if tensors else {}
        sink.write(frame_of(tensors, step=step, rank=rank, scalars=scalars), (alerts or {}).get(step, []))
    sink.close()


def alert(step: int, rank: int = 0, name: str = "layers.1.w") -> Alert:
    return Alert("nan_inf", "critical", "grad", name, step, rank, math.nan, "finite", "it is NaN", extra={"meaning": "m", "next": "n"})


def page_of(root: Path, wanted: Wanted | None = None, **options: Any) -> tuple[Trends, dict[str, Any]]:
    """The page of a run, and its one run as the page has it."""
    trends = collect([open_source(root, wanted)], **options)
    return trends, manifest(trends)["runs"][0]


def test_alerts_are_at_their_steps_and_what_is_over_is_listed_and_not_counted(tmp_path: Path) -> None:
    """A lane per rule has the columns of what began, as in `msprobe monitor analyze`; the end of one is a line of the list."""
    over = dataclasses.replace(alert(3), extra={"over": True})
    write(tmp_path, 0, {step: {"layers.0.w": [1.0]} for step in range(4)}, alerts={1: [alert(1), alert(1)], 3: [over]})
    _, run = page_of(tmp_path)
    assert run["lanes"] == [{"rule": "nan_inf", "severity": "critical", "marks": [(1, 2)]}]
    assert (len(run["alerts"]), run["alertCount"]) == (3, 2)
    assert run["meanings"] == [{"rule": "nan_inf", "meaning": "m", "next": "n"}]


def test_alerts_are_listed_in_the_order_of_execution(tmp_path: Path) -> None:
    """Not in that in which the rules found them: the loss before the gradients that come of it, whatever rank says so."""
    of = {
        kind: dataclasses.replace(alert(1, name=name), kind=kind) for kind, name in (("grad", "w"), ("step", "grad_norm"), ("loss", "loss"))
    }
    write(tmp_path, 0, {step: {"layers.0.w": [1.0]} for step in range(3)}, alerts={1: [of["step"], of["grad"]], 2: [alert(2)]})
    write(tmp_path, 1, {step: {"layers.0.w": [1.0]} for step in range(3)}, alerts={1: [dataclasses.replace(of["loss"], rank=1)]})
    _, run = page_of(tmp_path)
    assert [(a["step"], a["name"]) for a in run["alerts"]] == [(1, "loss"), (1, "w"), (1, "grad_norm"), (2, "layers.1.w")]


def test_a_page_or_a_directory_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``-o`` of the commands that make one page: a name that ends in .html is the page, any other one a directory."""
    write(tmp_path / "run", 0, {step: {"layers.0.w": [1.0]} for step in range(3)})
    monkeypatch.chdir(tmp_path)
    for command, name in ((["trends"], "trends.html"), (["monitor", "report"], "report.html")):
        for output, page in ((f"{name[0]}/b", f"{name[0]}/b/{name}"), (f"x-{name}", f"x-{name}"), ("run", f"run/{name}")):
            assert main([*command, "run", "-o", output]) == 0
            assert Path(page).is_file()


def test_runs_with_other_numbers_of_ranks_are_pointed_to_diagnose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where layouts differ, what one rank holds is something else than what that rank of the other run holds."""
    for name, ranks in (("a", 1), ("b", 2)):
        for rank in range(ranks):
            write(tmp_path / name, rank, {step: {"layers.0.w": [1.0]} for step in range(3)})
    for other, said in (("a", False), ("b", True)):
        main(["trends", str(tmp_path / "a"), str(tmp_path / other), "-o", str(tmp_path / "x")])
        assert ("the runs have 1 and 2 ranks: " in capsys.readouterr().out) == said


def test_alerts_without_any_number_make_a_page(tmp_path: Path) -> None:
    """A rank that has written alerts alone has their count in each step for its numbers."""
    write(tmp_path, 0, {2: {}, 5: {}}, alerts={2: [alert(2)], 5: [alert(5), alert(5)]})
    trends, run = page_of(tmp_path)
    assert {name: [target.shown for target in metric.targets] for name, metric in trends.metrics.items()} == {SCALARS: ["alerts"]}
    assert run["lanes"][0]["marks"] == [(0, 1), (1, 2)]
    assert main(["trends", str(tmp_path)]) == 1


def test_the_facts_of_a_run(tmp_path: Path) -> None:
    """When it began, where, how long its steps took, and by which settings it was monitored: of all ranks, by their own files."""
    for rank in range(2):
        write(tmp_path, rank, {step: {"layers.0.w": [1.0]} for step in range(3 + rank)})
        (place,) = tmp_path.glob(f"monitor/*rank{rank}-*/run.json")
        told = json.loads(place.read_text())
        assert told["host"]
        place.write_text(json.dumps(told | {"host": f"node{rank}", "world_size": 2, "started": f"T{rank}", "started_unix": 5.0 - rank}))
    facts = page_of(tmp_path)[1]["facts"]
    assert (facts["started"], facts["hosts"], facts["world"], facts["seconds"]) == ("T1", ["node0", "node1"], 2, 8.0)
    assert dict(facts["settings"])["ops"] == '["norm", "min", "max", "mean", "nans", "zeros"]'
    (tmp_path / "bare" / "monitor" / "Dec03_21-34-40-rank0-1a2b").mkdir(parents=True)
    (tmp_path / "bare/monitor/Dec03_21-34-40-rank0-1a2b/grad_reduced_0-99.csv").write_text("vpp_stage,name,step,norm\n0,a.w,0,1\n")
    assert page_of(tmp_path / "bare")[1]["facts"]["started"] == ""


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_apart(tmp_path: Path, ranks: int) -> None:
    """A rank that differs from the others is named with its factor, also where it always does; no rank is where all agree."""
    for rank in range(ranks):
        write(tmp_path, rank, {s: {"layers.0.w": [100.0 if rank == 1 else 1.0], "head.w": [3.0]} for s in range(3)})
    trends, _ = page_of(tmp_path)
    (found,) = trends.runs[0].stand_out
    assert (found.what, found.rank, round(found.factor, 3)) == ("rank", 1, 100.0)
    assert trends.metrics[found.metric].targets[found.target].shown == "layers.0.w"


def test_the_rank_that_leaves_the_others_is_named(tmp_path: Path) -> None:
    """Where ranks go further apart than usual, the one that did so is said, below the others or above."""
    for rank in range(4):
        write(tmp_path, rank, {s: {"layers.0.w": [0.01 if (rank, s) == (3, 5) else 1.0]} for s in range(9)})
    found = [one for one in page_of(tmp_path)[0].runs[0].stand_out if one.what == "ranks"]
    assert [(one.step, one.rank, round(one.factor, 3)) for one in found] == [(5, 3, 100.0)]


def test_masks_are_no_fault(tmp_path: Path) -> None:
    """-Inf of activations in a run that says it has seen masks is no finding; a +Inf is, and so is -Inf in a step with an alert."""
    place = tmp_path / "monitor" / "Dec03_21-34-40-rank0-1a2b"
    place.mkdir(parents=True)
    rows = ["0,masked,0,-1,inf,-inf,1", "0,masked,1,-1,inf,-inf,1", "0,scores,0,-1,1,0,1"]
    (place / "actv_0-99.csv").write_text("\n".join(["vpp_stage,name,step,micro_step,norm,min,max", *rows]) + "\n")
    masks = {"masks": {"tensors": 1, "first": "masked", "step": 0}}
    (place / "run.json").write_text(json.dumps({"rank": 0}))
    page = str(tmp_path / "page.html")
    assert main(["trends", str(tmp_path), "-o", page]) == 1
    (place / "run.json").write_text(json.dumps({"rank": 0} | masks))
    assert main(["trends", str(tmp_path), "-o", page]) == 0
    assert any("taken for that of masks" in what for what in page_of(tmp_path)[0].runs[0].problems)
    (place / "actv_0-99.csv").write_text((place / "actv_0-99.csv").read_text() + "0,scores,1,-1,inf,0,inf\n")
    assert [one.step for one in page_of(tmp_path)[0].runs[0].nonfinite] == [1]


def test_a_range_of_time(tmp_path: Path) -> None:
    """Of directories of several times only those in the range are read."""
    for stamp, step in (("Nov21_09-00-00", 1), ("Nov22_09-00-00", 2), ("Nov23_09-00-00", 3)):
        place = tmp_path / "monitor" / f"{stamp}-rank0-1a2b"
        place.mkdir(parents=True)
        (place / "grad_reduced_0-99.csv").write_text(f"vpp_stage,name,step,norm\n0,a.w,{step},1\n")
    wanted = Wanted(since="Nov22_00-00-00", until="Nov22_23-00-00")
    assert page_of(tmp_path, wanted)[0].runs[0].steps == (1, 2, 2)
    assert main(["trends", str(tmp_path), "--since", "Dec01_00-00-00"]) == 2


def test_a_tensor_without_elements_is_not_one_with_nan(tmp_path: Path) -> None:
    """An expert that gets no token has rows without numbers: that is nothing bad, and the page has its other steps."""
    write(tmp_path, 0, {0: {"experts.0.w": [], "b.w": [1.0]}, 1: {"experts.0.w": [2.0], "b.w": [1.0]}, 2: {"b.w": [math.nan]}})
    trends, _ = page_of(tmp_path)
    targets = trends.metrics["grad_reduced, reduced"].targets
    assert [(targets[one.target].shown, one.step) for one in trends.runs[0].nonfinite] == [("b.w", 2)]
    assert trends.runs[0].grids["grad_reduced, reduced", "norm"].cube.missing.sum() == 2


def test_alerts_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    """A page lists the first ones, and says how many more there are."""
    for rank in range(10):
        write(tmp_path, rank, {0: {"layers.0.w": [1.0]}}, alerts={0: [alert(0, rank) for _ in range(60)]})
    _, run = page_of(tmp_path)
    assert (len(run["alerts"]), run["alertsLeftOut"], run["alertCount"]) == (MAX_ALERTS, 100, 600)


def test_the_report_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`monitor report` writes the page beside the run with mode 0640 and prints a summary, of the files of the monitor alone; a directory
    without a run is an error."""
    write(tmp_path, 0, {s: {"layers.0.w": [1.0 + 9 * (s == 2)]} for s in range(4)}, alerts={2: [alert(2)]})
    shutil.copytree(FIXTURES / "26.2.0" / "two_ranks", tmp_path / "dump")
    assert main(["monitor", "report", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "1 alert of rule nan_inf" in said
    assert "rows from csv\n" in said
    assert (tmp_path / "analysis" / "report-1" / "report.html").stat().st_mode & 0o777 == 0o640
    (tmp_path / "empty").mkdir()
    assert main(["monitor", "report", str(tmp_path / "empty")]) == 2
    assert main(["monitor", "report", str(tmp_path / "dump")]) == 2


def test_the_report_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a run is, its report holds a number of megabytes that is known; what was put together says itself."""
    monkeypatch.setattr("msprobe_engine.cli.monitor.report.MEGABYTES", 0.001)
    write(tmp_path, 0, {s: {f"layers.{i}.w": [1.0] for i in range(8)} for s in range(60)})
    assert main(["monitor", "report", str(tmp_path)]) == 0
    assert main(["trends", str(tmp_path), "--size", "0.001"]) == 0
    assert (tmp_path / "analysis" / "report-1" / "report.html").read_bytes() == (
        tmp_path / "analysis" / "trends-1" / "trends.html"
    ).read_bytes()


SHOWN: dict[str, tuple[dict[str, Any], int]] = {
    "all is well": ({}, 0),
    "a layer that jumps": ({"norms": [1.0, 1.0, 50.0]}, 0),
    "a gradient that is NaN": ({"norms": [1.0, math.nan, 1.0]}, 1),
    "a gradient that is infinite": ({"norms": [1.0, 1.0, math.inf]}, 1),
    "a loss that is NaN": ({"loss": math.nan}, 1),
    "an alert": ({"alerts": {1: [alert(1)]}}, 1),
    "a condition that is over": ({"alerts": {1: [dataclasses.replace(alert(1), extra={"over": True})]}}, 0),
    "a file that is damaged": ({"damage": True}, 3),
    "a NaN and a file that is damaged": ({"norms": [1.0, math.nan, 1.0], "damage": True}, 1),
}
"""What a run holds, and the exit code."""


@pytest.mark.parametrize("command", [["monitor", "report"], ["trends"]])
@pytest.mark.parametrize("case", SHOWN)
def test_exit_codes_say_what_the_page_shows(tmp_path: Path, case: str, command: list[str]) -> None:
    """1: the page shows an alert or a number that is not finite; else 3: something could not be read; else 0."""
    held, code = SHOWN[case]
    steps = {step: {"layers.0.w": [norm]} for step, norm in enumerate(held.get("norms", [1.0, 1.0, 1.0]))}
    write(tmp_path, 0, steps, alerts=held.get("alerts"), loss=held.get("loss", 1.0))
    if held.get("damage"):
        table = next(tmp_path.rglob("grad_reduced*.csv"))
        table.with_name("grad_unreduced_0-2.csv").write_bytes(b"vpp_stage,name,step,norm\n0,layers.0.w,no number,1\n")
    assert main([*command, str(tmp_path), "-o", str(tmp_path / "page.html")]) == code


def test_a_fall_is_told_from_a_rise_and_moments_that_fill_are_no_news(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A norm that falls to a tenth of its median is said as 1/10; a second moment that is small in the first step is not said."""
    sink = CsvSink(CsvSettings(), MonitorSettings(), output_dir=tmp_path, rank=0)
    for step, (gradient, moment) in enumerate([(10.0, 0.1), (10.0, 5.0), (1.0, 5.0), (10.0, 5.0)]):
        frame = frame_of({"a.w": [gradient], "b.w": [moment]}, step=step)
        frame.samples[1] = Sample("exp_avg_sq", "b.w", frame.samples[1].ref)
        sink.write(frame, [])
    sink.close()
    assert main(["monitor", "report", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if "median" in line]
    assert lines == ["    step 2: a.w (grad_reduced, reduced, norm): 1/10 of its median"]
