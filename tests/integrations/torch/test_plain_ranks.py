"""Loops of several ranks that make no call: what is reported of each parameter is that of one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import rank_loops
from forkpool import run_ranks

pytestmark = pytest.mark.framework
LAYOUTS = {
    "ddp": "DDP, 2 ranks",
    "fsdp2": "FSDP2, 2 ranks",
    "tp": "TP 2, 2 ranks",
    "fsdp1": "FSDP1, 2 ranks",
    "fsdp1_flat": "FSDP1, 2 ranks",
    "fsdp1_whole": "FSDP1, 2 ranks",
}


@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_numbers(kind: str, clip: float, cells: Any) -> None:
    """Gradients, parameters, moments and losses with accumulation over micro batches, and with clipping; the training itself is the
    same to the bit."""
    micros = 1 if kind.startswith("fsdp1") else 2
    for found in run_ranks(2, rank_loops.follow, kind, micros, clip):
        assert found["same"]
        assert {"grad_reduced", "grad_unreduced", "param_updated", "exp_avg", "exp_avg_sq", "update"} <= set(found["families"])
        if clip:
            assert all(got == pytest.approx(true, rel=1e-5) for got, true in found["norms"])
    cells.ran("PyTorch", LAYOUTS[kind], "monitor: gradients", "monitor: parameters", "monitor: optimizer", "same bits")


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B"])
def test_pipeline(schedule: str, cells: Any) -> None:
    """Stages of `torch.distributed.pipelining`: each rank reports its own layers, under names of their own, with the gradients and the
    loss of one process; nobody waits for a rank that waits for the pipeline."""
    assert all(found["same"] for found in run_ranks(2, rank_loops.follow_pipeline, schedule))
    cells.ran("PyTorch", "PP 2, 2 ranks", "monitor: gradients", "monitor: parameters", "monitor: activations", "same bits")
