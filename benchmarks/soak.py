"""A long run with a dump on every tenth step: what grows?

    python benchmarks/soak.py                       # 2,000 steps, statistics at mix
    python benchmarks/soak.py --task tensor --format packed --steps 2000

Prints, for windows of 200 steps, resident memory, open files, threads, hooks on the model, and the median time of steps without and
with a dump. Nothing may grow after the first window. tests/probe/training_unchanged/test_soak.py asserts all of it but the times.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import msprobe.pytorch as msprobe

WINDOW = 200


class Window(NamedTuple):
    """State after a window of steps.

    Attributes:
        resident: bytes; plain, dumped: median step time in milliseconds, without and with a dump.
        objects: objects that the garbage collector tracks.
    """

    step: int
    resident: int
    files: int
    threads: int
    hooks: int
    modes: int
    objects: int
    plain: float
    dumped: float


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


def hooks_on(model: nn.Module) -> int:
    """Forward hooks of all modules and gradient hooks of all parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_always_called")
    modules = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)
    return modules + sum(len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) for p in model.parameters())


def run(directory: Path, steps: int, task: str, level: str, summary_mode: str, tensor_format: str) -> list[Window]:
    """Train `steps` steps with a dump on every tenth; the state after every `WINDOW` steps. Old steps are removed as they come."""
    section = {"summary_mode": summary_mode} if task == "statistics" else {"tensor_format": tensor_format} if task == "tensor" else {}
    config = directory / "config.json"
    wanted = list(range(0, steps, 10))
    config.write_text(json.dumps({"task": task, "level": level, "step": wanted, "dump_path": str(directory / "dump"), task: section}))
    torch.manual_seed(0)
    model = nn.Sequential(Block(32), Block(32), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    debugger = msprobe.PrecisionDebugger(str(config))
    windows: list[Window] = []
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        begin = time.perf_counter()
        debugger.start(model)
        loss = model(torch.randn(4, 8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        debugger.stop()
        debugger.step()
        times[step % 10 == 0].append(time.perf_counter() - begin)
        if (step + 1) % WINDOW == 0:
            debugger.pipeline.advance(wait=True)
            debugger.writer.flush()
            hooks = hooks_on(model)
            for child in sorted((directory / "dump").glob("step*"))[:-1]:
                shutil.rmtree(child)
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            plain, dumped = (statistics.median(t) * 1e3 for t in times)
            modes = torch._C._len_torch_function_stack()
            files = len(os.listdir("/proc/self/fd"))
            state = Window(step + 1, resident, files, threading.active_count(), hooks, modes, len(gc.get_objects()), plain, dumped)
            windows.append(state)
            times = ([], [])
    return windows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--task", default="statistics", choices=["statistics", "tensor", "structure"])
    parser.add_argument("--level", default="mix", choices=["L0", "L1", "mix"])
    parser.add_argument("--summary-mode", default="statistics", choices=["statistics", "md5", "xor", "digest"])
    parser.add_argument("--format", default="files", choices=["files", "packed"])
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    a = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        windows = run(Path(root), a.steps, a.task, a.level, a.summary_mode, a.format)
    if a.json:
        print(json.dumps([w._asdict() for w in windows]))
        return
    print("| step | resident, MB | open files | threads | hooks | function modes | objects | plain step, ms | dumped step, ms |")
    print("|---|---|---|---|---|---|---|---|---|")
    for w in windows:
        print(
            f"| {w.step} | {w.resident / 1e6:.1f} | {w.files} | {w.threads} | {w.hooks} | {w.modes} | {w.objects} "
            f"| {w.plain:.2f} | {w.dumped:.2f} |"
        )


if __name__ == "__main__":
    main()
