"""Groups of the probe's own, and ranks that do not come."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks

from msprobe_integrations.torch.own_group import OwnGroup

pytestmark = pytest.mark.framework


def lonely(directory: str) -> tuple[bool, float]:
    """Rank 0 alone has a probe that builds a group; the training's collectives may take 8 s."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    limit = datetime.timedelta(seconds=8)
    dist.init_process_group("gloo", init_method=f"file://{Path(directory) / 'again'}", rank=rank, world_size=2, timeout=limit)
    failed = False
    if rank == 0:
        try:
            OwnGroup([0, 1], patience=60)
        except RuntimeError:
            failed = True
    total = torch.ones(1)
    dist.all_reduce(total)
    return failed, float(total)


def test_waiting_for_a_rank_without_probe_does_not_cost_the_training_its_time() -> None:
    """A rank whose probe waits in vain is back before the other rank's collective gives up."""
    with tempfile.TemporaryDirectory() as directory:
        assert run_ranks(2, lonely, directory) == [(True, 2.0), (False, 2.0)]
