"""A training whose rank 0 starts a process that trains, too. Arguments: how it is started (``none``, ``subprocess``, ``explicit``,
``debugger``, ``fork``, ``spawn``; ``early``: before the training begins; ``killed once``: rank 1 kills itself in its first launch), and
the settings file for those that make a probe themselves. With JOB_WAITS the last step lasts until that file is there."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

HOW, SETTINGS = sys.argv[1:3]
STEPS, AT = 6, 2
CHILDREN = ("subprocess", "explicit", "debugger", "fork", "spawn")


def child_training() -> None:
    """What an evaluation, a reward model or a conversion may do: another model, other numbers."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (model(torch.randn(2, 3)) * 1000).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def explicit_training() -> None:
    """The same with a probe of its own."""
    from msprobe_integrations.torch.monitor.probe import TorchProbe

    probe = TorchProbe.from_config(SETTINGS)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe.attach(model, optimizer)
    for step in range(3):
        probe.begin_step(step)
        (model(torch.randn(2, 3)) * 1000).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step({"loss": 1000.0})
    probe.close()


def debugger_training() -> None:
    """The same with a dump of its own."""
    from msprobe_integrations.torch.dump.debugger import PrecisionDebugger

    debugger = PrecisionDebugger(SETTINGS)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        debugger.start(model)
        (model(torch.randn(2, 3)) * 1000).square().mean().backward()
        optimizer.step()
        debugger.stop()
        debugger.step()


def start_child() -> None:
    """Start it, and wait for it."""
    if HOW == "fork":
        pid = os.fork()
        if not pid:
            code = 1
            try:
                child_training()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    elif HOW == "spawn":
        process = multiprocessing.get_context("spawn").Process(target=child_training)
        process.start()
        process.join()
        assert process.exitcode == 0
    else:
        subprocess.run([sys.executable, __file__, f"child {HOW}", SETTINGS], check=True)


def main() -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if "RANK" in os.environ:
        # One meeting place per launch: torchrun keeps its store, in which ranks of a launch that has failed are still to be found.
        meeting = Path(f"meeting{os.environ.get('TORCHELASTIC_RESTART_COUNT')}-{os.environ['MASTER_PORT']}").absolute()
        ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        dist.init_process_group("gloo", init_method=f"file://{meeting}", **ranks)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    if HOW == "early" and os.environ.get("RANK", "0") == "0":
        start_child()
    for step in range(STEPS):
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS - 1 and "JOB_WAITS" in os.environ:
            Path(f"waiting{os.environ.get('RANK', '')}").touch()
            while not Path(os.environ["JOB_WAITS"]).exists():
                time.sleep(0.05)
        if step == AT + 1 and HOW == "killed once" and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == AT and HOW in CHILDREN and os.environ.get("RANK", "0") == "0":
            start_child()
        losses.append(loss.item())
    Path(f"loss{os.environ.get('RANK', '')}.txt").write_text(repr(losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainings = {
        "child subprocess": child_training,
        "child early": child_training,
        "child explicit": explicit_training,
        "child debugger": debugger_training,
    }
    trainings.get(HOW, main)()
