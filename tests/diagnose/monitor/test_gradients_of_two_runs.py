"""`diagnose` on two runs of a monitor whose gradients are not to be compared number by number: loss scales, other scales, 16 bits,
experts, biases, skipped steps."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from written_monitor import HEAD, PARAMETERS, Monitor

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose


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
