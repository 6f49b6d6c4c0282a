"""`TrainerMon` in a Megatron training: distributed optimizer, two data-parallel ranks, virtual pipeline chunks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from forkpool import run_ranks
from megatron_harness import run_gpt

from msprobe.pytorch import TrainerMon

sys.path.insert(0, str(Path(__file__).parents[2] / "trainer_mon"))
from monitored import config, directory_of, steps_of, tables

pytestmark = pytest.mark.framework
KEYS: dict[str, Any] = {
    "targets": {},
    "wg_distribution": True,
    "param_distribution": True,
    "mv_distribution": True,
    "mg_direction": True,
    "ops": ["norm", "nans"],
}


def trained(argv: str, directory: str, watched: bool) -> dict[str, Any]:
    """Two ranks train; gives what must not depend on the monitor."""
    monitors = []

    def after_build(_state: Any, chunks: Any, optimizer: Any) -> None:
        import torch.distributed as dist

        place = Path(directory) / str(dist.get_rank())
        place.mkdir()
        os.environ["MONITOR_OUTPUT_DIR"] = f"{directory}/out"
        monitor = TrainerMon(config(place, **KEYS))
        monitor.set_monitor(chunks, optimizer, dp_group=dist.group.WORLD)
        monitors.append(monitor)

    state, _ = run_gpt(argv, None, after_build if watched else None)
    for monitor in monitors:
        monitor.stop()
    return state


@pytest.mark.parametrize("flags", ["--distopt", ""])
@pytest.mark.fast_cells("")
def test_megatron(tmp_path: Path, flags: str) -> None:
    """Every update is a step with rows of all families on the ranks that hold them; dp_group leaves the second rank's reduced gradients
    out; the training is the same to the bit."""
    argv = f"--steps 3 {flags}"
    plain = run_ranks(2, trained, argv, str(tmp_path), False)
    watched = run_ranks(2, trained, argv, str(tmp_path), True)
    assert [s["losses"] for s in watched] == [s["losses"] for s in plain]
    assert [s["weights"] for s in watched] == [s["weights"] for s in plain]
    out = tmp_path / "out"
    for rank in range(2):
        rows = tables(out, rank)
        for family in ("grad_unreduced", "param_origin", "param_updated"):
            assert steps_of(out, family, rank) == [0, 1, 2], (family, sorted(rows))
        assert steps_of(out, "exp_avg", rank) == [1, 2]
        assert ("grad_reduced" in rows) == (rank == 0), directory_of(out, rank)
        assert all(row["nans"] == "0" for family in rows.values() for row in family)
    assert steps_of(out, "other", 0) == [0, 1, 2]
    assert len({row["name"] for row in tables(out)["grad_reduced"]}) == len(plain[0]["weights"])
