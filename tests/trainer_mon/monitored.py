"""What the tests of `TrainerMon` share: configurations, a training loop, and reading what was written."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from existing_training import Net

from msprobe.pytorch import TrainerMon

EVERYTHING: dict[str, Any] = {
    "targets": {},
    "xy_distribution": True,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "param_distribution": True,
    "mv_distribution": True,
    "mg_direction": True,
    "ur_distribution": True,
    "stack_info": True,
    "print_struct": True,
    "ops": ["norm", "min", "max", "mean", "nans", "zeros"],
    "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan"}], "dump": True},
}


def config(directory: Path, **keys: Any) -> Path:
    """A monitor_config.json; without keys of its own it watches weight gradients."""
    path = directory / "monitor_config.json"
    path.write_text(json.dumps(keys or {"targets": {}, "wg_distribution": True}))
    return path


def directory_of(root: Path, rank: int = 0) -> Path:
    """The rank's directory."""
    (found,) = root.glob(f"*-rank{rank}-*")
    return found


def tables(root: Path, rank: int = 0) -> dict[str, list[dict[str, str]]]:
    """Rows per family, in the order of the steps."""
    out: dict[str, list[dict[str, str]]] = {}
    paths = [p for p in directory_of(root, rank).glob("*_*-*.csv") if not p.name.startswith("scalars")]
    for path in sorted(paths, key=lambda p: int(p.stem.rpartition("_")[2].partition("-")[0])):
        with path.open(newline="") as file:
            out.setdefault(path.name.rpartition("_")[0], []).extend(csv.DictReader(file))
    return out


def steps_of(root: Path, family: str = "grad_reduced", rank: int = 0) -> list[int]:
    """The steps that have rows, each once."""
    return sorted({int(row["step"]) for row in tables(root, rank).get(family, [])})


def loop(
    net: torch.nn.Module, optimizer: Any, steps: int, micro_batches: int = 1, before: Callable[[int], Any] = lambda _: None
) -> list[torch.Tensor]:
    """Train; `before` is called with the number of each step."""
    losses = []
    for step in range(steps):
        before(step)
        for _ in range(micro_batches):
            ids = torch.randint(0, 11, (3, 5))
            loss = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def build(seed: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    """Model and optimizer."""
    torch.manual_seed(seed)
    net = Net()
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def monitored(path: Path, steps: int, micro_batches: int = 1, before: Callable[[int], Any] = lambda _: None, **keys: Any) -> TrainerMon:
    """Train under a `TrainerMon` and stop it."""
    net, optimizer = build()
    monitor = TrainerMon(path)
    monitor.set_monitor(net, optimizer, grad_acc_steps=micro_batches, **keys)
    loop(net, optimizer, steps, micro_batches, before)
    monitor.stop()
    return monitor
