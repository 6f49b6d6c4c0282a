"""`msprobe nan_analyze`, the command; what it finds is tested with `diagnose`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.cli.main import main


def tensor(top: float) -> dict[str, Any]:
    """A tensor object of a dump file with this maximum."""
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": top, "Min": 0.0, "Mean": top, "Norm": top}


def write_step(step: Path, top: float) -> Path:
    """A step with one rank and one call that turns 1.0 into `top`."""
    rank = step / "rank0"
    rank.mkdir(parents=True)
    record = {"input_args": [tensor(1.0)], "input_kwargs": {}, "output": [tensor(top)]}
    head = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    (rank / "dump.json").write_text(json.dumps({**head, "data": {"Torch.log.0.forward": record}}))
    (rank / "stack.json").write_text("{}")
    (rank / "construct.json").write_text("{}")
    return step


def test_a_finding_is_printed_written_and_told_by_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A NaN gives the operator on stdout, one JSON file under -o, and exit code 1."""
    step = write_step(tmp_path / "step3", float("nan"))
    assert main(["nan_analyze", "-i", str(step), "-o", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "Torch.log.0.forward" in out
    (path,) = (tmp_path / "out").glob("anomaly_analyze_*.json")
    assert str(path) in out
    assert json.loads(path.read_text())["rank_0"][0]["op_name"] == "Torch.log.0.forward"


def test_a_clean_step_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without NaN and Inf the exit code is 0 and no file is made; the other version's command name works too."""
    step = write_step(tmp_path / "step3", 2.0)
    assert main(["-f", "pytorch", "overflow_check", "--input_path", str(step), "--output_path", str(tmp_path / "out")]) == 0
    assert "step 3" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_directory_without_dumps_is_a_clean_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing or empty input directory is one message on stderr and exit code 2."""
    for path in (tmp_path, tmp_path / "missing"):
        assert main(["nan_analyze", "-i", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("msprobe nan_analyze: ")
        assert str(path) in err


def test_the_run_as_in_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """RUN is ``-i RUN``; both are two things."""
    monkeypatch.chdir(tmp_path)
    said = []
    for words in (["nothing"], ["-i", "nothing"]):
        assert main(["nan_analyze", *words]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert main(["nan_analyze", "a", "-i", "b"]) == 2
    assert "both say what is looked at" in capsys.readouterr().err
