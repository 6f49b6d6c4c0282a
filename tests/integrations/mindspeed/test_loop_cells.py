"""The rest of the row of MindSpeed's stand-in in docs/integrations.md: replica check, incident and detaching, in two ranks of tensor
parallelism on Megatron's real training loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loop_cells_job import DRIFTING, FAILING, MORE
from trainer_cells import check_drift, check_incident

pytestmark = pytest.mark.framework
HERE = Path(__file__).parent
LAYOUT = ("MindSpeed", "TP 2, 2 ranks")
VERSION = "stand-in, Megatron 0.19.2"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    place = os.environ.get("MSPROBE_MCORE19", "")
    if not place:
        pytest.skip("MSPROBE_MCORE19 does not say where megatron-core 0.19 is installed (make venv-mcore19)")
    folder = tmp_path_factory.mktemp("loop")
    path = os.pathsep.join((str(HERE / "stand_in"), place, str(HERE.parents[2])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MSPROBE_CONFIG": ""}
    line = [sys.executable, str(HERE / "loop_cells_job.py"), str(folder)]
    done = subprocess.run(line, env=environment, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (found,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
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
