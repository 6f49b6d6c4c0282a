"""A small network trained by torch.distributed.pipelining in two stages, or by one process that runs the same micro batches in a row."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT / "tests" / "frameworks") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests" / "frameworks"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from forkpool import run_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: E402

LAYERS, WIDTH, BATCH, MICRO, STEPS = 4, 16, 8, 4, 2
Plant = Callable[[nn.Module], None]


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks `first` to `stop` of the network; each stage counts its own from 0, or has the numbers of the whole (`whole`)."""

    def __init__(self, first: int, stop: int, whole: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number - (0 if whole else first)): Block(number) for number in range(first, stop)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def dump(path: Path, schedule: str = "", plant: Plant | None = None, level: str = "mix") -> Path:
    """Train and leave the dump at `path`; an existing one is kept. `schedule`: ``1f1b``, ``gpipe``; "" for one process. At level L0, where
    no message is recorded, stages have the numbers of the whole.

    Raises:
        RuntimeError: a rank failed.
    """
    if not (path / "done").exists():
        run_ranks(2 if schedule else 1, _train, str(path), schedule, plant, level, timeout=120)
        (path / "done").touch()
    return path


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) / MICRO


def _train(path: str, schedule: str, plant: Plant | None, level: str) -> None:
    from msprobe.pytorch import PrecisionDebugger

    rank = dist.get_rank() if schedule else 0
    half = LAYERS // 2
    model = Net(half * rank, half * (rank + 1), level == "L0") if schedule else Net(0, LAYERS)
    if plant is not None:
        plant(model)
    run = None
    if schedule:
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        run = kind(stage, n_microbatches=MICRO, loss_fn=_loss, scale_grads=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(dump_path=path, task="statistics", level=level, step=list(range(STEPS)))
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        debugger.start(model=model)
        if run is None:
            for part, target in zip(x.chunk(MICRO), y.chunk(MICRO)):
                _loss(model(part), target).backward()
        elif rank == 0:
            run.step(x)
        else:
            run.step(target=y)
        optimizer.step()
        debugger.stop()
        debugger.step()
    dist.barrier()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files
