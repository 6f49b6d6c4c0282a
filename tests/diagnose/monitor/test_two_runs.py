"""`diagnose` on the monitor output of two runs: the first step and tensor in which they part, and what is no difference."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from written_monitor import PARAMETERS, Monitor, alert

from msprobe_engine.cli.main import main
from msprobe_engine.find.monitor.other_batches import not_comparable
from msprobe_engine.find.monitor.shapes_and_dtypes import cut_otherwise
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


@pytest.mark.parametrize(("stage", "code"), [(1, 3), (0, 1)], ids=["another stage", "the same stage"])
def test_a_rank_that_is_another_stage_of_the_pipeline(stage: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As many ranks, and what bears one name on the second is another layer: that is said, and the first is compared."""
    run, golden = Monitor(tmp_path / "run", ranks=2), Monitor(tmp_path / "golden", ranks=2)
    run.places[1] = {"pp": stage, "dp": 1 - stage, "tp": 0}
    for name in PARAMETERS:
        run.put(1, 0, "param_origin", name, "77")
    assert main(["diagnose", str(run.write()), str(golden.write()), "-o", str(tmp_path / "out")]) == code
    assert ("rank 1: not compared, for it is another stage of the pipeline" in capsys.readouterr().out) == bool(stage)


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
