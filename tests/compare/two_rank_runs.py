"""Small real runs of two ranks for the tests in `damage`: ``two_rank_runs.py DIRECTORY`` trains with gloo and leaves there a dump per
task (``statistics``, ``md5``, ``tensor``, ``structure``) and one of rank 0 (``chosen``), a monitored run with alerts and its pack
(``monitored``), a pack with samples and random calls (``pack.zip``) and a checkpoint (``checkpoint.pt``)."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANKS, STEPS = 2, 2
DUMPS = {
    "statistics": {"task": "statistics", "statistics": {"summary_mode": "statistics"}},
    "md5": {"task": "statistics", "statistics": {"summary_mode": "md5"}},
    "tensor": {"task": "tensor"},
    "structure": {"task": "structure"},
    "chosen": {"task": "statistics", "rank": [0]},
}
PROBE = """\
output_dir: {output}
monitor: {{gradients: true, parameters: true}}
rules: [{{rule: recommended}}]
sinks: {{csv: {{enabled: true}}, jsonl: {{enabled: true}}, sqlite: {{enabled: true}}}}
"""


class Model(nn.Module):
    """Modules with parameters and without, a function with keywords, a dropout that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.last(nn.functional.dropout(nn.functional.gelu(self.norm(self.first(x)) * scale, approximate="tanh"), p=0.1))


def dump(task: str, root: Path, rank: int) -> None:
    """Two steps with the debugger."""
    from msprobe.pytorch import PrecisionDebugger

    settings = root / f"{task}{rank}.json"
    settings.write_text(json.dumps({"dump_path": str(root / task), "level": "mix", "rank": [], "step": [0, 1], **DUMPS[task]}))
    debugger = PrecisionDebugger(str(settings))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        debugger.start(model)
        _update(model, optimizer, rank)
        debugger.stop()
        debugger.step()


def monitor(task: str, root: Path, rank: int) -> None:
    """Eight steps with a probe; one loss is infinite."""
    from msprobe.pytorch import TorchProbe

    settings = root / f"probe{rank}.yaml"
    settings.write_text(PROBE.format(output=root / task))
    probe = TorchProbe.from_config(str(settings))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    probe.attach(model, optimizer)
    for step in range(8):
        probe.begin_step(step)
        probe.end_step({"loss": _update(model, optimizer, rank, float("inf") if step == 5 else 1.0)})
    probe.close()


def check(_task: str, root: Path, _rank: int) -> None:
    """A pack of the configuration, and a checkpoint."""
    from msprobe.core.config_check import ConfigChecker

    ConfigChecker.apply_patches()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ConfigChecker(model, None, str(root / "pack.zip"))
    for _ in range(STEPS):
        _update(model, optimizer, _rank)
    if _rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 2, "lr": 0.01}, root / "checkpoint.pt")


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, factor: float = 1.0) -> torch.Tensor:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    loss = model(x, scale=2.0).square().mean() * factor
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _rank(task: str, root: Path, rank: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo", init_method=f"file://{root / task}.store", rank=rank, world_size=RANKS)
    (dump if task in DUMPS else monitor if task == "monitored" else check)(task, root, rank)
    dist.destroy_process_group()


def main(root: Path) -> int:
    """Train; the largest exit code of a rank."""
    context = multiprocessing.get_context("fork")
    ended = []
    for task in (*DUMPS, "monitored", "checked"):
        processes = [context.Process(target=_rank, args=(task, root, rank)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ended += [abs(process.exitcode or 0) for process in processes]
    return max(ended)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
