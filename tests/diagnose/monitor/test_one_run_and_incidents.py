"""`diagnose` on the monitor output of one run, on incidents and on things it does not look at: the first place that is off, and clear
sentences."""

from __future__ import annotations

import json
import shlex
import zipfile
from pathlib import Path
from typing import Any

import pytest
from written_monitor import Monitor, alert

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import NothingCapturedError, UsageError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.find.collectives.replicas import odd_ones
from msprobe_engine.find.run import diagnose


@pytest.mark.parametrize(
    ("rule", "headline"),
    [
        ("loss_spike", "First alert: loss_spike, value 97.9162 (step 1, rank 1, "),
        ("nan_inf", "First seen NaN or Inf: step 1, rank 1, "),
        ("replica_mismatch", "Ranks that must hold the same values do not: step 1, rank 1, "),
    ],
)
def test_the_first_line_of_an_alert_says_which_it_is(rule: str, headline: str, tmp_path: Path) -> None:
    """Where the headline alone does not: the rule and its value."""
    run = Monitor(tmp_path / "run", ranks=2)
    run.alerts = [alert(rule, 1, 1, "layers.1.mlp.weight", value=97.9162)]
    assert diagnose(run.write()).headline().startswith(headline)


def test_the_first_line_of_an_alert_says_what_was_seen(tmp_path: Path) -> None:
    """In the words of the rule, not a value whose meaning only the rule knows."""
    run = Monitor(tmp_path / "run", ranks=1)
    line = "untrained_parameter: head.bias, rank 0 step 20: has a gradient and is in no optimizer; expected an update in each step"
    run.alerts = [alert("untrained_parameter", 20, 0, "head.bias", value=3.0, message=line)]
    assert "First alert: untrained_parameter: has a gradient and is in no optimizer (step 20, rank 0, " in diagnose(run.write()).headline()


def test_one_run_that_is_fine(tmp_path: Path) -> None:
    """No alert, no NaN, equal copies: none. A column that never holds a number is no NaN."""
    run = Monitor(tmp_path / "run")
    for step in range(3):
        run.put(0, step, "actv", "layers.0.output", "nan")
    assert diagnose(run.write()).finding == "none"


@pytest.mark.parametrize(("shared", "steps", "finding"), [(True, 3, "data"), (False, 3, "none"), (True, 1, "none")])
def test_ranks_that_were_given_the_same_batch(shared: bool, steps: int, finding: str, tmp_path: Path) -> None:
    """Copies of a model that see the same in every step do not share the data; of one step, or one batch, nothing is said."""
    monitor = Monitor(tmp_path / "run", steps=steps)
    monitor.shared = shared
    found = diagnose(monitor.write())
    assert found.finding == finding
    assert ("ranks 0-1 were given the same batch" in found.headline()) == (finding == "data")


def test_an_expert_without_a_token(tmp_path: Path) -> None:
    """A tensor without elements has no statistics in a step, and no NaN."""
    run = Monitor(tmp_path / "run", ranks=1).write()
    (place,) = (run / "monitor").iterdir()
    rows = [f"0,experts.1.input,{step},0,{norm},{norm},{norm},0" for step, norm in enumerate(("1.5", "nan", "2.5"))]
    (place / "actv_0-9.csv").write_text("\n".join(["vpp_stage,name,step,micro_step,norm,min,max,nans", *rows]) + "\n")
    assert diagnose(run).finding == "none"
    (place / "actv_0-9.csv").write_text("\n".join(["vpp_stage,name,step,micro_step,norm,min,max,nans", *rows]).replace("nan,0", "nan,3"))
    assert diagnose(run).finding == "nonfinite"


def test_one_run_with_a_nan_and_no_rule(tmp_path: Path) -> None:
    """Without any alert the first number in the order of execution that is not finite is named."""
    run = Monitor(tmp_path / "run")
    run.put(1, 2, "grad_reduced", "layers.0.mlp.weight", "inf")
    run.put(0, 2, "actv", "layers.1.output", "nan")
    found = diagnose(run.write())
    assert found.finding == "nonfinite"
    assert found.first_suspect is not None
    assert (found.first_suspect.record, found.first_suspect.rank) == ("actv/layers.1.output", 0)


def test_copies_that_differ(tmp_path: Path) -> None:
    """One parameter of one rank differs from its copies, the same one of other layers does not: desync, from the step on where it does."""
    run = Monitor(tmp_path / "run", ranks=3)
    run.put(2, 1, "param_origin", "layers.2.mlp.weight", "1.5")
    run.put(2, 2, "param_origin", "layers.2.mlp.weight", "1.5")
    found = diagnose(run.write())
    assert found.finding == "desync"
    assert found.first_suspect is not None
    assert (found.first_suspect.record, found.first_suspect.rank, found.first_suspect.step) == ("layers.2.mlp.weight", 2, 1)
    assert found.first_suspect.module == "layers.2.mlp"


@pytest.mark.parametrize(("since", "finding"), [(2, "desync"), (0, "none")], ids=["on the way", "from the beginning"])
def test_gradients_that_are_no_longer_summed(since: int, finding: str, tmp_path: Path) -> None:
    """Reduced gradients that were the same on all ranks and differ from a step on: of these ranks one takes no part any more. Those that
    always differed are of parts."""
    run = Monitor(tmp_path / "run", ranks=2, steps=4)
    for step in range(since, 4):
        run.put(1, step, "grad_reduced", "layers.2.mlp.weight", f"{step + 2.5}")
    found = diagnose(run.write())
    assert found.finding == finding
    if found.first_suspect is not None:
        assert (found.first_suspect.record, found.first_suspect.step) == ("layers.2.mlp.weight", since)


def test_parts_are_no_copies() -> None:
    """Tensor parallel parts differ in every layer, and an embedding alone may be cut, too: nothing is out of step."""
    table = {f"layers.{n}.{name}": {0: (1.0, name), 1: (2.0 if name == "qkv" else 1.0, name)} for n in range(4) for name in ("qkv", "norm")}
    table["embedding"] = {0: (1.0,), 1: (3.0,)}
    assert odd_ones(0, table, bool) == []
    table["layers.2.norm"] = {0: (1.0, "norm"), 1: (1.5, "norm")}
    assert [odd.name for odd in odd_ones(0, table, bool)] == ["layers.2.norm"]
    table = {name: {0: (1.0,), 1: (3.0 if name == "embedding" else 1.0,)} for name in ("embedding", "norm", "head")}
    assert odd_ones(0, table, lambda _name: False) == []
    assert [odd.name for odd in odd_ones(0, table, bool)] == ["embedding"]
    assert odd_ones(0, {"w": {0: (float("nan"),), 1: (float("nan"),)}, "v": {0: (1.0,), 1: (1.0,)}}, bool) == []


def test_alerts_come_first(tmp_path: Path) -> None:
    """The first critical alert in the order of execution is the suspect; replica_mismatch is a desync, nan_inf is non-finite."""
    run = Monitor(tmp_path / "run")
    run.alerts = [
        alert("nan_inf", 2, 0, "layers.0.mlp.weight", kind="grad", extra={"family": "grad_reduced"}, value=float("nan")),
        alert("replica_mismatch", 1, 1, "layers.3.mlp.bias"),
    ]
    found = diagnose(run.write())
    assert found.finding == "desync"
    assert found.first_suspect is not None
    assert (found.first_suspect.rank, found.first_suspect.step, found.first_suspect.module) == (1, 1, "layers.3.mlp")
    other = Monitor(tmp_path / "other")
    other.alerts = run.alerts[:1]
    assert diagnose(other.write()).finding == "nonfinite"


def replicas_alert(minority: list[int]) -> Any:
    return alert("replica_mismatch", 1, 0, "layers.3.mlp.bias", extra={"family": "param_updated", "ranks": [0, 1, 2], "minority": minority})


@pytest.mark.parametrize(
    ("minority", "rank", "said"), [([2], 2, "rank 2"), ([0, 1, 2], 0, "ranks 0-2"), ([1, 2], 1, "ranks 1-2")], ids=["one", "none", "two"]
)
def test_the_rank_that_speaks_for_a_group_is_not_the_one_that_differs(
    minority: list[int], rank: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of replicas the ranks of the minority are named, all of them where there is no majority; rank 0 only told it."""
    run = Monitor(tmp_path / "run", ranks=3)
    run.alerts = [replicas_alert(minority)]
    found = diagnose(run.write())
    assert found.first_suspect is not None
    assert found.first_suspect.rank == rank
    assert f"step 1, {said}, module layers.3.mlp" in found.headline()
    assert main(["monitor", "analyze", str(tmp_path / "run")]) == 1
    assert f"layers.3.mlp.bias on {said}." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "line"), [(3, []), (7, ["Tensors were looked at in 3 of 7 steps of rank 0: what lasts a few steps may be missed."])]
)
def test_a_run_without_alerts_says_how_often_tensors_were_looked_at(steps: int, line: list[str], tmp_path: Path) -> None:
    """Where not in every step: what was between is not known."""
    place = next((Monitor(tmp_path, ranks=1).write() / "monitor").iterdir())
    (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(f"{step},loss,1.0\n" for step in range(steps)))
    found = diagnose(tmp_path)
    assert found.finding == "none"
    assert [said for said in found.evidence if said.startswith("Tensors were looked at")] == line


@pytest.mark.parametrize("interval", [1, 10])
def test_copies_that_are_compared_seldom_differ_since_then(interval: int, tmp_path: Path) -> None:
    """The step of the alert is that of the comparison: the steps since the one before it are in question, and the next run compares in
    each; a dump of the alert's step would show what came of it."""
    run = Monitor(tmp_path)
    run.alerts = [alert("replica_mismatch", 20, 0, "layers.3.mlp.bias", extra={"next": "dump a step"})]
    run.write()
    for file in tmp_path.glob("monitor/*/run.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "monitor": {"replica_check": {"interval": interval}}}))
    found = diagnose(tmp_path)
    assert ("Copies of parameters were compared every 10 steps: these may differ since step 11." in found.evidence) is (interval == 10)
    assert "What the rule says to do: dump a step" in found.evidence
    assert ("--set monitor.replica_check.interval=1 " in found.next[-2]) is (interval == 10)
    assert ("dump.step=[20]" in found.next[-2]) is (interval == 1)


@pytest.mark.parametrize("what", ["alert", "nan", "replicas", "two runs"])
def test_what_to_do_next_is_said(what: str, tmp_path: Path) -> None:
    """Numbers of the monitor end at a module: the next step is a dump of that step and rank, and its settings are valid; of a NaN the
    preset that keeps operators, whenever it comes."""
    run, golden = Monitor(tmp_path / "run"), None
    if what == "alert":
        run.alerts = [alert("nan_inf", 1, 1, "layers.0.mlp.weight", value=float("nan"))]
    elif what == "nan":
        run.put(1, 1, "grad_reduced", "layers.0.mlp.weight", "inf")
    elif what == "replicas":
        run.put(1, 1, "param_origin", "layers.0.mlp.weight", "7.5")
    else:
        run.put(1, 1, "grad_reduced", "layers.0.mlp.weight", "7")
        golden = Monitor(tmp_path / "golden").write()
    found = diagnose(run.write(), golden)
    *_, launch, then = found.next
    assert then.startswith("msprobe diagnose ")
    words = shlex.split(launch)
    if what in ("alert", "nan"):
        assert words[:5] == ["msprobe", "run", "--preset", "nan", "--output-dir"]
        return
    changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    settings = load_settings({"monitor": {}}, changes=changes).dump
    assert settings is not None
    assert settings.step == (1,)
    assert 1 in settings.rank


def test_incident(tmp_path: Path) -> None:
    """An incident without a NaN in its records: what set it off is the suspect."""
    at = tmp_path / "step7-replica_mismatch"
    at.mkdir()
    sample = {"step": 7, "family": "param_origin", "name": "w", "dtype": "torch.float32", "shape": [2]}
    (at / "samples_rank0.jsonl").write_text(json.dumps(sample | {"statistics": {"max": 1.0, "min": 0.0, "mean": 0.5, "norm": 1.0}}) + "\n")
    began = {"step": 7, "ranks": [3], "name": "layers.1.mlp.weight", "rule": "replica_mismatch", "when": "after the update"}
    (at / "incident.json").write_text(json.dumps({"version": 1, "began": began, "message": "replicas differ"}))
    found = diagnose(at)
    assert found.finding == "desync"
    assert found.first_suspect is not None
    assert (found.first_suspect.record, found.first_suspect.rank, found.first_suspect.step) == ("layers.1.mlp.weight", 3, 7)


@pytest.mark.parametrize("cut", ['{"step": 7, "fam', "[]", "\0\0"])
def test_a_damaged_line_of_an_incident_is_said(cut: str, tmp_path: Path) -> None:
    """What a killed rank had begun to write is no sample, and not nothing; what was written again behind it takes its place."""
    at = tmp_path / "step7-loss_spike"
    at.mkdir()
    sample = {"step": 7, "family": "loss", "name": "w", "dtype": "torch.float32", "shape": [2]}
    line = json.dumps(sample | {"statistics": {"max": 1.0, "min": 0.0, "mean": 0.5, "norm": 1.0}})
    (at / "samples_rank0.jsonl").write_text(f"{line}\n{cut}\n")
    found = diagnose(at)
    assert found.finding == "none"
    assert ["lines that cannot be read, and were left out: 1" in str(problem) for problem in found.problems] == [True]
    state = json.dumps({"version": 1, "state": "complete"})
    (at / "samples_rank0.jsonl").write_text(f"{line}\n{cut}\n{state}\n{line}\n{state}\n")
    assert diagnose(at).problems == []


def test_what_diagnose_does_not_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A zip that is no pack, one checkpoint alone, other files, two things of different kinds: one sentence each, code 2."""
    pack = tmp_path / "pack.zip"
    with zipfile.ZipFile(pack, "w") as archive:
        archive.writestr("other", "{}")
    (tmp_path / "iter").mkdir()
    (tmp_path / "iter" / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "empty").mkdir()
    assert main(["diagnose", str(pack)]) == 2
    assert main(["diagnose", str(tmp_path / "iter")]) == 2
    assert main(["diagnose", str(tmp_path / "empty")]) == 2
    assert main(["diagnose", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "is no pack of a config check" in said
    assert "is a checkpoint; give a second one" in said
    assert "holds no dump, incident, monitor output, pack of configurations or checkpoint" in said
    assert "there is no such file or directory" in said
    run = Monitor(tmp_path / "run").write()
    dump = Path(__file__).parents[2] / "fixtures" / "26.2.0" / "L0"
    with pytest.raises(UsageError, match="two of one kind"):
        diagnose(run, dump)
    with pytest.raises(NothingCapturedError, match="no rank, step and tensor in common"):
        diagnose(run, Monitor(tmp_path / "later", steps=0).write())


@pytest.mark.parametrize("rule", ["nan_inf", "loss_not_finite"])
def test_of_a_monitor_it_is_said_where_a_nan_was_seen(rule: str, tmp_path: Path) -> None:
    """Without operators nobody can say where it was born."""
    run = Monitor(tmp_path / "run", ranks=2)
    run.alerts = [alert(rule, 1, 1, "loss", value=float("nan"), kind="loss", message="value nan")]
    found = diagnose(run.write())
    assert found.finding == "nonfinite"
    assert found.headline().startswith("First seen NaN or Inf: step 1, rank 1")


@pytest.mark.parametrize(
    ("losses", "grew"), [("0.9,1.1e11,inf", True), ("0.9,0.8,nan", False), ("0.9,20,nan", False), ("nan,nan,nan", False)]
)
def test_a_loss_that_grows_until_it_is_none_is_named(losses: str, grew: bool, tmp_path: Path) -> None:
    """With the steps, the sizes and the learning rate; a NaN out of the blue is not called too large an update."""
    run = Monitor(tmp_path / "run", ranks=1)
    run.alerts = [alert("loss_not_finite", 2, 0, "loss", value=float("nan"))]
    (place,) = (run.write() / "monitor").iterdir()
    rows = [f"{step},learning_rate,10000\n{step},loss,{loss}\n" for step, loss in enumerate(losses.split(","))]
    (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(rows))
    said = "the loss grew from 0.9 in step 0 to 1.1e+11 in step 1: the updates are too large (learning rate 1e+04)"
    assert (said in diagnose(run.root).headline()) is grew


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (("nan", "0.9", "0.8"), "the loss of rank 0 is NaN or Inf, that of ranks 1-2 is finite"),
        (("nan", "nan", "0.8"), "the loss of ranks 0-1 is NaN or Inf, that of rank 2 is finite"),
        (("nan", "nan", "inf"), ""),
        (("nan",), ""),
    ],
)
def test_a_loss_that_is_none_on_some_ranks_names_them(losses: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """Their batch of that step is the first thing to look at; where all ranks have it, or there is one, nothing is told by it."""
    run = Monitor(tmp_path / "run", ranks=len(losses))
    run.alerts = [alert("loss_not_finite", 2, 0, "loss", value=float("nan"), kind="loss")]
    for place, loss in zip(sorted((run.write() / "monitor").iterdir()), losses):
        (place / "scalars_0-9.csv").write_text(f"step,name,value\n1,loss,0.9\n2,loss,{loss}\n")
    headline = diagnose(run.root).headline()
    assert (said or "NaN or Inf: step 2") in headline
    assert ("is finite" in headline) is bool(said)


@pytest.mark.parametrize(("options", "fits"), [((), True), (("--ranks", "8"), True), (("--max-disk-gb", "1e-6"), False)])
def test_what_a_monitor_will_write_is_estimated(
    options: tuple[str, ...], fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the bytes of its steps; a limit of a rank that is too low is said, with exit code 1."""
    run = Monitor(tmp_path / "run", steps=4)
    for place in (run.write() / "monitor").iterdir():
        (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(f"{step},loss,1.0\n" for step in range(4)))
    nbytes = sum(file.stat().st_size for file in run.root.rglob("*") if file.is_file())
    assert main(["estimate", str(run.root), "--steps", "1000", *options, "--json"]) == int(not fits)
    found = json.loads(capsys.readouterr().out)["monitor"]
    assert found["seen"] == {"steps": 4, "ranks": 2, "bytes": nbytes}
    assert found["bytes_per_rank"] == round(nbytes / 8 * 1000)
    assert found["bytes"] == pytest.approx(found["bytes_per_rank"] * found["ranks"], rel=1e-3)
    assert found["fits"] is fits
