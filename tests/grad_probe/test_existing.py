"""The same training under this project and under the existing tool: files, numbers, and each comparator on the other's files.

Opt-in: MSPROBE_EXISTING_VENV_81 names a virtual environment that holds its version 8.1.1 (26.2.0 has no gradient probe).
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from grad_training import table

from msprobe import GradComparator

VARIABLE = "MSPROBE_EXISTING_VENV_81"
pytestmark = [pytest.mark.framework, pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} does not name 8.1.1")]

COLLECT = """
import sys, torch
from msprobe.pytorch import PrecisionDebugger
config, seed = sys.argv[1], int(sys.argv[2])
torch.manual_seed(seed)
net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
debugger = PrecisionDebugger(config)
debugger.monitor(net)
for step in range(3):
    loss = net(torch.randn(4, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
COMPARE = "import sys\nfrom msprobe import GradComparator\nGradComparator.compare_distributed(*sys.argv[1:4])"


def theirs() -> str:
    return str(Path(os.environ[VARIABLE]).absolute() / "bin/python")


def run(python: str, code: str, place: Path, *arguments: object) -> None:
    """Run `code` as a script in `place`, where neither tool can be imported from the working directory."""
    script = place / "script.py"
    script.write_text(code)
    done = subprocess.run([python, script, *map(str, arguments)], cwd=place, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def collect(python: str, path: Path, level: str, seed: int = 0) -> Path:
    section = {"grad_level": level, "param_list": [], "bounds": [-0.01, 0, 0.01]}
    config = path.with_suffix(".json")
    config.write_text(json.dumps({"task": "grad_probe", "dump_path": str(path), "rank": [], "step": [], "grad_probe": section}))
    run(python, COLLECT, path.parent, config, seed)
    return path


def similarities(path: Path) -> list[list[str]]:
    return list(csv.reader((path / "rank0/similarities.csv").read_text("utf-8-sig").splitlines()))


@pytest.mark.parametrize("level", ["L0", "L1", "L2"])
def test_files_are_the_same(tmp_path: Path, level: str) -> None:
    """Direction files are equal byte for byte, tables cell for cell: numbers to the last digit of float32, for the norm (which is summed
    in another order) up to the last digit; our further columns stand behind theirs."""
    ours, existing = collect(sys.executable, tmp_path / "ours", level), collect(theirs(), tmp_path / "theirs", level)
    arrays = {p.relative_to(existing): p.read_bytes() for p in existing.rglob("*.npy")}
    assert arrays == {p.relative_to(ours): p.read_bytes() for p in ours.rglob("*.npy")}
    assert len(arrays) == (0 if level == "L0" else 12)
    for step in range(3):
        for mine, other in zip(table(ours, step), table(existing, step), strict=True):
            assert list(mine)[: len(other)] == list(other)
            assert set(mine) - set(other) == ({"NaN"} if level == "L2" else set())
            assert float(mine["norm"]) == pytest.approx(float(other["norm"]), rel=2e-7)
            assert {k: mine[k] for k in other if k != "norm"} == {k: v for k, v in other.items() if k != "norm"}


def test_comparators_agree(tmp_path: Path) -> None:
    """Both comparators read both tools' files, and their tables of similarities are equal text."""
    ours = collect(sys.executable, tmp_path / "ours", "L1", 0)
    existing = collect(theirs(), tmp_path / "theirs", "L1", 1)
    run(theirs(), COMPARE, tmp_path, ours, existing, tmp_path / "by_theirs")
    GradComparator.compare_distributed(ours, existing, tmp_path / "by_ours")
    assert similarities(tmp_path / "by_ours") == similarities(tmp_path / "by_theirs")
    assert any(0 < float(cell) < 1 for row in similarities(tmp_path / "by_ours")[1:] for cell in row[1:])
    pictures = [sorted(p.name for p in (tmp_path / name / "rank0/similarities_picture").iterdir()) for name in ("by_ours", "by_theirs")]
    assert pictures[0] == pictures[1]
