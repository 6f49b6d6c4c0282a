"""Trainings whose loss is no mean over words, whose modules are called part by part, and whose gradients come to nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.find.run import diagnose

BF16 = "torch.bfloat16"
HEAD = "vpp_stage,name,step,micro_step,norm,min,max,mean,nans,shape,dtype"


def tensor(*shape: int, norm: float = 8.0, largest: float = 1.0, mean: float = 0.0) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": BF16, "shape": list(shape), "Max": largest, "Min": -1.0, "Mean": mean, "Norm": norm}


def call(inputs: Sequence[Any], *outputs: Any) -> dict[str, Any]:
    return {"input_args": list(inputs), "input_kwargs": {}, "output": list(outputs)}


def dump(root: Path, data: Mapping[str, Any], level: str = "mix") -> Path:
    place = root / "step0" / "rank0"
    place.mkdir(parents=True)
    header = {"task": "statistics", "level": level, "framework": "pytorch", "dump_data_dir": None}
    (place / "dump.json").write_text(json.dumps({**header, "data": data}))
    (place / "stack.json").write_text("{}")
    (place / "construct.json").write_text("{}")
    return root


def monitor(root: Path, families: Mapping[str, Sequence[str]], losses: Sequence[float] = ()) -> Path:
    place = root / "monitor" / "Dec03_21-34-40-rank0-1a2b3c4d"
    place.mkdir(parents=True)
    (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "world_size": 1, "started_unix": 1.0}))
    for family, lines in families.items():
        (place / f"{family}_0-9.csv").write_text("\n".join([HEAD, *lines]) + "\n")
    if losses:
        (place / "scalars_0-9.csv").write_text(
            "\n".join(["step,name,value", *(f"{k},loss,{loss}" for k, loss in enumerate(losses))]) + "\n"
        )
    return root


def row(name: str, step: int, norm: float, shape: str, dtype: str = BF16) -> str:
    return f'0,{name},{step},0,{norm},-1,2,0.25,0,"{shape}",{dtype}'


@pytest.mark.parametrize(("gradient", "finding"), [(3.0, "none"), (0.01, "divergence")])
def test_a_loss_of_sums_that_cancel_moves_with_its_activations(gradient: float, finding: str, tmp_path: Path) -> None:
    """0.2 % of a loss: round-off where the gradients of its activations say that it moves by so much when they are rounded."""
    roots = []
    for name, loss in (("run", 0.5741), ("golden", 0.5753)):
        lines = {
            family: [row("head.output", step, norm, "[8,32,64]") for step in range(2)]
            for family, norm in (("actv", 64.0), ("actv_grad", gradient))
        }
        roots.append(monitor(tmp_path / name, lines, [loss, loss]))
    found = diagnose(*roots)
    assert found.finding == finding, found.text()


@pytest.mark.parametrize(("zero", "finding"), [(True, "none"), (False, "divergence")])
def test_a_parameter_that_begins_at_zero_is_as_far_off_as_its_gradient(zero: bool, finding: str, tmp_path: Path) -> None:
    """An adapter's second matrix is nothing but its first update: it is held to its gradient."""
    roots = []
    for name, part in (("run", 1.004), ("golden", 1.0)):
        lines = {
            "param_origin": [row("lora_B.weight", 0, 0.0 if zero else 1.0, "[64,64]")],
            "grad_reduced": [row("lora_B.weight", 0, 0.1 * part, "[64,64]")],
            "param_updated": [row("lora_B.weight", 0, 0.016 * part, "[64,64]")],
        }
        roots.append(monitor(tmp_path / name, lines))
    found = diagnose(*roots)
    assert found.finding == finding, found.text()


def test_a_module_that_is_called_part_by_part(tmp_path: Path) -> None:
    """One run gives an activation all tokens at once, the other one those of each expert: that is not compared, and said."""
    around = [row(f"{name}.output", step, 3.0, "[96,8]") for step in range(2) for name in ("gate", "experts", "norm")]
    parts = [row("experts.act.output", step, norm, f"[{size},8]") for step in range(2) for size, norm in ((40, 2.0), (56, 2.2))]
    whole = [row("experts.act.output", step, 3.0, "[96,8]") for step in range(2)]
    found = diagnose(monitor(tmp_path / "run", {"actv": around + whole}), monitor(tmp_path / "golden", {"actv": around + parts}))
    assert found.finding == "none", found.text()
    assert any("cut in other ways" in problem for problem in found.problems)
    assert found.problems


@pytest.mark.parametrize(("other", "finding"), [(3.0, "none"), (3.5, "divergence")])
def test_modules_inside_of_one_that_was_compiled(other: float, finding: str, tmp_path: Path) -> None:
    """They are recorded in one run alone: what the module around them gives tells, and they are said not to be compared."""
    inside = [row("block.fc.output", step, 2.0, "[4,8]") for step in range(2)]
    around = [[row("block.output", step, norm, "[4,8]") for step in range(2)] for norm in (other, 3.0)]
    roots = monitor(tmp_path / "run", {"actv": around[0]}), monitor(tmp_path / "golden", {"actv": inside + around[1]})
    found = diagnose(*roots)
    assert (found.finding, bool(found.problems)) == (finding, True), found.text()


def test_a_copy_of_another_tensor_is_no_rounding(tmp_path: Path) -> None:
    """What this run alone clones is another tensor by six units of bfloat16: nothing on its way rounds."""
    kept, other = tensor(64, 64, largest=1.0), tensor(64, 64, largest=1.0123)
    first = {"Functional.linear.0.forward": call([tensor(8, 64), tensor(64, 64, norm=3.0)], tensor(8, 64, norm=5.0))}
    golden = dump(
        tmp_path / "golden", {**first, "Tensor.lerp_.0.forward": call([kept, tensor(64, 64, norm=7.0)], tensor(64, 64, norm=6.0))}
    )
    cloned = {"Tensor.clone.0.forward": call([other], other)}
    run = {**first, **cloned, "Tensor.lerp_.0.forward": call([other, tensor(64, 64, norm=7.0)], tensor(64, 64, norm=6.0))}
    found = diagnose(dump(tmp_path / "run", run), golden)
    assert found.first_suspect is not None, found.text()
    assert found.first_suspect.record == "Tensor.clone.0.forward"


@pytest.mark.parametrize(("mean", "said"), [(0.0, False), (0.0003, True)])
def test_another_gradient_of_the_same_results(mean: float, said: bool, tmp_path: Path) -> None:
    """Modules alone were recorded, all that they give is the same to the last bit, and the gradient that comes back from the loss is
    another one by more than one rounding."""
    roots = []
    for name, own in (("run", mean), ("golden", 0.0)):
        data = {
            "Module.head.Linear.forward.0": call([tensor(8, 64)], tensor(8, 64, norm=5.0)),
            "Module.head.Linear.backward.0": {"input": [tensor(64, 64, mean=own)], "output": [tensor(8, 64, norm=2.0)]},
        }
        roots.append(dump(tmp_path / name, data, "L0"))
    found = diagnose(*roots)
    assert (found.finding, any("another loss" in problem for problem in found.problems)) == ("none", said), found.text()
