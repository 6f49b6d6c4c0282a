"""What is said when a watched run is over."""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from pathlib import Path

import pytest

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame, Sample, TensorDescription, TensorRef
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.statistics.rows import empty
from msprobe_engine.probe.closing_words import ClosingWords

NUMBER = TensorDescription("torch.Tensor", "torch.float32", (), False)


def frame(step: int, seconds: float = 1.0, *, watched: bool = True) -> Frame:
    samples = [Sample("grad_reduced", "w", TensorRef(0, NUMBER), "reduced", -1, 0, {})] if watched else []
    return Frame(step, 0, empty(1), samples=samples, scalars={"step_seconds": seconds})


def alert(rule: str, step: int, **extra: object) -> Alert:
    return Alert(rule, "critical", "grad", "w", step, 0, 1.0, "", f"{rule}: w, rank 0 step {step}", extra=dict(extra))


def words(directory: Path, *, world_size: int = 1, **sections: object) -> ClosingWords:
    if directory.is_dir() and not any(directory.iterdir()):
        (directory / "written").write_text("by a sink")
    return ClosingWords(load_settings({"output_dir": str(directory), **sections}), world_size)


def said(text: str) -> dict[str, str]:
    """Line to what it says."""
    first, *rest = text.splitlines()
    assert first == "msprobe: the run is over"
    return {line[:14].strip(): line[14:] for line in rest}


def test_a_run_without_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, files, and what to look at next; every line is short enough to be read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.csv").write_bytes(b"x" * 500)
    for place in ("monitor", "another_launch"):  # of which one is not of this run
        (tmp_path / "out" / place).mkdir()
        (tmp_path / "out" / place / "a.csv").write_bytes(b"x" * 1000)
    closing = words(tmp_path / "out", monitor=True)
    for step in range(3):
        closing.on_frame(frame(step), [])
    assert said(closing.text([], {})) == {
        "seen": "3 steps, 0 to 2",
        "alerts": "none",
        "files": "1.5 kB in out",
        "next": "msprobe monitor report out",
    }


def test_alerts_incidents_and_what_was_lost(tmp_path: Path) -> None:
    """The first alert in full; of one that is over nothing is counted; other ranks have their own."""
    closing = words(tmp_path, world_size=2, monitor=True)
    closing.on_frame(frame(4), [alert("loss_spike", 4), alert("nan_inf", 4), alert("nan_inf", 4)])
    closing.on_frame(frame(5), [alert("loss_spike", 5, over=True)])
    lines = said(closing.text(["step4-nan_inf"], {"csv": 2}))
    assert lines["alerts"] == "3 on this rank (nan_inf 2, loss_spike 1); first: loss_spike: w, rank 0 step 4"
    assert lines["incidents"] == "1: step4-nan_inf"
    assert lines["not written"] == "2 steps of csv"
    assert lines["next"].startswith("msprobe diagnose ")


@pytest.mark.parametrize(
    ("wanted", "missed", "proposed"),
    [
        ([0], None, True),
        ([1, 7, "9-12"], "steps 7, 9-12, which the run did not have", True),
        ([100], "step 100, which the run did not have", False),
    ],
)
def test_steps_that_were_to_be_dumped_and_did_not_come(wanted: list[object], missed: str | None, proposed: bool, tmp_path: Path) -> None:
    """They are named, and where none came no comparison of the dump is proposed."""
    closing = words(tmp_path, dump={"step": wanted})
    for step in range(3):
        closing.on_frame(frame(step), [])
    lines = said(closing.text([], {}))
    assert lines.get("not dumped") == missed
    assert ("next" in lines) is proposed


def test_an_incident_that_another_rank_began(tmp_path: Path) -> None:
    """This rank has no alert, and the next command looks at the incident all the same."""
    closing = words(tmp_path, world_size=2, monitor=True)
    closing.on_frame(frame(4), [])
    lines = said(closing.text(["step4-nan_inf"], {}))
    assert lines["alerts"] == "none on this rank"
    assert lines["next"].startswith("msprobe diagnose ")


@pytest.mark.parametrize(
    ("rule", "line", "sections", "again"),
    [
        ("nan_inf", "torchrun train.py", {}, True),
        ("loss_not_finite", "torchrun train.py", {}, True),
        ("loss_spike", "torchrun train.py", {}, False),
        ("nan_inf", "", {}, False),
        ("nan_inf", "torchrun train.py", {"incident": {"level": "mix"}}, False),
    ],
)
def test_the_launch_line_again_where_operators_are_missing(
    rule: str, line: str, sections: dict[str, object], again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a NaN, where the line is known and no operators were kept: whoever has only a monitor gets them by it."""
    monkeypatch.setenv("MSPROBE_LAUNCH_LINE", line)
    closing = words(tmp_path, monitor=True, **sections)
    closing.on_frame(frame(4), [alert(rule, 4)])
    last = closing.text([], {}).splitlines()[-1].strip()
    assert (last == f"msprobe run --preset nan -- {line}") is again
    assert last.startswith("next") is not again


def test_the_first_alert_is_the_first_in_the_order_of_execution(tmp_path: Path) -> None:
    """Not the first that a rule has found: the loss is made before the gradients."""
    closing = words(tmp_path, monitor=True)
    loss = dataclasses.replace(alert("loss_not_finite", 4), kind="loss", name="loss", message="the loss")
    closing.on_frame(frame(4), [alert("nan_inf", 4), loss])
    closing.on_frame(frame(5), [dataclasses.replace(loss, step=5, message="later")])
    assert said(closing.text([], {}))["alerts"].endswith("first: the loss")


def test_a_dump_is_for_a_comparison(tmp_path: Path) -> None:
    """Nothing is said of alerts where no rule has looked."""
    (tmp_path / "run").mkdir()
    closing = words(tmp_path / "run", dump=True)
    closing.on_frame(frame(0), [])
    lines = said(closing.text([], {}))
    assert "alerts" not in lines
    assert lines["next"].endswith(" GOLDEN")


def pack(path: Path | str, script: str = "train.py", directory: str = "/job") -> None:
    """What a run was started with, as far as these lines ask for it."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("msprobe/meta.json", "{}")
        file.writestr("msprobe/system/rank0.json", json.dumps({"program": {"script": script, "directory": directory}}))


@pytest.mark.parametrize(
    ("sections", "part", "place", "commands"),
    [
        ({"dump": True}, "dump", "out/a run", ["msprobe diagnose out/now 'out/a run'"]),
        ({"monitor": True}, "monitor", "out/a run", ["msprobe monitor report out/now", "msprobe diagnose out/now 'out/a run'"]),
        ({"dump": True}, "dump", "out/now/earlier-1", ["msprobe diagnose out/now out/now/earlier-1"]),
        ({"monitor": True}, "dump", "out/a run", ["msprobe monitor report out/now"]),
    ],
)
def test_the_run_before_it_is_offered_for_a_comparison(
    sections: dict[str, object], part: str, place: str, commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exact line, where the last run beside this one, or the one that was set aside, has what this one has."""
    monkeypatch.chdir(tmp_path)
    for directory in ("out/now", f"{place}/{part}", f"out/older/{part}"):
        Path(directory).mkdir(parents=True)
    for run in ("out/now", "out/a run", "out/older"):
        if Path(run).is_dir():
            pack(f"{run}/config_check_pack.zip")
    pack("out/now/config_check_pack.previous.zip", "/job/train.py", "/elsewhere")
    os.utime(f"out/older/{part}", (1, 1))
    Path("out/latest").symlink_to("now")
    closing = words(Path("out/now"), **sections)
    Path("out/now/written").write_text("by a sink")
    closing.on_frame(frame(0), [])
    text = closing.text([], {})
    block = text[text.index("  next") :].splitlines()
    assert [line[14:].partition("  #")[0] for line in block] == commands


@pytest.mark.parametrize("alerts", [{}, {"incidents/step2-nan_inf": ""}, {"monitor/rank0": '{"rule": "nan_inf"}'}])
@pytest.mark.parametrize("bad", [False, True])
def test_of_two_runs_the_one_with_alerts_is_the_target(alerts: dict[str, str], bad: bool, tmp_path: Path) -> None:
    """A run without alerts stands behind the one before it, which has some; where both have, this one is in question."""
    for place in ("now/monitor", "before/monitor/rank0", *(f"before/{place}" for place in alerts)):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for place, text in alerts.items():
        (tmp_path / "before" / place / "alerts.jsonl").write_text(text)
    for run in ("now", "before"):
        pack(tmp_path / run / "config_check_pack.zip")
    closing = words(tmp_path / "now", monitor=True)
    closing.on_frame(frame(2), [alert("loss_spike", 2)] if bad else [])
    pair = ("before", "now") if alerts and not bad else ("now", "before")
    assert f"msprobe diagnose {tmp_path}/{pair[0]} {tmp_path}/{pair[1]}  #" in closing.text([], {})


def test_a_dump_of_other_steps_is_no_partner(tmp_path: Path) -> None:
    """Step 37 is not compared with step 0."""
    for place in ("now/dump/step37", "before/dump/step0", "older/dump/step37"):
        (tmp_path / place).mkdir(parents=True)
    for run in ("now", "before", "older"):
        pack(tmp_path / run / "config_check_pack.zip")
    os.utime(tmp_path / "older" / "dump", (1, 1))
    closing = words(tmp_path / "now", dump=True)
    (tmp_path / "now" / "written").write_text("by a sink")
    closing.on_frame(frame(37), [])
    assert f"diagnose {tmp_path}/now {tmp_path}/older  #" in closing.text([], {})


@pytest.mark.parametrize("script", ["other.py", None])
def test_a_run_of_another_program_is_no_partner(script: str | None, tmp_path: Path) -> None:
    """Nor is one that does not say what it was started with; the newest one of this program is named, whatever its arguments."""
    for place in ("now/dump/step0", "before/dump/step0", "older/dump/step0"):
        (tmp_path / place).mkdir(parents=True)
    pack(tmp_path / "now" / "config_check_pack.zip")
    pack(tmp_path / "older" / "config_check_pack.zip")
    if script:
        pack(tmp_path / "before" / "config_check_pack.zip", script)
    os.utime(tmp_path / "older" / "dump", (1, 1))
    closing = words(tmp_path / "now", dump=True)
    closing.on_frame(frame(0), [])
    assert f"diagnose {tmp_path}/now {tmp_path}/older  #" in closing.text([], {})


def test_the_run_offered_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that begins as an option is given as a whole path; one with a line break is not offered."""
    monkeypatch.chdir(tmp_path)
    for run in ("now", "-before", "two\nlines"):
        (tmp_path / run / "dump/step0").mkdir(parents=True)
        pack(tmp_path / run / "config_check_pack.zip")
    os.utime("-before/dump", (1, 1))
    closing = words(Path("now"), dump=True)
    closing.on_frame(frame(0), [])
    assert f"diagnose now {tmp_path}/-before  #" in closing.text([], {})


def test_slow_down_is_measured_against_the_steps_that_nobody_looked_at(tmp_path: Path) -> None:
    """Where there are enough of both; the first steps of a run are slow for other reasons."""
    closing = words(tmp_path, monitor={"interval": 2})
    for step in range(23):
        closing.on_frame(frame(step, 9.0 if step < 3 else 1.5 if step % 2 else 1.0, watched=bool(step % 2)), [])
    assert said(closing.text([], {}))["slow-down"] == (
        "a step that was looked at took 1.50 times as long as one that was not (medians of 10 and 10), 1.250 over all steps"
        "; next time --set monitor.interval=25: 1.020"
    )
    every = words(tmp_path, monitor=True)
    for step in range(30):
        every.on_frame(frame(step), [])
    assert "slow-down" not in said(every.text([], {}))
    faster = words(tmp_path, monitor={"interval": 2})
    for step in range(23):
        faster.on_frame(frame(step, 0.9 if step % 2 else 1.0, watched=bool(step % 2)), [])
    assert said(faster.text([], {}))["slow-down"].startswith("none that can be measured")
    for first in (0, 7000):  # what each of the first steps costs is not paid later, after a restart neither
        begun = words(tmp_path, monitor={"interval": 2, "first_steps": 30})
        for step in range(53):
            begun.on_frame(frame(first + step, 9.0 if step < 30 else 1.5 if step % 2 else 1.0, watched=step < 30 or bool(step % 2)), [])
        assert "(medians of 11 and 12), 1.239 over all steps" in said(begun.text([], {}))["slow-down"]


@pytest.mark.parametrize(("interval", "line"), [(10, "tensors in 3 of 23 steps"), (1, None)])
def test_in_how_many_steps_tensors_were_looked_at(interval: int, line: str | None, tmp_path: Path) -> None:
    """Where not in all of them: without an alert nothing is known of the others."""
    closing = words(tmp_path, monitor={"interval": interval})
    for step in range(23):
        closing.on_frame(frame(step, watched=step % interval == 0), [])
    assert said(closing.text([], {})).get("looked at") == line


@pytest.mark.parametrize(
    ("interval", "ratio", "sections", "advice"),
    [
        (10, 1.1, {}, ""),
        (2, 1.1, {}, "monitor.interval=5: 1.020"),
        (2, 100.0, {}, "monitor.interval=1000: 1.099"),
        (2, 1.5, {"replica_check": {"interval": 2}}, "monitor.interval=25 --set monitor.replica_check.interval=25: 1.020"),
        (2, 1.5, {"replica_check": {"interval": 50}}, "monitor.interval=25: 1.020"),
        (2, 0.9, {}, ""),
    ],
)
def test_an_interval_that_costs_little_is_proposed(
    interval: int, ratio: float, sections: dict[str, object], advice: str, tmp_path: Path
) -> None:
    """For the next run, where watching took more than 2 % of this one; with the cost that it would have had."""
    closing = words(tmp_path, monitor={"interval": interval, **sections})
    for step in range(20 * interval):
        closing.on_frame(frame(step, 1.0 if step % interval else ratio, watched=not step % interval), [])
    told = said(closing.text([], {}))["slow-down"]
    assert told.endswith(f"; next time --set {advice}") if advice else "next time" not in told


def test_no_command_reads_what_was_not_written(tmp_path: Path) -> None:
    """A read-only place: the directory is not there, and what would read it is not proposed."""
    for sections in ({"monitor": True}, {"dump": True}):
        closing = words(tmp_path / "absent", **sections)
        closing.on_frame(frame(0), [alert("nan_inf", 0)])
        lines = said(closing.text(["step0-nan_inf"], {"csv": 1}))
        assert lines["files"].startswith("none in ")
        assert lines["not written"] == "1 step of csv"
        assert "next" not in lines
    assert not (tmp_path / "absent").exists()


def test_a_long_message_is_cut_between_words(tmp_path: Path) -> None:
    closing = words(tmp_path, monitor=True)
    closing.on_frame(frame(0), [dataclasses.replace(alert("nan_inf", 0), message="word " * 100)])
    assert said(closing.text([], {}))["alerts"].endswith(" word ...")


def test_nothing_was_seen(tmp_path: Path) -> None:
    assert words(tmp_path, monitor=True).text([], {}) == ""
