"""A job that ends with a checkpoint and goes on from it, in Megatron's own loop."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import pytest
from launches import EXAMPLES, launch

CONFIG = """
output_dir: {output}
strict: true
monitor: {{gradients: true, activations: true}}
"""
pytestmark = pytest.mark.framework


def run(place: Path, name: str, arguments: list[str], probe: bool = True) -> tuple[list[tuple[str, str]], dict[int, dict[str, float]], str]:
    """(loss and gradient norm of each log line, scalars of each step, what was printed) of one launch."""
    mcore = os.environ.get("MCORE19_ENVIRONMENT", "")
    if not mcore:
        pytest.skip("MCORE19_ENVIRONMENT does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    out, config = place / name, place / "probe.yaml"
    config.write_text(CONFIG.format(output=place / "unused"))
    ours = ["--msprobe-output-dir", str(out)] if probe else []
    given = ["--train-iters", "7", "--ckpt-format", "torch", "--save-interval", "2", "--save", str(place / f"{name}-saved"), *arguments]
    done = launch(str(EXAMPLES / "pretrain_loop.py"), [*given, *ours], ranks=1, probe=config if probe else None, path=mcore)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-6000:]
    found: dict[int, dict[str, float]] = {}
    for file in (out / "monitor").glob("*/scalars_*.csv"):
        with file.open() as stream:
            for row in csv.DictReader(stream):
                found.setdefault(int(row["step"]), {})[row["name"]] = float(row["value"])
    return re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", text), found, text


def activations(place: Path, name: str) -> dict[int, int]:
    """Rows of activations per step."""
    (file,) = (place / name / "monitor").glob("*/actv_*.csv")
    counts: dict[int, int] = {}
    with file.open() as stream:
        for row in csv.DictReader(stream):
            counts[int(row["step"])] = counts.get(int(row["step"]), 0) + 1
    return counts


@pytest.mark.slow
def test_a_job_that_goes_on(tmp_path: Path) -> None:
    """A job that ends by ``--exit-interval`` after iteration 4 has all its steps; the one that loads its checkpoint, and the arguments in
    it, goes on with step 4 and says that it was loaded; an iteration that Megatron leaves out has no step; evaluation and saving leave no
    trace; without the probe the same job logs the same numbers. With ``--skip-train`` there is no step and nothing is written."""
    _, first, _ = run(tmp_path, "first", ["--exit-interval", "4"])
    assert sorted(first) == [0, 1, 2, 3]
    assert [step for step in first if "checkpoint_saved" in first[step]] == [2]
    again = ["--load", str(tmp_path / "first-saved"), "--use-checkpoint-args", "--iterations-to-skip", "6"]
    logged, second, text = run(tmp_path, "second", again)
    assert "checkpoint loaded at iteration 4" in text
    assert sorted(second) == [4, 6]
    assert [step for step in second if "checkpoint_loaded" in second[step]] == [4]
    assert [second[4]["loss"], second[4]["grad_norm"]] == pytest.approx([float(value) for value in logged[0]], rel=2e-3)
    counts = {**activations(tmp_path, "first"), **activations(tmp_path, "second")}
    assert sorted(counts) == [0, 1, 2, 3, 4, 6]
    assert len(set(counts.values())) == 1
    plain, _, _ = run(tmp_path, "plain", again, probe=False)
    assert len(plain) == 2
    assert plain == logged
    _, nothing, text = run(tmp_path, "nothing", ["--load", str(tmp_path / "first-saved"), "--skip-train"])
    assert "validation loss" in text
    assert not nothing
    assert not (tmp_path / "nothing").exists()
