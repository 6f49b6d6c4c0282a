"""Ranks that do not dump the same: nothing waits for anything, and the training keeps its bits."""

from __future__ import annotations

import atexit
import hashlib
import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forkpool import run_ranks
from torch import nn

from msprobe.pytorch import PrecisionDebugger
from msprobe_engine.formats.dump.reader import open_dump


class UserError(Exception):
    """Raised and caught in the training."""


def train(mode: str, out: str) -> str:
    """Four steps of a rank, with the probe where `out` names a directory; a hash of weights and random state at the end of the process."""
    atexit._clear()  # of the process that this one is a copy of
    rank, on = dist.get_rank(), out != ""
    if on:
        steps = ([0, 2] if rank == 0 else [1, 3]) if mode == "disjoint" else []
        config = Path(out, f"config{rank}.json")
        config.write_text(json.dumps({"task": "tensor", "level": "mix", "step": steps, "dump_path": f"{out}/dump", "tensor": {}}))
        PrecisionDebugger(str(config))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        if on:
            PrecisionDebugger.start(model)
        with suppress(UserError):
            loss = parallel(torch.randn(8, 16)).square().mean()
            loss.backward()
            if mode == "raises" and step == 1 and rank == 0:
                raise UserError
            total = loss.detach().clone()
            if mode != "raises":
                dist.all_reduce(total, async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()
        if on:
            if not (mode == "disjoint" and rank == 1):
                PrecisionDebugger.stop()
            PrecisionDebugger.step()
    state = b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + torch.get_rng_state().numpy().tobytes()
    atexit._run_exitfuncs()  # as a script ends; what is asked for is on the disk after that
    return hashlib.sha256(state).hexdigest()


@pytest.mark.framework
@pytest.mark.parametrize("mode", ["disjoint", "raises"])
def test_ranks_that_disagree(tmp_path: Path, mode: str) -> None:
    """One rank dumps while the other does not and never calls stop; an exception leaves one rank's step: the job ends as without
    the probe, bit for bit, and every step that was asked for is there."""
    assert run_ranks(2, train, mode, str(tmp_path), timeout=240) == run_ranks(2, train, mode, "", timeout=120)
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [0, 1, 2, 3]
    wanted = [[0], [1], [0], [1]] if mode == "disjoint" else [[0, 1]] * 4
    assert [dump.ranks(step) for step in dump.steps] == wanted
    for step, ranks in enumerate(wanted):
        for rank in ranks:
            one = dump.load(step, rank)
            assert one.complete
            assert any(name.startswith("Module.") for name in one.entries)
