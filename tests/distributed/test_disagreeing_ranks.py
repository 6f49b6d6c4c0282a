"""Ranks that do not dump the same: nothing waits for anything, and the training keeps its bits."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from msprobe_engine.dump.reader import open_dump

SCRIPT = """
import atexit, hashlib, json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from msprobe.pytorch import PrecisionDebugger

rank, mode, out = int(os.environ["RANK"]), sys.argv[1], sys.argv[2]
dist.init_process_group("gloo")
torch.set_num_threads(1)
on = out != ""
if on:
    steps = ([0, 2] if rank == 0 else [1, 3]) if mode == "disjoint" else []
    config = f"{out}/config{rank}.json"
    with open(config, "w") as file:
        json.dump({"task": "tensor", "level": "mix", "step": steps, "dump_path": f"{out}/dump", "tensor": {}}, file)
    PrecisionDebugger(config)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    if on:
        PrecisionDebugger.start(model)
    try:
        loss = parallel(torch.randn(8, 16)).square().mean()
        loss.backward()
        if mode == "raises" and step == 1 and rank == 0:
            raise RuntimeError("of the user")
        total = loss.detach().clone()
        dist.all_reduce(total, async_op=True).wait() if mode != "raises" else None
    except RuntimeError as error:
        assert str(error) == "of the user"
    optimizer.step()
    optimizer.zero_grad()
    if on:
        if not (mode == "disjoint" and rank == 1):
            PrecisionDebugger.stop()
        PrecisionDebugger.step()
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters()) + torch.get_rng_state().numpy().tobytes()
sys.stdout.write(f"[{rank} {hashlib.sha256(state).hexdigest()}]\\n")
sys.stdout.flush()
dist.destroy_process_group()
# A thread of gloo that lets go of a Python object while the interpreter ends is killed by it, and takes the process along (SIGABRT,
# about once in 500 runs, without the probe too): so the exit functions run here, and nothing after them.
atexit._run_exitfuncs()
os._exit(0)
"""


def train(script: Path, mode: str, out: str) -> list[str]:
    """Two gloo ranks; a hash of weights and random state per rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "MSPROBE_LOG_LEVEL": "3"}
    command = [sys.executable, str(script), mode, out]
    ranks = [
        subprocess.Popen(command, env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [re.findall(r"\[[01] (\w{64})\]", text)[0] for text in texts]


@pytest.mark.framework
@pytest.mark.parametrize("mode", ["disjoint", "raises"])
def test_ranks_that_disagree(tmp_path: Path, mode: str) -> None:
    """One rank dumps while the other does not and never calls stop; an exception leaves one rank's step: the job ends as without
    the probe, bit for bit, and every step that was asked for is there."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert train(script, mode, str(tmp_path)) == train(script, mode, "")
    dump = open_dump(tmp_path / "dump")
    assert dump.steps == [0, 1, 2, 3]
    wanted = [[0], [1], [0], [1]] if mode == "disjoint" else [[0, 1]] * 4
    assert [dump.ranks(step) for step in dump.steps] == wanted
    for step, ranks in enumerate(wanted):
        for rank in ranks:
            one = dump.load(step, rank)
            assert one.complete
            assert any(name.startswith("Module.") for name in one.entries)
