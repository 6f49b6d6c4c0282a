"""`diagnose` on output directories: dumps, monitor output and incidents side by side are all looked at, and what names a record leads."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from written_monitor import Monitor, alert

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.find.collectives.replicas import odd_ones
from msprobe_engine.find.nonfinite.whole_run import nan_analyze_run
from msprobe_engine.find.run import diagnose

LINE = "File model.py, line 7, in forward, return torch.log(x)"
BORN = "Torch.log.0.forward"


def _record(values: float) -> dict[str, Any]:
    return {"Max": values, "Min": -1.0, "Mean": 0.25, "Norm": abs(values)}


def _dump(rank_dump: Any, root: Path, step: int, out: float = 1.5) -> Path:
    """A dump of one rank: linear, then log, whose result is `out`, then a sum."""
    made = rank_dump()
    plain = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4], "requires_grad": True}
    rows = [plain | _record(value) for value in (0.5, 0.75, out, 2 * out)]
    for at, name in enumerate(("Functional.linear", "Torch.log", "Tensor.sum")):
        made.api(name, [rows[at]], [rows[at + 1]])
    made.stack = {BORN: [LINE]}
    place = root / f"step{step}" / "rank0"
    made.write(place)
    (place / "stack.json").write_text(json.dumps({"0": [[BORN], [LINE]]}))
    return root


def _incident(rank_dump: Any, root: Path, step: int) -> Path:
    place = _dump(rank_dump, root / "incidents" / f"step{step}-nan_inf", step, float("nan"))
    (place / "incident.json").write_text(json.dumps({"version": 1, "step": step, "rule": "nan_inf"}))
    (place / "summary.md").write_text("what happened\n")
    return place


def _monitor(root: Path, step: int = 0, rank: int = 0) -> Monitor:
    """Monitor output that holds an alert at the step, of the call that a function makes."""
    run = Monitor(root)
    if step:
        name = f"{BORN}.output.0"
        run.alerts = [alert("nan_inf", step, rank, name, kind="actv", extra={"family": "actv"}, value=float("nan"), message=f"{name}: NaN")]
    run.write()
    return run


def test_a_dump_beside_a_monitor_is_compared(tmp_path: Path, rank_dump: Any) -> None:
    """The pair of dumps leads, as it does when it is named alone; the monitor's finding and the incident are evidence, and the paths of
    all three are said."""
    _monitor(tmp_path / "good")
    run = Monitor(tmp_path / "bad")
    run.put(1, 0, "actv", "layers.1.output", "9")
    run.write()
    _dump(rank_dump, tmp_path / "good" / "dump", 0)
    _dump(rank_dump, tmp_path / "bad" / "dump", 0, 2.5)
    _incident(rank_dump, tmp_path / "bad", 2)
    alone = diagnose(tmp_path / "bad" / "dump", tmp_path / "good" / "dump").first_suspect
    found = diagnose(tmp_path / "bad", tmp_path / "good")
    assert alone is not None
    assert found.first_suspect == alone
    assert (alone.record, alone.source) == (BORN, LINE)
    told = "\n".join(found.evidence)
    assert "monitor output bad: First difference: step 0, rank 1, module layers.1, actv/layers.1.output" in told
    assert "incident step2-nan_inf: First NaN or Inf: model.py:7 forward: logarithm of a negative number" in told
    assert f"(step 2, rank 0, {BORN})" in told
    assert found.looked_at["dump"] == str(tmp_path / "bad" / "dump")
    assert found.looked_at["monitor output"] == str(tmp_path / "bad")
    assert str(tmp_path / "bad" / "incidents" / "step2-nan_inf") in found.looked_at["incident"]


def test_an_incident_names_the_record(tmp_path: Path, rank_dump: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A monitored run with an incident: the record and source line that nan_analyze gives, no key of the monitor; no further
    command would say more, and `monitor analyze` names the incident."""
    _monitor(tmp_path / "run", step=3)
    _incident(rank_dump, tmp_path / "run", 3)
    found = diagnose(tmp_path / "run")
    first = found.first_suspect
    assert first is not None
    assert (found.finding, first.record, first.source, first.module) == ("nonfinite", BORN, LINE, "")
    assert f"monitor output run: First seen NaN or Inf: step 3, rank 0, actv/{BORN}" in found.evidence
    assert found.next == []
    assert main(["monitor", "analyze", str(tmp_path / "run")]) == 1
    assert "nan_analyze -i DUMP" not in capsys.readouterr().out


@pytest.mark.parametrize("kept", ["empty", "linked", "linked one", "dump without dump.json"])
@pytest.mark.parametrize("beside", ["dump", "monitor"])
def test_what_cannot_be_read_is_no_all_clear(beside: str, kept: str, tmp_path: Path, rank_dump: Any) -> None:
    """An incident that is empty, a link that is not followed, and directories of steps without a dump are said, also where all the rest
    is healthy."""
    run, other = tmp_path / "run", tmp_path / "other"
    if beside == "dump" and kept != "dump without dump.json":
        _dump(rank_dump, run / "dump", 3)
    else:
        _monitor(run)
    incident = _incident(rank_dump, other, 3)
    place = run / "incidents"
    if kept == "empty":
        (place / incident.name).mkdir(parents=True)
    elif kept == "linked":
        place.symlink_to(other / "incidents")
    elif kept == "linked one":
        place.mkdir()
        (place / incident.name).symlink_to(incident)
    else:
        (run / "dump" / "step3" / "rank0").mkdir(parents=True)
    found = diagnose(run)
    assert found.finding == "none"
    assert any("not looked at: " in problem for problem in map(str, found.problems))
    if (run / "dump" / "step3" / "rank0" / "dump.json").exists():
        assert any("not looked at: " in problem for problem in map(str, nan_analyze_run(run).problems))
    else:
        with pytest.raises(NothingCapturedError, match="not looked at: "):
            nan_analyze_run(run)


_NOT_TOLD = "ranks_missing is no list of ranks"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"ranks_missing": [3, 3, 1]}', "ranks 1, 3: wrote nothing"),
        ('{"ranks_missing": ["3"]}', _NOT_TOLD),
        (json.dumps({"ranks_missing": list(range(-40, 40, 2))}), _NOT_TOLD),
        ('{"ranks_missing": [true]}', _NOT_TOLD),
        ('{"ranks_missing": null}', _NOT_TOLD),
        (json.dumps({"ranks_missing": [10**200]}), _NOT_TOLD),
        ('{"ranks_miss', "incident.json cannot be read"),
        ("[]", "incident.json cannot be read"),
    ],
)
def test_a_damaged_document_of_an_incident_is_no_all_clear(text: str, said: str, tmp_path: Path, rank_dump: Any) -> None:
    """Whether ranks wrote nothing of an incident is said to be unknown where its document does not tell it; what there is, is looked at."""
    place = _dump(rank_dump, tmp_path / "step3-nan_inf", 3)
    (place / "incident.json").write_text(text)
    found = diagnose(place)
    assert found.finding == "none"
    assert said in str(found.problems[0])


@pytest.mark.parametrize("levels", [[], ["mix"]])
def test_the_preset_that_the_run_had_is_not_advised(levels: list[str], tmp_path: Path) -> None:
    """A NaN whose operator is not known: a run with operators is advised, unless this one kept them."""
    _monitor(tmp_path / "run", step=3)
    place = tmp_path / "run" / "incidents" / "step3-nan_inf"
    place.mkdir(parents=True)
    (place / "incident.json").write_text(json.dumps({"version": 1, "step": 3, "rule": "nan_inf", "levels": levels}))
    sample = {"step": 3, "samples": [{"family": "loss", "name": "loss", "value": "NaN"}]}
    (place / "samples_rank0.jsonl").write_text(json.dumps(sample) + "\n")
    commands = diagnose(tmp_path / "run").next
    assert any("--preset nan" in command for command in commands) is (not levels)


def test_an_alert_of_a_function_has_no_module(tmp_path: Path) -> None:
    """A function that the monitor watches is the record, without the monitor's key, and no module."""
    _monitor(tmp_path / "run", step=1)
    first = diagnose(tmp_path / "run").first_suspect
    assert first is not None
    assert (first.record, first.module) == (f"actv/{BORN}", "")


def test_what_the_monitor_saw_earlier_is_said(tmp_path: Path, rank_dump: Any) -> None:
    """Dumps of a later step lead, and the evidence says which step to dump."""
    _monitor(tmp_path / "good")
    run = Monitor(tmp_path / "bad")
    run.put(1, 1, "actv", "layers.1.output", "9")
    run.write()
    for name, out in (("good", 1.5), ("bad", 2.5)):
        _dump(rank_dump, tmp_path / name / "dump", 2, out)
    found = diagnose(tmp_path / "bad", tmp_path / "good")
    assert found.first_suspect is not None
    assert (found.first_suspect.record, found.first_suspect.step) == (BORN, 2)
    assert any("a dump of step 1 shows the record in which it begins" in line for line in found.evidence)


def test_what_is_left_is_said(tmp_path: Path, rank_dump: Any) -> None:
    """Without a golden dump the dump is looked at alone; an incident that the golden run has too is left, and both are said. Dumps of
    other steps are a warning while there is something else to compare."""
    for name in ("good", "bad"):
        _monitor(tmp_path / name)
        _incident(rank_dump, tmp_path / name, 3)
    _dump(rank_dump, tmp_path / "bad" / "dump", 0)
    found = diagnose(tmp_path / "bad", tmp_path / "good")
    assert found.finding == "none"
    assert found.headline() == "No difference beyond round-off."
    assert "dump: Nothing found: no NaN or Inf that matters." in found.evidence
    assert "dump of the golden run, which has none: this one's was looked at alone" in found.looked_at["not looked at"]
    assert "step3-nan_inf (the golden run has it too)" in found.looked_at["not looked at"]
    _dump(rank_dump, tmp_path / "good" / "dump", 5)
    _dump(rank_dump, tmp_path / "bad" / "dump", 1)
    found = diagnose(tmp_path / "bad", tmp_path / "good")
    assert any(problem.startswith("not looked at: ") and "none in common" in problem for problem in found.problems)


@pytest.mark.parametrize("dumped", ["bad", "good"])
def test_a_dump_against_a_monitor_is_no_all_clear(dumped: str, tmp_path: Path, rank_dump: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs that have nothing of one kind: the headline says so and why, the exit code is 3, and what to run gets the same of both."""
    _dump(rank_dump, tmp_path / dumped / "dump", 4)
    _monitor(tmp_path / ("good" if dumped == "bad" else "bad"))
    target, golden = str(tmp_path / "bad"), str(tmp_path / "good")
    assert main(["diagnose", target, golden, "-o", str(tmp_path / "out")]) == 3
    lines = capsys.readouterr().out.splitlines()
    kinds = ("a dump only", "monitor output only")
    here, there = kinds if dumped == "bad" else kinds[::-1]
    assert lines[0] == f"Nothing of the two runs was compared: this one has {here}, the golden run {there}."
    found = diagnose(target, golden)
    assert found.problems == [lines[0].rstrip(".")]
    options = "--preset dump --set 'dump.step=[4]'" if dumped == "bad" else "--preset watch"
    assert found.next[0] == f"msprobe run {options} --output-dir again_golden -- LAUNCH LINE OF GOLDEN"
    assert not any("as the second argument" in line for line in lines)


@pytest.mark.parametrize(("monitored", "said"), [(False, "in step 2."), (True, "in step 2 of 3.")])
def test_the_headline_names_the_steps_that_were_dumped(monitored: bool, said: str, tmp_path: Path, rank_dump: Any) -> None:
    """Equal records of one step say nothing of the others: which step it was is said, of how many where a file tells, and what looks at all
    steps."""
    for name in ("good", "bad"):
        _dump(rank_dump, tmp_path / name / "dump", 2)
    if monitored:
        run = _monitor(tmp_path / "bad")
        for place in (run.root / "monitor").iterdir():
            (place / "scalars_0-9.csv").write_text("step,name,value\n0,loss,1.0\n1,loss,1.0\n2,loss,1.0\n")
    found = diagnose(tmp_path / "bad", tmp_path / "good")
    assert (found.finding, found.headline()) == ("none", f"No difference beyond round-off {said}")
    assert found.next[1] == "msprobe run --preset watch --output-dir again -- LAUNCH LINE"


def test_what_was_looked_at_is_counted(tmp_path: Path, rank_dump: Any) -> None:
    """Steps behind the one that is explained are not named, and the records that were compared stand beside all that there are."""
    for name, out in (("good", 1.5), ("bad", 2.5)):
        for step in (0, 1):
            _dump(rank_dump, tmp_path / name / "dump", step, out if step else 1.5)
        _dump(rank_dump, tmp_path / name / "dump", 2, out)
    found = diagnose(tmp_path / "bad" / "dump", tmp_path / "good" / "dump")
    assert found.looked_at == {"steps": "0, 1", "ranks": 1, "records": 6, "recorded": 6}
    assert "looked at  steps 0, 1, 1 rank, 6 records" in found.text()


def test_files_are_named_in_full(
    tmp_path: Path, rank_dump: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nan_analyze writes to ./output when nothing else is said, of the directory of a run to its ``analysis``; its last line has the whole
    path of the file."""
    _dump(rank_dump, tmp_path / "dump", 0, float("nan"))
    monkeypatch.chdir(tmp_path)
    assert main(["nan_analyze", "-i", "dump"]) == 1
    (written,) = (tmp_path / "output").iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"Details: {written.resolve()}"
    assert main(["nan_analyze", "-i", "."]) == 1
    (written,) = (tmp_path / "analysis/nan_analyze-1").iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"Details: {written.resolve()}"


def test_only_a_dump_in_the_directory(tmp_path: Path, rank_dump: Any) -> None:
    """The directory above a dump stands for the dump, on either side; what cannot be compared is an error when there is nothing else."""
    for name, out in (("good", 1.5), ("bad", 2.5)):
        _dump(rank_dump, tmp_path / name / "dump", 0, out)
    for target in (tmp_path / "bad", tmp_path / "bad" / "dump"):
        found = diagnose(target, tmp_path / "good", calibration=[tmp_path / "good"])
        assert found.first_suspect is not None
        assert found.first_suspect.record == BORN
    _dump(rank_dump, tmp_path / "other" / "dump", 7)
    _dump(rank_dump, tmp_path / "other" / "dump", 8)
    with pytest.raises(NothingCapturedError, match="none in common"):
        diagnose(tmp_path / "bad", tmp_path / "other")


def test_one_healthy_run_is_not_compared(tmp_path: Path, rank_dump: Any) -> None:
    """Nothing is said to be the same when there is one run: what was searched for is said."""
    found = diagnose(_dump(rank_dump, tmp_path / "dump", 0))
    assert found.headline() == "Nothing found: no NaN or Inf that matters."
    assert any("nothing was compared" in line for line in found.evidence)
    _monitor(tmp_path / "run")
    assert diagnose(tmp_path / "run").headline().startswith("Nothing found: no alert, no number that is not finite")


def test_lines_of_one_run_say_what_they_are(tmp_path: Path, rank_dump: Any) -> None:
    """Every line of the evidence begins with its word, and why and source stand once in the text."""
    found = diagnose(_dump(rank_dump, tmp_path / "dump", 0, float("nan")))
    text = found.text()
    assert text.count(LINE) == 1
    assert found.first_suspect is not None
    assert text.count(found.first_suspect.why) == 1
    assert not [line for line in found.evidence if not re.match(r"(tensor|note|before|spread) |Looked at", line)]
    assert [line for line in found.evidence if line.startswith("before ")]


def test_two_ranks_do_not_say_which_is_wrong() -> None:
    """With two copies nobody can tell which one is wrong: that is said, and why a rank is named all the same."""
    table = {f"layers.{n}.norm": {0: (1.0,), 1: (1.0,)} for n in range(4)}
    table["layers.2.norm"] = {0: (1.0,), 1: (1.5,)}
    (odd,) = odd_ones(0, table, bool)
    assert odd.rank == 1
    assert "which of them is wrong cannot be told" in odd.why
    assert "rank 1 is named because it differs from rank 0" in odd.why


def test_a_replica_incident_leads_to_what_the_ranks_were_started_with(tmp_path: Path) -> None:
    """Ranks that have parted hold no NaN: the next command holds the ranks against each other, of the run and of its incident alike."""
    place = tmp_path / "incidents" / "step3-replica_mismatch"
    place.mkdir(parents=True)
    sample = {"step": 3, "family": "param_updated", "name": "w", "dtype": "torch.float32", "shape": [2]}
    (place / "samples_rank0.jsonl").write_text(
        json.dumps(sample | {"statistics": {"max": 1.0, "min": 0.0, "mean": 0.5, "norm": 1.0}}) + "\n"
    )
    began = {"step": 3, "ranks": [1], "name": "w", "rule": "replica_mismatch", "when": "after the update"}
    (place / "incident.json").write_text(json.dumps({"version": 1, "began": began, "message": "replicas differ"}))
    with zipfile.ZipFile(tmp_path / "config_check_pack.zip", "w") as pack:
        for rank, rate in enumerate((0.001, 0.01)):
            pack.writestr(f"msprobe/hyperparameters/rank{rank}.json", json.dumps({"optimizer": {"lr": rate}}))
    for path in (tmp_path, place):
        found = diagnose(path)
        assert found.finding == "desync"
        assert found.next == [f"msprobe config_check --ranks {tmp_path / 'config_check_pack.zip'}"]


def test_nan_analyze_reads_the_incidents_of_a_run_without_a_dump(
    tmp_path: Path, rank_dump: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output directory gives what the incident does, and says where it is from."""
    place = _incident(rank_dump, tmp_path / "run", 3)
    assert main(["nan_analyze", "-i", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert said.startswith("First NaN: model.py:7 forward: logarithm of a negative number: input.0 goes down to -1 (step 3")
    assert f"Read from: incident {place.name}." in said
    assert main(["nan_analyze", "-i", str(place), "-o", str(tmp_path / "out")]) == 1
