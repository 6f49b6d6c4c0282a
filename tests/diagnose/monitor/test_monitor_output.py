"""`diagnose` on monitor output, incidents and things it does not look at: the first place that is off, and clear sentences."""

from __future__ import annotations

import json
import math
import re
import shlex
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from written_monitor import HEAD, PARAMETERS, Monitor, alert

from msprobe_engine.cli.main import main
from msprobe_engine.core.errors import NothingCapturedError, UsageError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.find.collectives.replicas import odd_ones
from msprobe_engine.find.monitor.kinds import cut_otherwise
from msprobe_engine.find.monitor.other_batches import not_comparable
from msprobe_engine.find.run import diagnose
from msprobe_engine.formats.monitor.reader import open_run


def test_two_runs_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first step and in it the first tensor in the order of execution is named, not the first file; steps before agree."""
    good = Monitor(tmp_path / "good").write()
    bad = Monitor(tmp_path / "bad", noise=1e-7)
    bad.put(1, 1, "grad_reduced", "layers.0.attention.weight", "7")
    bad.put(1, 1, "actv", "layers.1.output", "9")
    bad.put(0, 2, "param_origin", "layers.0.mlp.bias", "9")
    assert main(["diagnose", str(bad.write()), str(good), "-o", str(tmp_path / "page")]) == 1
    found = json.loads((tmp_path / "page" / "diagnosis.json").read_text())
    first = found["first_suspect"]
    assert found["finding"] == "divergence"
    assert (first["record"], first["module"], first["rank"], first["step"]) == ("actv/layers.1.output", "layers.1", 1, 1)
    assert first["numbers"]["target"]["norm"] == 9
    assert [suspect["record"] for suspect in found["suspects"]] == ["actv/layers.1.output", "grad_reduced/layers.0.attention.weight"]
    assert "all steps before agree" in capsys.readouterr().out


def test_two_runs_agree_up_to_round_off(tmp_path: Path) -> None:
    """Numbers that differ in the last digits are no difference; a NaN that only one run has is one."""
    good, near = Monitor(tmp_path / "good").write(), Monitor(tmp_path / "near", noise=1e-6).write()
    found = diagnose(near, good)
    assert found.finding == "none"
    assert "largest difference" in found.evidence[0]
    bad = Monitor(tmp_path / "bad")
    bad.put(0, 2, "grad_reduced", "layers.3.mlp.bias", "nan")
    found = diagnose(bad.write(), good)
    assert found.finding == "nonfinite"
    assert found.first_suspect is not None
    assert (found.first_suspect.step, found.first_suspect.module) == (2, "layers.3.mlp")


@pytest.mark.slow
def test_what_several_ranks_have_is_one_suspect(tmp_path: Path) -> None:
    """The same alert of many ranks, and the same number that is off on many ranks, is named once, with the ranks."""
    run, name = Monitor(tmp_path / "run", ranks=40), "layers.1.mlp.weight"
    run.alerts = [alert("nan_inf", 1, rank, name, order=3, kind="grad", extra={"family": "grad_reduced"}) for rank in range(2, 40)]
    found = diagnose(run.write())
    assert [(suspect.tensor, suspect.on_ranks) for suspect in found.suspects] == [(name, ["2-39"])]
    assert "ranks 2-39" in found.headline()
    assert any(line.startswith("38 alerts") for line in found.evidence)
    off = Monitor(tmp_path / "off", ranks=40)
    for rank in range(40):
        off.put(rank, 1, "grad_reduced", name, "9")
    found = diagnose(off.write(), Monitor(tmp_path / "good", ranks=40).write())
    assert [suspect.on_ranks for suspect in found.suspects] == [["0-39"]]
    assert "all 40 ranks" in found.headline()


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


@pytest.mark.parametrize(("grows", "step"), [(4.0, 2), (1.4, None)])
def test_a_difference_that_grows(grows: float, step: int | None, tmp_path: Path) -> None:
    """What grows faster than round-off does in a training that is not stable is found where it leaves the floor, however small it began;
    what grows by less than half per step is said with its size."""
    good, bad = Monitor(tmp_path / "good", steps=8), Monitor(tmp_path / "bad", steps=8)
    for number in range(8):
        for run, drift in ((good, 0.0), (bad, 2e-5 * grows**number)):
            run.put(0, number, "grad_reduced", "layers.1.mlp.weight", f"{1 + drift:.9f}")
    found = diagnose(bad.write(), good.write())
    first = found.first_suspect
    assert (first and first.step) == step
    if first is None:
        assert "grad_reduced/layers.1.mlp.weight, norm 1.000211 against 1" in found.evidence[0]


@pytest.mark.parametrize(
    ("family", "other", "number", "finding"),
    [("actv", "bool", 1.0, "none"), ("actv", "bfloat16", -1e4, "structure"), ("exp_avg", "bfloat16", -1e4, "structure")],
    ids=["a mask", "another precision", "states of an optimizer"],
)
def test_tensors_of_another_type(family: str, other: str, number: float, finding: str, tmp_path: Path) -> None:
    """Numbers of a mask of bool say nothing of one of floats; those that agree within the round-off of another type are no all-clear."""
    roots = []
    for name, dtype, value in (("run", f"torch.{other}", number), ("golden", "torch.float32", -1e4)):
        roots.append(Monitor(tmp_path / name, ranks=1).write())
        (place,) = (roots[-1] / "monitor").iterdir()
        (place / f"{family}_0-9.csv").write_text(
            "vpp_stage,name,step,micro_step,norm,min,max,shape,dtype\n"
            + "".join(f"0,layers.0.input,{step},0,{abs(value)},{value},{value},[4],{dtype}\n" for step in range(3))
        )
    found = diagnose(*roots)
    assert found.finding == finding, found.text()
    assert any(f"data type {other}, in the golden run float32" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("scales", "gradient", "finding"),
    [((64.0,) * 3, 64.0, "none"), ((64.0,) * 3, 32.0, "divergence"), ((1.0, 1.0, 2.0), 1.0, "divergence"), ((3.0,) * 3, 3.0, "divergence")],
    ids=["another scale", "and other gradients", "one run has skipped a step", "no power of two"],
)
def test_another_loss_scale(scales: tuple[float, ...], gradient: float, finding: str, tmp_path: Path) -> None:
    """From the first step on, by a power of two, it is no difference, and gradients that are as many times the golden run's are none."""
    roots = []
    for name in ("run", "golden"):
        roots.append(Monitor(tmp_path / name, ranks=1).write())
        (place,) = (roots[-1] / "monitor").iterdir()
        mine = name == "run"
        lines = [f"{step},loss_scale,{1024 * (scales[step] if mine else 1.0):g}" for step in range(3)]
        (place / "scalars_0-9.csv").write_text("\n".join(["step,name,value", *lines]) + "\n")
        norm = 1e-3 * (gradient if mine else 1.0)
        rows = [f"0,.output,{step},{norm:g},-{norm:g},{norm:g},0" for step in range(3)]
        (place / "actv_grad_0-9.csv").write_text("\n".join(["vpp_stage,name,step,norm,min,max,micro_step", *rows]) + "\n")
    found = diagnose(*roots)
    assert found.finding == finding, found.text()
    assert any("that was taken out" in line for line in found.evidence) == (scales[0] == 64.0)


@pytest.mark.parametrize("scale", [1, 2])
def test_a_loss_scale_of_one_is_none(scale: int, tmp_path: Path) -> None:
    """An engine writes it in every step, and a loop without a scale writes nothing; another scale that one run alone has is said."""
    roots = [Monitor(tmp_path / name, ranks=1).write() for name in ("run", "golden")]
    (place,) = (roots[0] / "monitor").iterdir()
    (place / "scalars_0-9.csv").write_text("\n".join(["step,name,value", *(f"{step},loss_scale,{scale}" for step in range(3))]) + "\n")
    found = diagnose(*roots)
    assert any("loss_scale" in problem for problem in found.problems) == (scale != 1), found.text()


@pytest.mark.parametrize(("family", "finding"), [("grad_reduced", "none"), ("unscaled_grad", "divergence"), ("clipped_grad", "divergence")])
def test_a_loss_scale_that_was_not_taken_off(family: str, finding: str, tmp_path: Path) -> None:
    """Another loss scale explains the gradients up to where it is taken off, and none behind."""
    roots = _at_loss_scales(tmp_path, ("2048", "1024"), family, dict.fromkeys(PARAMETERS, (2.0, 1.0)))
    assert diagnose(*roots).finding == finding


@pytest.mark.parametrize(("mine", "theirs"), [("nan", "1024"), ("1024", "nan"), ("inf", "1024"), ("inf", "inf"), ("-1024", "1024")])
def test_a_loss_scale_that_is_no_number(mine: str, theirs: str, tmp_path: Path) -> None:
    """It explains nothing."""
    roots = _at_loss_scales(tmp_path, (mine, theirs), "grad_reduced", dict.fromkeys(PARAMETERS, (2.0, 1.0)))
    found = diagnose(*roots)
    assert found.finding != "none"
    assert not any("taken out" in line for line in found.evidence)


def test_gradients_of_which_both_runs_have_no_number(tmp_path: Path) -> None:
    """NaN in most gradients of both runs is no factor: the others stay what they are."""
    norms = {"head.output": math.nan, "layers.0.output": 1.0, "layers.1.output": math.nan, "layers.2.output": 1.0}
    roots = _at_loss_scales(tmp_path, ("1", "1"), "actv_grad", {name: (norm, norm) for name, norm in norms.items()})
    for root in roots:
        next((root / "monitor").glob("*/scalars*")).unlink()
    found = diagnose(*roots)
    assert found.finding == "none", found.text()
    assert not any("taken out" in line for line in found.evidence)


def _at_loss_scales(tmp_path: Path, scales: tuple[str, str], family: str, norms: Mapping[str, tuple[float, float]]) -> list[Path]:
    """A run and a golden run with these loss scales, and the norms of a family of gradients."""
    roots = [Monitor(tmp_path / name, ranks=1).write() for name in ("run", "golden")]
    for at, root in enumerate(roots):
        (place,) = (root / "monitor").iterdir()
        (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(f"{step},loss_scale,{scales[at]}\n" for step in range(3)))
        is_backward = family == "actv_grad"
        sizes = {name: f"{norm[at]:g},{-norm[at]:g},{norm[at]:g}" for name, norm in norms.items()}
        rows = [f"0,{name},{step},{size}" + ",0" * is_backward for step in range(3) for name, size in sizes.items()]
        (place / f"{family}_0-9.csv").write_text("\n".join([HEAD + ",micro_step" * is_backward, *rows]) + "\n")
    return roots


@pytest.mark.parametrize(
    ("factors", "said", "finding"),
    [
        ((64.0, 1.0, 1.0), "the loss scale was taken out", "none"),
        ((1.5, 1.0, 1.0), "", "divergence"),
        ((64.0, 64.0, 1.0), "", "divergence"),
        ((1.0, 0.25, 1.0), "before clipping in one run", "none"),
        ((1.0, 0.25, 0.25), "", "divergence"),
        ((1.0, 0.5, 1.0), "", "divergence"),
    ],
    ids=["of the loss", "no power of two", "and of gradients", "clipped before it is written", "and in the optimizer", "clipped by both"],
)
def test_gradients_at_another_scale(factors: tuple[float, float, float], said: str, finding: str, tmp_path: Path) -> None:
    """A factor of all gradients is no difference where what is made of them does not have it, and where it is proven who took it out: the
    first moment is a tenth of what the optimizer was given, which the golden run clips to a quarter behind what it has written."""
    roots = [Monitor(tmp_path / name, ranks=1).write() for name in ("run", "golden")]
    for root, (activation, gradient, moment) in zip(roots, (factors, (1.0, 1.0, 1.0))):
        (place,) = (root / "monitor").iterdir()
        (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(f"{step},beta1,0.9\n" for step in range(3)))
        sizes = [("actv_grad", activation, ["head.output", "layers.0.output"]), ("grad_reduced", gradient, PARAMETERS)]
        for family, factor, names in [*sizes, ("exp_avg", 0.025 * moment, PARAMETERS)]:
            lines = [HEAD + ",micro_step" * (family == "actv_grad")]
            for step in range(3):
                for at, name in enumerate(names):
                    norm = (2 + at + step) * factor
                    lines.append(f"0,{name},{step},{norm:.9g},{-norm:.9g},{norm:.9g}" + ",0" * (family == "actv_grad"))
            (place / f"{family}_0-9.csv").write_text("\n".join(lines) + "\n")
    found = diagnose(*roots)
    assert found.finding == finding, found.text()
    assert not said or any(said in line for line in found.evidence), found.evidence


@pytest.mark.parametrize(
    ("decays", "finding"), [((0.1, 0.1, 0.0, 0.0), "none"), ((0.1, 0.1, 0.1, 0.0), "none"), ((0.1, 0.05, 0.0, 0.0), "divergence")]
)
def test_parameters_that_are_grouped_otherwise(decays: tuple[float, ...], finding: str, tmp_path: Path) -> None:
    """A setting of a group that differs from the first one's is written: which values there are counts, not the number of the group."""
    roots = [Monitor(tmp_path / name, ranks=1).write() for name in ("run", "golden")]
    for root, settings in zip(roots, (decays, (0.1, 0.0))):
        (place,) = (root / "monitor").iterdir()
        names = [
            (f"weight_decay_group_{at}" if at else "weight_decay", value) for at, value in enumerate(settings) if not at or value != 0.1
        ]
        lines = [f"{step},{name},{value}" for step in range(3) for name, value in names]
        (place / "scalars_0-9.csv").write_text("\n".join(["step,name,value", *lines]) + "\n")
    found = diagnose(*roots)
    assert found.finding == finding, found.text()


@pytest.mark.parametrize(("left", "code"), [(".output", 3), ("layers.0.output", 1)], ids=["the model alone", "one module lost"])
def test_activations_of_a_compiled_model(left: str, code: int, tmp_path: Path) -> None:
    """A compiled model is one call: its modules are not compared, and not called missing."""
    roots = [Monitor(tmp_path / name, ranks=1).write() for name in ("run", "golden")]
    for root, names in zip(roots, ((left,), (left, "layers.0.output", "layers.1.output"))):
        (place,) = (root / "monitor").iterdir()
        rows = [f"0,{name},{step},1,-1,1,0" for step in range(3) for name in dict.fromkeys(names)]
        (place / "actv_0-9.csv").write_text("\n".join(["vpp_stage,name,step,norm,min,max,micro_step", *rows]) + "\n")
    assert main(["diagnose", *map(str, roots), "-o", str(tmp_path / "page")]) == code


def test_how_fast_a_step_went_is_no_difference(tmp_path: Path) -> None:
    """Two equal runs whose steps took another time are equal; a learning rate that differs is named and its step, the time is not."""
    roots = []
    for name, seconds, rate in (("good", 0.178, 1e-3), ("slow", 0.437, 1e-3), ("other", 0.9, 2e-3)):
        root = Monitor(tmp_path / name).write()
        for place in (root / "monitor").iterdir():
            rows = [f"{step},{key},{value}" for step in range(3) for key, value in (("step_seconds", seconds), ("learning_rate", rate))]
            (place / "scalars_0-9.csv").write_text("\n".join(["step,name,value", *rows]) + "\n")
        roots.append(root)
    good, slow, other = roots
    assert diagnose(slow, good).finding == "none"
    found = diagnose(other, good)
    assert found.first_suspect is not None
    assert (found.first_suspect.record, found.first_suspect.step) == ("step/learning_rate", 0)
    assert re.match(r"First difference: learning_rate [-0-9.e]+, golden [-0-9.e]+ \(step 0, ", found.headline())
    assert not [suspect for suspect in found.suspects if "seconds" in suspect.record]


def test_a_learning_rate_comes_before_the_update_that_it_makes(tmp_path: Path) -> None:
    """Both part in one step: the cause is named, not the parameter that it moves furthest."""
    roots = []
    for name, rate, norm in (("run", 3e-3, "9"), ("golden", 1e-3, "1.5")):
        made = Monitor(tmp_path / name, ranks=1)
        made.put(0, 1, "param_updated", PARAMETERS[3], norm)
        roots.append(made.write())
        (place,) = (roots[-1] / "monitor").iterdir()
        (place / "scalars_0-9.csv").write_text(f"step,name,value\n0,learning_rate,0.001\n1,learning_rate,{rate}\n2,learning_rate,0.001\n")
    found = diagnose(*roots)
    assert [(s.record, s.step) for s in found.suspects[:2]] == [("step/learning_rate", 1), (f"param_updated/{PARAMETERS[3]}", 1)]


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


@pytest.mark.parametrize("family", ["grad_reduced", "param_origin"])
def test_of_parameters_of_one_moment_the_one_that_is_furthest_off_is_named(family: str, tmp_path: Path) -> None:
    """The order of the model is none in time."""
    good, bad = Monitor(tmp_path / "good").write(), Monitor(tmp_path / "bad")
    bad.put(0, 1, family, "layers.0.attention.weight", "1.2")
    bad.put(1, 1, family, "layers.2.mlp.weight", "90")
    bad.put(0, 2, family, "layers.1.mlp.weight", "9000")
    found = diagnose(bad.write(), good)
    assert found.first_suspect is not None
    assert (found.first_suspect.step, found.first_suspect.rank, found.first_suspect.module) == (1, 1, "layers.2.mlp")


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


@pytest.mark.parametrize(
    ("before", "after", "code", "said"),
    [
        (",0.25,0", ",0.25,5", 1, "nans is 5, in the golden run 0"),
        (",0.25,", ",0.75,", 1, "mean is 0.75, in the golden run 0.25"),
        (",0.25,", ",inf,", 1, "mean is inf"),
        ("vpp_stage,name,step,norm,min,max,mean,nans", "vpp_stage,name,step,norm,min,max,more,nans", 3, "statistic mean"),
    ],
    ids=["nans", "mean", "mean that is infinite", "no mean"],
)
def test_every_statistic_counts(before: str, after: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was compared is what "no difference" is said of: counts of NaN and means too; a statistic of one run is said."""
    for name in ("run", "golden"):
        place = tmp_path / name / "monitor" / "Dec03_21-34-40-rank0-1a2b3c4d"
        place.mkdir(parents=True)
        (place / "run.json").write_text(json.dumps({"rank": 0, "started_unix": 1.0}))
        rows = "vpp_stage,name,step,norm,min,max,mean,nans\n0,w,0,3,-1,2,0.25,0\n0,w,1,3,-1,2,0.25,0\n"
        (place / "grad_reduced_0-9.csv").write_text(rows.replace(before, after) if name == "run" else rows)
    assert main(["diagnose", str(tmp_path / "run"), str(tmp_path / "golden"), "-o", str(tmp_path / "out")]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("off", "factor", "code", "first"),
    [
        ((1,), 1.06, 0, None),
        ((1, 2), 1.06, 1, 1),
        ((1,), 1.3, 1, 1),
        ((2,), 1.06, 3, None),
    ],
    ids=["gone again", "stays", "far off", "in the last step"],
)
def test_a_gradient_that_is_off_in_one_step_of_a_training_in_16_bits(
    off: tuple[int, ...], factor: float, code: int, first: int | None, tmp_path: Path
) -> None:
    """One ill-conditioned batch shows rounding as no other does: what is a little off is confirmed or cleared by the next step; of the last
    one that cannot be told."""
    roots = [Monitor(tmp_path / name, ranks=1) for name in ("bad", "good")]
    for step in off:
        roots[0].put(0, step, "grad_reduced", "layers.2.mlp.weight", f"{(8.0 + 0.1 * step) * factor:.6g}")
    for root in roots:
        root.write()
        (place,) = (root.root / "monitor").iterdir()
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "computed_in": {"bfloat16": "autocast"}}))
    found = diagnose(roots[0].root, roots[1].root)
    assert (found.first_suspect and found.first_suspect.step) == first, found.text()
    assert main(["diagnose", str(roots[0].root), str(roots[1].root), "-o", str(tmp_path / "page")]) == code


@pytest.mark.parametrize(
    ("chosen", "taken", "factor", "finding"),
    [
        ((30.0, 30.1), (30.0, 30.1), 1.06, "none"),
        ((30.0, 30.1), (30.0, 30.1), 1.15, "divergence"),
        ((30.0, 30.1), (31.0, 31.0), 1.06, "divergence"),
        ((30.0, 30.0), (30.0, 30.0), 1.06, "divergence"),
        ((30.0, 33.0), (30.0, 33.0), 1.06, "divergence"),
    ],
    ids=["of other tokens", "far off", "of no use", "of the same tokens", "of many other tokens"],
)
def test_gradients_of_tokens_that_round_off_sends_to_another_expert(
    chosen: tuple[float, float], taken: tuple[float, float], factor: float, finding: str, tmp_path: Path
) -> None:
    """Where two experts are nearly as good, the router's choice is a matter of rounding, and gradients are of other tokens."""
    roots = [Monitor(tmp_path / name, ranks=1) for name in ("run", "golden")]
    for step in (1, 2):
        roots[0].put(0, step, "grad_reduced", "layers.2.mlp.weight", f"{(8.0 + 0.1 * step) * factor:.6g}")
    for root, given, used in zip(roots, chosen, taken):
        (place,) = (root.write() / "monitor").iterdir()
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "computed_in": {"bfloat16": "autocast"}}))
        indices = {"gate.output": given, "experts.input": used}
        lines = [f"0,{name},{step},0,{norm},0,3,[64],torch.int64\n" for step in (1, 2) for name, norm in indices.items()]
        (place / "actv_0-9.csv").write_text("vpp_stage,name,step,micro_step,norm,min,max,shape,dtype\n" + "".join(lines))
    assert diagnose(roots[0].root, roots[1].root).finding == finding


@pytest.mark.parametrize(
    ("family", "name", "norms", "finding"),
    [
        ("grad_reduced", "layers.2.mlp.bias", ("3e-9", "5e-9"), "none"),
        ("param_updated", "layers.2.mlp.bias", ("4e-9", "6e-9"), "none"),
        ("grad_reduced", "layers.2.mlp.bias", ("3e-3", "5e-3"), "divergence"),
        ("grad_reduced", "layers.2.mlp.weight", ("3e-9", "5e-9"), "divergence"),
        ("grad_reduced", "layers.3.mlp.bias", ("12", "12.5"), "divergence"),
    ],
    ids=["round-off", "what is made of it", "more than that", "of a weight", "of another bias"],
)
def test_the_gradient_of_a_bias_that_comes_to_nothing(family: str, name: str, norms: tuple[str, str], finding: str, tmp_path: Path) -> None:
    """Terms that cancel leave their round-off, which no two runs have alike, beside a weight whose gradient says how large they are. It
    opens the way to no other difference."""
    roots = [Monitor(tmp_path / side, ranks=1) for side in ("run", "golden")]
    for root, cancelled, norm in zip(roots, ("3e-9", "5e-9"), norms):
        for step in range(3):
            root.put(0, step, "grad_reduced", "layers.2.mlp.bias", cancelled)
        for step in range(1, 3):
            root.put(0, step, family, name, norm)
        (place,) = (root.write() / "monitor").iterdir()
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "computed_in": {"float32": "parameters"}}))
    assert diagnose(roots[0].root, roots[1].root).finding == finding


@pytest.mark.parametrize(("values", "finding"), [("1", "none"), ("1e-3", "divergence")])
def test_what_cancels_in_a_bias_is_as_large_as_in_the_module_around_it(values: str, finding: str, tmp_path: Path) -> None:
    """The gradient of the keys is what is left of that of the chances, which the gradient of the values shows, too."""
    roots = [Monitor(tmp_path / side, ranks=1) for side in ("run", "golden")]
    for root, bias in zip(roots, ("3e-10", "9e-10")):
        (place,) = (root.write() / "monitor").iterdir()
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "computed_in": {"float32": "parameters"}}))
        with (place / "grad_reduced_0-9.csv").open("a") as file:
            for name, norm in (("k.weight", "1e-3"), ("k.bias", bias), ("v.weight", values)):
                file.writelines(f"0,layers.2.attention.{name},{step},{norm},-{norm},{norm}\n" for step in range(3))
    assert diagnose(roots[0].root, roots[1].root).finding == finding


@pytest.mark.parametrize(("ranks", "code"), [((1, 2), 3), ((2, 2), 1)], ids=["other ranks", "as many ranks"])
def test_parameters_that_are_cut_over_ranks(ranks: tuple[int, int], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of a tensor, and parts of a sum, which have no statistic, are not held against the whole of a run on other ranks."""
    for side, world, rows, norm in (("golden", ranks[0], 64, "3,-1,2,0.25,0"), ("run", ranks[1], 32, "nan,nan,nan,nan,nan")):
        place = tmp_path / side / "monitor" / "Dec03_21-34-40-rank0-1a2b3c4d"
        place.mkdir(parents=True)
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "world_size": world, "started_unix": 1.0}))
        head = "vpp_stage,name,step,norm,min,max,mean,nans,shape,dtype\n"
        (place / "param_origin_0-9.csv").write_text(
            f'{head}0,up.weight,0,{rows / 16},-1,2,0.25,0,"[{rows},8]",torch.float32\n0,norm.weight,0,3,-1,2,0.25,0,[8],torch.float32\n'
        )
        (place / "actv_0-9.csv").write_text(
            head.replace("step", "step,micro_step")
            + f'0,down.output,0,0,{norm},"[4,8]",torch.float32\n'
            + "".join(f'0,norm{at}.output,0,0,3,-1,2,0.25,0,"[4,8]",torch.float32\n' for at in range(3))
        )
    assert main(["diagnose", str(tmp_path / "run"), str(tmp_path / "golden"), "-o", str(tmp_path / "out")]) == code
    said = capsys.readouterr().out
    assert ("1 tensors are cut over ranks otherwise" if code == 3 else "its shape is [32,8], in the golden run [64,8]") in said
    assert "down.output" in said


@pytest.mark.parametrize(
    ("ranks", "stage", "micros", "around", "apart"),
    [
        ((1, 2), True, (1, 1), {".output"}, set()),
        ((2, 2), True, (1, 1), set(), set()),
        ((1, 2), False, (4, 2), set(), {"actv", "loss"}),
        ((1, 1), False, (4, 2), set(), set()),
    ],
    ids=["a stage of a pipeline", "as many ranks", "fewer micro batches on more ranks", "fewer micro batches"],
)
def test_a_rank_that_has_another_part_of_the_model_or_of_the_batch(
    ranks: tuple[int, int], stage: bool, micros: tuple[int, int], around: set[str], apart: set[str], tmp_path: Path
) -> None:
    """What comes out of the model is not the same thing, and a micro batch of one run is none of the other's."""
    runs = []
    for side, world, lacks, micro in (("run", ranks[1], stage, micros[1]), ("golden", ranks[0], False, micros[0])):
        place = tmp_path / side / "monitor" / "Dec03_21-34-40-rank0-1a2b3c4d"
        place.mkdir(parents=True)
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "world_size": world, "started_unix": 1.0}))
        head = "vpp_stage,name,step,norm,min,max,mean,nans,shape,dtype\n"
        names = ("up.weight", "norm.weight") if lacks else ("up.weight", "norm.weight", "head.weight")
        (place / "param_origin_0-9.csv").write_text(head + "".join(f"0,{name},0,3,-1,2,0.25,0,[8],torch.float32\n" for name in names))
        rows = [f"0,{name}.output,0,{at},3,-1,2,0.25,0,[8],torch.float32\n" for at in range(micro) for name in ("up", "")]
        (place / "actv_0-9.csv").write_text(head.replace("step", "step,micro_step") + "".join(rows))
        runs.append(open_run(tmp_path / side))
    assert {key.name for _, _, key in cut_otherwise(*runs, set()).around} == around
    assert not_comparable(*runs)[0] == apart


@pytest.mark.parametrize(("forward", "named"), [(False, "layers.3.mlp.bias"), (True, "layers.1.mlp.weight")], ids=["same", "other"])
def test_of_gradients_the_one_that_the_backward_pass_makes_first_is_named(forward: bool, named: str, tmp_path: Path) -> None:
    """Where the forward pass is the same, the fault is in the backward pass, before all that differs; where it is not, what is about as far
    off as the furthest is nearest."""
    good, bad = Monitor(tmp_path / "good").write(), Monitor(tmp_path / "bad")
    for name, norm in (("layers.0.mlp.weight", "3"), ("layers.1.mlp.weight", "9.5"), ("layers.3.mlp.bias", "13.2")):
        bad.put(0, 1, "grad_reduced", name, norm)
    if forward:
        bad.put(0, 1, "actv", "layers.0.output", "1.100003")
    found = diagnose(bad.write(), good)
    assert found.first_suspect is not None
    assert found.first_suspect.record == f"grad_reduced/{named}"


@pytest.mark.parametrize(
    ("skipped", "finding"), [((1, 1, 0, 1), "none"), ((0, 1, 1, 0), "nonfinite")], ids=["looks for it", "at every scale"]
)
def test_gradients_of_steps_that_a_loss_scaler_skips(skipped: tuple[int, ...], finding: str, tmp_path: Path) -> None:
    """Without an alert, too: overflows by which a scaler finds its scale are none of the run."""
    run = Monitor(tmp_path / "run", ranks=1, steps=4)
    for step, skip in enumerate(skipped):
        if skip:
            run.put(0, step, "grad_reduced", "layers.1.mlp.weight", "inf")
    (place,) = (run.write() / "monitor").iterdir()
    rows = [f"{step},loss_scale,{2.0 ** (20 - step)}\n{step},skipped,{float(skip)}" for step, skip in enumerate(skipped)]
    (place / "scalars_0-9.csv").write_text("step,name,value\n" + "\n".join(rows) + "\n")
    assert diagnose(run.root).finding == finding


@pytest.mark.parametrize(
    ("of_ranks", "gradient", "code", "words"),
    [
        ((4.0, 4.0), "", 3, "so that loss cannot be compared"),
        ((4.0, 6.0), "", 0, "the mean over the ranks was compared"),
        ((4.0, 6.0), "77", 3, "rank 1 is on one side only"),
    ],
    ids=["another mean", "the same mean", "other gradients"],
)
def test_the_loss_of_other_ranks_is_of_another_part_of_the_batch(
    of_ranks: tuple[float, float], gradient: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no activations say what a rank has seen, its loss is not held against that of a run with other ranks, and that is said; where
    the mean over the ranks is the same, that is enough. A rank with the same gradients as one that was compared needs no partner."""
    two = Monitor(tmp_path / "two", ranks=2)
    if gradient:
        two.put(1, 1, "grad_reduced", "layers.0.mlp.weight", gradient)
    roots = [Monitor(tmp_path / "one", ranks=1).write(), two.write()]
    for root, losses in zip(roots, ((5.0,), of_ranks)):
        for rank, place in enumerate(sorted((root / "monitor").iterdir())):
            (place / "run.json").write_text(json.dumps({"rank": rank, "rank_info": {}, "world_size": len(losses)}))
            (place / "actv_0-9.csv").unlink()
            (place / "scalars_0-9.csv").write_text("step,name,value\n" + "".join(f"{step},loss,{losses[rank]}\n" for step in range(3)))
    assert main(["diagnose", *map(str, roots), "-o", str(tmp_path / "page")]) == code
    assert words in capsys.readouterr().out


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


def test_a_shape_that_is_another_one_in_every_step_follows_the_data(tmp_path: Path) -> None:
    """An expert takes as many tokens as chose it: where that changes from step to step in both runs, the earliest number that differs is
    named, and not the shape."""
    for side, sizes, norm in (("run", (5, 7), 2.0), ("golden", (5, 8), 2.5)):
        place = tmp_path / side / "monitor" / "Dec03_21-34-40-rank0-1a2b3c4d"
        place.mkdir(parents=True)
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "world_size": 1, "started_unix": 1.0}))
        head = "vpp_stage,name,step,micro_step,norm,min,max,mean,nans,shape,dtype\n"
        lines = (f'0,experts.0.input,{step},0,3,-1,2,0.25,0,"[{size},8]",torch.float32\n' for step, size in enumerate(sizes))
        (place / "actv_0-9.csv").write_text(head + "".join(lines))
        gradient = f"0,experts.0.weight,0,{norm},-1,2,0.25,0,[8],torch.float32\n"
        (place / "grad_reduced_0-9.csv").write_text(head.replace("micro_step,", "") + gradient)
    first = diagnose(tmp_path / "run", tmp_path / "golden").first_suspect
    assert first is not None
    assert first.record == "grad_reduced/experts.0.weight"
