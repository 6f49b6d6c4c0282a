"""The feature on Megatron's real training loop, with the stand-in for MindSpeed's managers, launched by `msprobe run`, two ranks."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
CONFIG = """
output_dir: {output}
strict: true
{monitor}
dump: {{level: {level}, step: [0, 2]}}
grad_probe: {{grad_level: L1}}
"""
MONITOR = "monitor: {gradients: true, parameters: true, optimizer_states: true, activations: true, collectives: true}"
FAMILIES = {"grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq", "actv", "other", "scalars"}
EVERY = bool(os.environ.get("MSPROBE_TABLE") or os.environ.get("MSPROBE_EVERY_CELL") == "1")
LEVELS = ("mix", "L0", "L1") if EVERY else ("mix",)


@pytest.fixture
def place() -> str:
    found = os.environ.get("MSPROBE_MCORE19", "")
    if not found:
        pytest.skip("MSPROBE_MCORE19 does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    return found


def launch(tmp_path: Path, place: str, kind: str, files: list[Path], by: list[str]) -> list[list[tuple[str, str]]]:
    """Run `stand_in_loop.py`; what each of its trainings logs."""
    path = os.pathsep.join((str(HERE / "stand_in"), place, str(ROOT)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MSPROBE_CONFIG": ""}
    command = [*by, sys.executable, str(HERE / "stand_in_loop.py"), kind, *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000]
    trainings = re.split(r"^training \d+$", done.stdout, flags=re.MULTILINE)[1:]
    return [re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", text) for text in trainings]


def config(tmp_path: Path, kind: str, level: str) -> Path:
    file = tmp_path / f"{kind}-{level}.yaml"
    monitor = MONITOR if level == "mix" else ""
    file.write_text(CONFIG.format(output=tmp_path / kind / level, monitor=monitor, level=level))
    return file


def rows(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of all tables of the monitor and the gradient probe by rank and name, without what differs from run to run."""
    found = {}
    for file in sorted([*folder.glob("monitor/*/*.csv"), *folder.glob("grad_probe/*/*.csv")]):
        rank = re.search(r"rank(\d+)", file.parent.name)
        with file.open(encoding="utf-8-sig") as stream:
            found[f"{rank and rank[1]} {file.name}"] = [row for row in csv.DictReader(stream) if row.get("name") != "step_seconds"]
    return found


def dumps(folder: Path) -> dict[str, Any]:
    """By step and rank."""
    return {str(file.relative_to(folder)): json.loads(file.read_text())["data"] for file in folder.glob("dump/*/*/dump.json")}


@pytest.mark.framework
def test_as_the_megatron_integration(tmp_path: Path, place: str) -> None:
    """With MindSpeed's train_step in place of Megatron's, every value of every step on both ranks is what the Megatron integration gives
    without MindSpeed: the monitor's rows, those of the gradient probe, and every tensor of a dump; and the training logs what it logs
    without the probe."""
    files = {kind: [config(tmp_path, kind, level) for level in LEVELS] for kind in ("megatron", "mindspeed")}
    plain, *alone = launch(tmp_path, place, "megatron", files["megatron"], [])
    first, *more = files["mindspeed"]
    by = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--config", str(first), "--"]
    logged = launch(tmp_path, place, "mindspeed", more, by)
    assert len(plain) == 4
    assert logged == alone == [plain] * len(LEVELS)
    for level in LEVELS:
        ours, expected = tmp_path / "mindspeed" / level, tmp_path / "megatron" / level
        assert rows(ours) == rows(expected)
        assert {f"{rank} grad_summary_{step}.csv" for rank in (0, 1) for step in range(4)} <= set(rows(ours))
        assert len(dumps(ours)) == 4
        assert all(dumps(ours).values())
        assert dumps(ours) == dumps(expected)
        assert {"L0": "Module.", "L1": "Functional.", "mix": "Module."}[level] in " ".join(dumps(ours)["dump/step2/rank1/dump.json"])
    seen = rows(tmp_path / "mindspeed" / "mix")
    assert {name.split()[1].rpartition("_")[0] for name in seen} >= FAMILIES
    assert {row["step"] for row in seen["0 grad_reduced_0-99.csv"]} == {"0", "1", "2", "3"}
    for kind in files:
        assert len(list((tmp_path / kind / "mix" / "monitor").iterdir())) == 2, "one probe per rank"
    families = ("monitor: activations", "monitor: gradients", "monitor: parameters", "monitor: optimizer", "collectives")
    (*families, "grad probe", "same bits", *(f"dump {level}" for level in LEVELS))
