"""`diagnose` of two runs whose numbers part, and one of which has a NaN as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main
from msprobe_engine.find import findings, single_run
from msprobe_engine.find.run import diagnose

LOG = "Torch.log.0.forward"
WORDS = "first NaN or Inf, which the other run has not: step 2, rank 0, Torch.log.0.forward"


def _tensor(value: float) -> dict[str, Any]:
    four = {"Max": value, "Min": -value, "Mean": value / 8, "Norm": 3 * value}
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [4, 4], **four, "requires_grad": True}


def _run(root: Path, drift: float = 1.0, logarithm: float = 0.25) -> Path:
    """Steps 0, 1 and 2 of two calls: from step 1 on what goes in is `drift` times as large, in step 2 the logarithm is this number."""
    for step in range(3):
        given = _tensor(2.0 * (drift if step else 1.0))
        data = {
            "Functional.linear.0.forward": {"input_args": [given], "input_kwargs": {}, "output": [_tensor(3.0 * (drift if step else 1.0))]},
            LOG: {"input_args": [_tensor(0.5)], "input_kwargs": {}, "output": [_tensor(logarithm if step == 2 else 0.25)]},
        }
        directory = root / f"step{step}" / "rank0"
        directory.mkdir(parents=True)
        header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
        (directory / "dump.json").write_text(json.dumps(header | {"data": data}))
        (directory / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
        (directory / "stack.json").write_text("{}")
    return root


def test_nan_behind_the_first_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The earlier difference leads, and text, JSON and page name the NaN of a later step as well."""
    target, golden = _run(tmp_path / "target", 1.5, float("nan")), _run(tmp_path / "golden")
    assert main(["diagnose", str(target), str(golden), "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    first, later = document["first_suspect"], document["nonfinite"]["target"]
    assert (document["finding"], first["step"], first["record"]) == ("divergence", 1, "Functional.linear.0.forward")
    assert (later["step"], later["rank"], later["record"]) == (2, 0, LOG)
    assert [line for line in said.splitlines() if line.split()[0] == "also"] == [f"  also       {WORDS}"]
    assert WORDS in (tmp_path / "out" / "diagnosis.html").read_text()


def test_nan_of_the_golden_run(tmp_path: Path) -> None:
    """Of the golden run it is said that it is the golden run's."""
    target, golden = _run(tmp_path / "target", 1.5), _run(tmp_path / "golden", logarithm=float("inf"))
    (line,) = diagnose(target, golden).first_nonfinite()
    assert line.startswith("first NaN or Inf of the golden run, which the other run has not: step 2, rank 0")


def test_nan_on_both_sides(tmp_path: Path) -> None:
    """What both runs have tells nothing of the difference."""
    target, golden = _run(tmp_path / "target", 1.5, float("nan")), _run(tmp_path / "golden", logarithm=float("nan"))
    found = diagnose(target, golden)
    assert found.finding == findings.DIVERGENCE
    assert not found.nonfinite


def test_the_suspect_is_the_nan(tmp_path: Path) -> None:
    """A NaN that is the first difference is not said twice."""
    found = diagnose(_run(tmp_path / "target", 1.0, float("nan")), _run(tmp_path / "golden"))
    assert (found.finding, found.first_suspect and found.first_suspect.record) == (findings.NONFINITE, LOG)
    assert not found.nonfinite


def test_runs_of_finite_numbers_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that part and hold no NaN and no Inf have nothing to be looked for in each of them alone."""
    monkeypatch.setattr(single_run, "diagnose_alone", lambda _: pytest.fail("read again"))
    assert diagnose(_run(tmp_path / "target", 1.5), _run(tmp_path / "golden")).finding == findings.DIVERGENCE
