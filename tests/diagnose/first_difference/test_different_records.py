"""`diagnose` on pairs of dumps that do not hold the same records: other levels, other selections, other networks, NaN on both sides."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_dumps import dump
from fault_mixture import dump as dump_mixture
from fault_model import Shape, Training

from msprobe_engine.find.findings import Diagnosis
from msprobe_engine.find.run import diagnose

SHAPE = Shape(steps=1)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("common")


def trained(dumps: Path, name: str, level: str = "mix", plant: Callable[[Training], None] = lambda _: None) -> Path:
    dump(dumps / name, SHAPE, plant, level)
    return dumps / name


def smaller_norm(training: Training) -> None:
    """A norm of the second block has another eps."""
    norm = training.model.layers[1].norm1
    norm.eps = 0.1


def edited(source: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the first step whose dump.json was changed."""
    (found,) = source.glob("step0/*/dump.json")
    directory = target / "step0" / "rank0"
    directory.mkdir(parents=True)
    document = json.loads(found.read_text())
    change(document)
    (directory / "dump.json").write_text(json.dumps(document))
    for name in ("stack.json", "construct.json"):
        (directory / name).write_bytes(found.with_name(name).read_bytes())
    return target


def said(found: Diagnosis) -> str:
    return " ".join(found.evidence)


@pytest.mark.parametrize("levels", [("L0", "mix"), ("mix", "L0"), ("L1", "mix"), ("mix", "L1")], ids="-".join)
@pytest.mark.fast_cells("L0-mix")
def test_other_level(levels: tuple[str, str], dumps: Path) -> None:
    """Records that one level has not are no calls of one run only: the same training is the same, and a defect is named as at the level
    that both have."""
    right = trained(dumps, f"golden-{levels[1]}", levels[1])
    same = diagnose(trained(dumps, f"golden-{levels[0]}", levels[0]), right)
    assert (same.finding, same.unmatched) == ("none", {"target": [], "golden": []})
    assert f"levels {levels[0]} and {levels[1]}" in said(same)
    first = diagnose(trained(dumps, f"eps-{levels[0]}", levels[0], smaller_norm), right).first_suspect
    assert first is not None
    if "L1" in levels:  # without modules the call is all there is
        assert (first.record.split(".")[-3:], first.kind) == (["layer_norm", "2", "forward"], "argument")
    else:
        assert first.module == "layers.1.norm1"


def test_no_level_in_common(dumps: Path) -> None:
    """Dumps without a kind of record in common cannot be compared, and the levels are said."""
    from msprobe_engine.core.errors import NothingCapturedError

    with pytest.raises(NothingCapturedError, match="levels L0 and L1"):
        diagnose(trained(dumps, "golden-L0", "L0"), trained(dumps, "golden-L1", "L1"))


def test_other_selection(dumps: Path, tmp_path: Path) -> None:
    """A dump of some modules beside one of all: what was left out is no missing call."""

    def keep(document: dict[str, Any]) -> None:
        document["selection"] = {"list": ["linear"]}
        document["data"] = {name: record for name, record in document["data"].items() if "linear" in name}

    whole = trained(dumps, "golden-mix")
    part = edited(whole, tmp_path / "part", keep)
    for pair in ((part, whole), (whole, part)):
        found = diagnose(*pair)
        assert (found.finding, found.unmatched) == ("none", {"target": [], "golden": []})
        assert "selections" in said(found)
    wrong = diagnose(trained(dumps, "eps-mix", "mix", smaller_norm), part)
    assert wrong.finding == "divergence"
    assert wrong.suspects[0].kind == "taken in"


@pytest.mark.slow
def test_other_network(dumps: Path) -> None:
    """Runs of unrelated models have no first suspect: the page says that they have next to nothing in common."""
    dump_mixture(dumps / "mixture", lambda _: None)
    for pair in ((dumps / "mixture", trained(dumps, "golden-mix")), (trained(dumps, "golden-mix"), dumps / "mixture")):
        found = diagnose(*pair)
        assert (found.finding, found.first_suspect) == ("structure", None)
        assert "next to no calls in common" in found.headline()
        assert "the same training?" in said(found)


@pytest.mark.slow
def test_larger_model(dumps: Path) -> None:
    """A model of twice the width in one process is no layout: the parameter of another shape is named, with both shapes."""
    dump(dumps / "wide", Shape(steps=1, hidden=2 * SHAPE.hidden), lambda _: None)
    first = diagnose(dumps / "wide", trained(dumps, "golden-mix")).first_suspect
    assert first is not None
    assert "differs by its shape ([" in first.why
    assert f"{2 * SHAPE.hidden}], in the golden run" in first.why


@pytest.mark.slow
def test_nan_against_infinity(dumps: Path, tmp_path: Path) -> None:
    """NaN in place of an infinity is a difference in both directions, and NaN at the same places on both sides is none, but said."""

    def becomes(value: float) -> Callable[[dict[str, Any]], None]:
        def change(document: dict[str, Any]) -> None:
            name = next(name for name in document["data"] if name.startswith("Functional.linear") and name.endswith("forward"))
            row = document["data"][name]["output"][0]
            row |= {"Max": value, "Min": value if math.isnan(value) else -1.0, "Mean": value, "Norm": value}
            row["nan_count" if math.isnan(value) else "inf_count"] = 1

        return change

    whole = trained(dumps, "golden-mix")
    nan, inf = edited(whole, tmp_path / "nan", becomes(math.nan)), edited(whole, tmp_path / "inf", becomes(math.inf))
    found = diagnose(nan, inf)
    assert found.finding == "nonfinite"
    assert "1 NaN" in found.suspects[0].why
    assert "1 Inf" in found.suspects[0].why
    assert diagnose(inf, nan).finding == "divergence"
    same = diagnose(nan, nan)
    assert same.finding == "none"
    assert any("1 tensor holds NaN or Inf on both sides" in problem for problem in same.problems)


def _with_buffer(path: Path, read: bool, before: float) -> Path:
    """Gradients that are copied into a flat buffer, part by part, whose other parts nobody has written. `read`: a call computes with it.
    `before`: what stood where the first gradient goes."""

    def tensor(norm: float, count: int = 0) -> dict[str, Any]:
        four = dict.fromkeys(("Max", "Min", "Mean", "Norm"), math.nan) if count else {"Max": norm, "Min": -norm, "Mean": 0.0, "Norm": norm}
        return {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": [64], **four, "requires_grad": False, "nan_count": count}

    def call(inputs: list[Any], output: Any) -> dict[str, Any]:
        return {"input_args": inputs, "input_kwargs": {}, "output": [output]}

    gradient, buffer = tensor(2.0), tensor(0.0, 7)
    data = {
        "Functional.linear.0.forward": call([tensor(1.0), tensor(3.0)], gradient),
        "Tensor.view.0.forward": call([buffer], buffer),
        "Tensor.narrow.0.forward": call([buffer], tensor(before)),
        "Tensor.copy_.0.forward": call([tensor(before), gradient], gradient),
        "Tensor.zero_.0.forward": call([buffer], tensor(0.0)),
    }
    if read:
        data["Tensor.mul.0.forward"] = call([buffer], buffer)
    place = path / "step0" / "rank0"
    place.mkdir(parents=True)
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None, "data": data}
    (place / "dump.json").write_text(json.dumps(header))
    (place / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
    (place / "stack.json").write_text("{}")
    return path


@pytest.mark.parametrize("read", [False, True])
def test_a_buffer_that_nobody_has_written(read: bool, tmp_path: Path) -> None:
    """NaN that both runs have in memory that is only looked at in parts, moved and written over hides nothing: what computes with it shows
    it, and is counted. What stands where a gradient is copied to is not where two runs begin to differ."""
    found = diagnose(_with_buffer(tmp_path / "run", read, 5.0), _with_buffer(tmp_path / "golden", read, 9.0))
    assert found.finding == "none", found.text()
    assert found.problems == (["2 tensors hold NaN or Inf on both sides and cannot be compared; each run alone tells why."] if read else [])
    assert "Tensor.copy_.0" not in said(found)
