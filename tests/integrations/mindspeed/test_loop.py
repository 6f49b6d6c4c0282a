"""The feature on Megatron's real training loop (0.19), with the stand-in for MindSpeed's managers, launched by `msprobe run`, two ranks."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from harness.checks import check_drift, check_incident
from megatron_loop import DRIFTING, FAILING, MORE

pytestmark = [pytest.mark.framework, pytest.mark.slow]
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


@pytest.fixture(scope="module")
def place() -> str:
    """Where megatron-core 0.19 is: MCORE19_ENVIRONMENT, or what ``make venv-mcore19`` makes."""
    found = Path(os.environ.get("MCORE19_ENVIRONMENT") or ROOT / ".venvs" / "mcore19")
    if not found.is_dir():
        pytest.skip(f"no megatron-core 0.19 in {found}: make venv-mcore19")
    return str(found)


def run_loop(folder: Path, place: str, kind: str, *files: Path, by: Sequence[str] = ()) -> str:
    """What `megatron_loop.py` prints."""
    path = os.pathsep.join((str(HERE / "stand_in"), place, str(ROOT)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MSPROBE_CONFIG": ""}
    command = [*by, sys.executable, str(HERE / "megatron_loop.py"), kind, str(folder), *map(str, files)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000]
    return done.stdout


def logged_by(text: str) -> list[list[tuple[str, str]]]:
    """What each of the trainings logs."""
    trainings = re.split(r"^training \d+$", text, flags=re.MULTILINE)[1:]
    return [re.findall(r"lm loss: (\S+) .*?grad norm: (\S+)", one) for one in trainings]


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


@pytest.mark.parametrize("levels", [("mix", "L0", "L1")])
def test_as_the_megatron_integration(tmp_path: Path, place: str, levels: tuple[str, ...]) -> None:
    """With MindSpeed's train_step in place of Megatron's, every value of every step on both ranks is what the Megatron integration gives
    without MindSpeed: the monitor's rows, those of the gradient probe, and every tensor of a dump; and the training logs what it logs
    without the probe."""
    files = {kind: [config(tmp_path, kind, level) for level in levels] for kind in ("megatron", "mindspeed")}
    plain, *alone = logged_by(run_loop(tmp_path, place, "megatron", *files["megatron"]))
    first, *more = files["mindspeed"]
    by = [sys.executable, "-m", "msprobe_engine.cli.main", "run", "--config", str(first), "--"]
    logged = logged_by(run_loop(tmp_path, place, "mindspeed", *more, by=by))
    assert len(plain) == 4
    assert logged == alone == [plain] * len(levels)
    for level in levels:
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
    (*families, "grad probe", "same bits", *(f"dump {level}" for level in levels))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, place: str) -> tuple[dict[str, Any], Path]:
    """What the ranks of all trainings with faults have seen, and the folder of their settings."""
    folder = tmp_path_factory.mktemp("loop")
    (found,) = [line for line in run_loop(folder, place, "faults").splitlines() if line.startswith("found ")]
    return json.loads(found.removeprefix("found ")), folder


def test_replicas(ran: Any) -> None:
    """Silent where both ranks of the group hold the same layer norms; a weight that drifts on one of them is named in that step."""
    for steps, said in ran[0]["alike"]:
        assert steps == [0, 1, 2, 3]
        assert said == []
    check_drift([[tuple(alert) for alert in said] for _, said in ran[0]["drift"]], DRIFTING)


def test_incident(ran: Any) -> None:
    """`nan_analyze` names step, rank and module of a planted fault."""
    check_incident(ran[1] / "fault", 1, FAILING)


def test_detach(ran: Any) -> None:
    """When the probe has left a training, every name of MindSpeed, Megatron and torch is the same object as before it came: MindSpeed's
    `train_step`, which was wrapped, too. MindSpeed takes its patch off and Megatron's own function is there."""
    for one in ran[0]["detach"]:
        assert len(one["followed"]) == MORE
        assert one["wrapped"]
        assert one["left"] == []
        assert one["patched"]
        assert one["bare"] == ["megatron.training.training", "train_step"]
