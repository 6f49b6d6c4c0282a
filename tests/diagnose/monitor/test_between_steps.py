"""Two monitors: parameters that change between the steps, and what an activation may be off by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from written_monitor import HEAD, PARAMETERS, Monitor

from msprobe_engine.find.run import diagnose

NAME = "layers.2.mlp.weight"
CHANGED = {(2, NAME): 1.00002}
"""(step, parameter) -> by what factor it is not what the update of the step before has left."""


def keeps(root: Path, changed: dict[tuple[int, str], float]) -> Path:
    """Each update moves all parameters."""
    (place,) = (Monitor(root, ranks=1).write() / "monitor").iterdir()
    for family, behind in (("param_origin", 0), ("param_updated", 1)):
        lines = [HEAD]
        for step in range(4):
            for at, name in enumerate(PARAMETERS):
                size = (1 + at + 0.1 * (step + behind)) * (1.0 if behind else changed.get((step, name), 1.0))
                lines.append(f"0,{name},{step},{size:.9g},-1,1")
        (place / f"{family}_0-9.csv").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize(
    ("target", "golden", "finding"),
    [
        (CHANGED, {}, "divergence"),
        ({(2, name): 1.00002 for name in PARAMETERS}, {}, "divergence"),
        (CHANGED, CHANGED, "none"),
        ({(step, name): 1.00002 for name in PARAMETERS for step in range(4)}, {}, "none"),
        ({}, CHANGED, "none"),
    ],
    ids=["one parameter", "all", "in both runs", "other copies are written", "in the golden run"],
)
def test_parameters_that_are_not_what_the_update_has_left(
    target: dict[tuple[int, str], float], golden: dict[tuple[int, str], float], finding: str, tmp_path: Path
) -> None:
    """By less than round-off of a training in bf16: a step begins with what the last one has left, to the last bit."""
    found = diagnose(keeps(tmp_path / "run", target), keeps(tmp_path / "golden", golden))
    assert found.finding == finding, found.text()
    if found.first_suspect is not None:
        name = NAME if len(target) == 1 else PARAMETERS[0]
        assert (found.first_suspect.step, found.first_suspect.record) == (2, f"param_origin/{name}")


@pytest.mark.parametrize(("watched", "finding"), [(True, "none"), (False, "divergence")], ids=["an optimizer over copies", "unknown"])
def test_weights_that_are_written_back_behind_the_update(watched: bool, finding: str, tmp_path: Path) -> None:
    """Where updates were watched and the optimizer has made none of these parameters, what changes them behind its step is the update."""
    runs = [keeps(tmp_path / "run", CHANGED), keeps(tmp_path / "golden", {})]
    for root in runs:
        (place,) = (root / "monitor").iterdir()
        said = json.loads((place / "run.json").read_text())
        (place / "run.json").write_text(json.dumps({**said, "monitor": {"updates": watched}}))
    found = diagnose(*runs)
    assert found.finding == finding, found.text()


@pytest.mark.parametrize(
    ("dtypes", "elements", "off", "named"),
    [
        (("float32", "bfloat16"), 6144, 2e-3, True),
        (("bfloat16", "bfloat16"), 6144, 2e-3, False),
        (("bfloat16", "bfloat16"), 6144, 1e-2, True),
        (("bfloat16", "bfloat16"), 64, 1e-2, False),
        (("bfloat16", "bfloat16"), 10**8, 8e-4, False),
        (("bfloat16", "bfloat16"), 10**8, 2e-3, True),
    ],
    ids=["before anything is rounded", "round-off", "more", "of few elements", "of all elements", "more of all"],
)
def test_the_norm_of_an_activation(dtypes: tuple[str, str], elements: int, off: float, named: bool, tmp_path: Path) -> None:
    """Elements are off at random, so that the norm of many shows little of it."""

    def written(name: str, factor: float) -> Path:
        (place,) = (Monitor(tmp_path / name, ranks=1).write() / "monitor").iterdir()
        (place / "run.json").write_text(json.dumps({"rank": 0, "rank_info": {}, "computed_in": {"bfloat16": "autocast"}}))
        rows = [("embed.input", "int64", 1.0), ("norm.input", dtypes[0], factor), ("up.input", dtypes[1], factor)]
        lines = [f"0,{name},0,0,{3 * size:.9g},-1,1,[{elements}],torch.{kind}" for name, kind, size in rows]
        (place / "actv_0-9.csv").write_text("vpp_stage,name,step,micro_step,norm,min,max,shape,dtype\n" + "\n".join(lines) + "\n")
        return tmp_path / name

    found = diagnose(written("run", 1 + off), written("golden", 1.0))
    assert (found.first_suspect is not None) == named, found.text()
    assert not named or found.first_suspect.record == "actv/norm.input"  # type: ignore[union-attr]
