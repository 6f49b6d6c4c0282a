"""Single saved variables (debug.json): the first that differs, in the order of saving; alone the first that holds NaN or Inf."""

from __future__ import annotations

import json
import math
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.find.run import diagnose

FIXTURES = Path(__file__).parents[2] / "fixtures" / "compare"


def tensor(mean: float = 1.0, top: float | None = None) -> dict[str, Any]:
    """A tensor; `top`: its Max, Mean and Norm."""
    numbers = {"Max": 1 + mean, "Min": -1 - mean, "Mean": mean, "Norm": 3 * mean} | ({"Max": top, "Mean": top, "Norm": top} if top else {})
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 4], **numbers, "requires_grad": False}


def saved(root: Path, **values: Any) -> Path:
    """A dump of variables with these means (a dict: as it is), in this order; `x_grad` stands behind `x` as in the existing tool."""
    data = {f"{name}.0.debug": value if isinstance(value, dict) else tensor(value) for name, value in values.items()}
    path = root / "step0" / "rank0"
    path.mkdir(parents=True)
    header = {"task": "statistics", "level": "debug", "framework": "pytorch", "dump_data_dir": None}
    (path / "debug.json").write_text(json.dumps(header | {"data": data}))
    return root


def test_first_in_the_order_of_saving(tmp_path: Path) -> None:
    """Values come before gradients, gradients from the last value to the first."""
    golden = saved(tmp_path / "golden", a=1.0, a_grad=2.0, b=3.0, b_grad=4.0, c=5.0)
    for number, (changed, first) in enumerate(
        (({"c": 5.1, "a_grad": 2.2}, "c"), ({"a_grad": 2.2, "b_grad": 4.2}, "b_grad"), ({"a": 1.1, "c": 5.1}, "a"))
    ):
        values = {"a": 1.0, "a_grad": 2.0, "b": 3.0, "b_grad": 4.0, "c": 5.0} | changed
        found = diagnose(saved(tmp_path / str(number), **values), golden)
        assert (found.finding, found.differences) == ("divergence", 2)
        assert found.first_suspect is not None
        assert found.first_suspect.record == f"{first}.0.debug"
        assert "saved value differs by" in found.first_suspect.why


def test_round_off_and_names(tmp_path: Path) -> None:
    """Round-off of the calls between two saved values is accepted; a value that one run does not save is another structure."""
    golden = saved(tmp_path / "golden", a=1.0, b=3.0)
    assert diagnose(saved(tmp_path / "near", a=1.0, b=3.0 * (1 + 1e-6)), golden).finding == "none"
    more = diagnose(saved(tmp_path / "more", a=1.0, b=3.0, c=1.0), golden)
    assert (more.finding, more.unmatched["target"]) == ("structure", ["c.0.debug"])


def test_alone(tmp_path: Path) -> None:
    """The first NaN; the -Inf of a mask is none; without any the exit code is 0."""
    mask = tensor() | {"Min": -math.inf, "Mean": -math.inf, "Norm": math.inf}
    clean = saved(tmp_path / "clean", mask=mask, a=1.0)
    assert main(["diagnose", str(clean), "-o", str(tmp_path / "o")]) == 0
    found = diagnose(saved(tmp_path / "bad", mask=mask, a=1.0, b=tensor(1.0, math.nan), c=tensor(1.0, math.inf)))
    assert (found.finding, [suspect.record for suspect in found.suspects]) == ("nonfinite", ["b.0.debug", "c.0.debug"])


_BAD, _BLANK = tensor() | dict.fromkeys(("Max", "Min", "Mean", "Norm"), math.nan), tensor() | dict.fromkeys(("Max", "Min", "Mean", "Norm"))


@pytest.mark.parametrize(
    ("target", "golden", "said"),
    [
        (_BAD, _BAD, "1 tensor holds NaN or Inf on both sides"),
        (_BLANK, 2.0, "statistics are not all in both runs: 1;"),
        (2.0, _BLANK, "statistics are not all in both runs: 1;"),
        (_BLANK, _BLANK, "statistics are not all in both runs: 1;"),
    ],
)
def test_what_was_not_compared_is_said(target: Any, golden: Any, said: str, tmp_path: Path) -> None:
    """NaN on both sides, and a value without statistics, are not the same as a value that agrees."""
    found = diagnose(saved(tmp_path / "target", a=1.0, b=target), saved(tmp_path / "golden", a=1.0, b=golden))
    assert found.finding == "none"
    assert [said in str(problem) for problem in found.problems] == [True]


@pytest.mark.parametrize("version", ["8.1.1", "26.2.0"])
def test_existing_dumps(version: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the existing tool saved, by both commands: equal to the other version's, and a fault is named."""
    for one in ("8.1.1", "26.2.0"):
        with tarfile.open(FIXTURES / one / "debug.tar.xz") as archive:
            archive.extractall(tmp_path / one, filter="data")
    golden = shutil.copytree(tmp_path / "8.1.1" / "golden", tmp_path / "copy")
    for fault, code, line in (
        ("golden", 0, "No difference beyond round-off"),
        ("bf16", 1, "First difference: step 0, rank 0, logits.0.debug"),
        ("nan", 1, "First NaN or Inf: step 0, rank 0, logits.0.debug"),
    ):
        target = str(tmp_path / version / fault)
        assert main(["diagnose", target, str(golden), "-o", str(tmp_path / "page")]) == code
        assert capsys.readouterr().out.startswith(line)
        assert main(["compare", "-tp", target, "-gp", str(golden), "-o", str(tmp_path / "tables")]) == code
        assert capsys.readouterr().out.startswith(line)
