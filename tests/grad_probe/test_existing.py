"""The same training under this project and under the existing tool: files, numbers, and each comparator on the other's files.

The existing tool is 8.1.1: 26.2.0 has no gradient probe.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import warm
from existing_environment import SOURCES, environment_of, existing_tool, reference
from grad_training import table

from msprobe import GradComparator

pytestmark = pytest.mark.framework
LEVELS = ("L0", "L1", "L2")

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


def run(python: str | Path, code: str, place: Path, *arguments: object) -> None:
    """Run `code` as a script in `place`, where neither tool can be imported from the working directory; with this Python warm."""
    script = place / "script.py"
    script.write_text(code)
    if python == sys.executable:
        done = warm.run(warm.script(script), *arguments, cwd=place, timeout=200)
    else:
        command = [str(python), str(script), *map(str, arguments)]
        environment = environment_of(python)
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def collect(python: str | Path, path: Path, level: str, seed: int = 0) -> Path:
    section = {"grad_level": level, "param_list": [], "bounds": [-0.01, 0, 0.01]}
    config = path.with_suffix(".json")
    config.write_text(json.dumps({"task": "grad_probe", "dump_path": str(path), "rank": [], "step": [], "grad_probe": section}))
    run(python, COLLECT, path.parent, config, seed)
    return path


def similarities(path: Path) -> list[list[str]]:
    return list(csv.reader((path / "rank0/similarities.csv").read_text("utf-8-sig").splitlines()))


def make(out: Path) -> None:
    """What 8.1.1 collects at every level, a second run with another seed, the tables of their similarity and the names of the pictures."""
    python = existing_tool("8.1.1").python
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for level in LEVELS:
            shutil.copytree(collect(python, place / level, level), out / level)
        shutil.copytree(collect(python, place / "other", "L1", 1), out / "other")
        run(python, COMPARE, place, out / "L1", out / "other", place / "similarity")
        pictures = sorted(p.name for p in (place / "similarity/rank0/similarities_picture").iterdir())
        (out / "similarity/rank0").mkdir(parents=True)
        shutil.copy(place / "similarity/rank0/similarities.csv", out / "similarity/rank0")
        (out / "pictures.json").write_text(json.dumps(pictures))


@pytest.fixture(scope="module", params=SOURCES)
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Where the existing tool's files come from, and their directory."""
    return request.param, reference("grad_probe", request.param, tmp_path_factory.mktemp("theirs"), make)


@pytest.mark.fast_cells("kept-L1")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.slow
def test_files_are_the_same(tmp_path: Path, theirs: tuple[str, Path], level: str) -> None:
    """Direction files are equal byte for byte, tables cell for cell: numbers to the last digit of float32, for the norm (which is summed
    in another order) up to the last digit; our further columns stand behind theirs. Kept numbers, and shares of them between bounds, may
    have been rounded otherwise by another processor; their checksums say nothing then."""
    source, existing = theirs[0], theirs[1] / level
    ours = collect(sys.executable, tmp_path / "ours", level)
    arrays = {p.relative_to(existing): p.read_bytes() for p in existing.rglob("*.npy")}
    assert arrays == {p.relative_to(ours): p.read_bytes() for p in ours.rglob("*.npy")}
    assert len(arrays) == (0 if level == "L0" else 12)
    for step in range(3):
        for mine, other in zip(table(ours, step), table(existing, step), strict=True):
            assert list(mine)[: len(other)] == list(other)
            assert set(mine) - set(other) == ({"NaN"} if level == "L2" else set())
            for column, value in other.items():
                if source == "kept" and column == "MD5":
                    assert len(mine[column]) == len(value)
                elif column == "norm" or (source == "kept" and column in ("max", "min")):
                    assert float(mine[column]) == pytest.approx(float(value), rel=2e-7 if source == "run" else 1e-4)
                else:
                    assert mine[column] == value


def test_comparators_agree(tmp_path: Path, theirs: tuple[str, Path]) -> None:
    """Both comparators read both tools' files, and their tables of similarities are equal text."""
    source, existing = theirs
    GradComparator.compare_distributed(existing / "L1", existing / "other", tmp_path / "by_ours")
    assert similarities(tmp_path / "by_ours") == similarities(existing / "similarity")
    assert any(0 < float(cell) < 1 for row in similarities(tmp_path / "by_ours")[1:] for cell in row[1:])
    pictures = sorted(p.name for p in (tmp_path / "by_ours/rank0/similarities_picture").iterdir())
    assert pictures == json.loads((existing / "pictures.json").read_text())
    if source == "run":
        ours = collect(sys.executable, tmp_path / "ours", "L1")
        run(existing_tool("8.1.1").python, COMPARE, tmp_path, ours, existing / "other", tmp_path / "by_theirs")
        assert similarities(tmp_path / "by_theirs") == similarities(existing / "similarity")
