"""A small training whose gradients have zeros: an embedding of which some rows are never used, and a ReLU."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch

from msprobe_integrations.torch.dump.debugger import PrecisionDebugger


def build(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Embedding(11, 8), torch.nn.Linear(8, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def update(net: torch.nn.Module, optimizer: torch.optim.Optimizer, poison: str = "") -> None:
    """One update; the gradient of the parameter `poison` is made NaN."""
    loss = net(torch.randint(0, 6, (4, 7))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for name, parameter in net.named_parameters():
        if name == poison:
            parameter.grad.fill_(float("nan"))
    optimizer.step()


def settings(path: Path, level: str = "L1", **keys: Any) -> dict[str, Any]:
    top = {key: keys.pop(key) for key in ("rank", "step") if key in keys}
    return {"task": "grad_probe", "dump_path": str(path), **top, "grad_probe": {"grad_level": level, **keys}}


def collect(path: Path, level: str = "L1", steps: int = 2, seed: int = 0, poison: str = "", **keys: Any) -> PrecisionDebugger:
    """Run it under a debugger of its own and close that."""
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(settings(path, level, **keys))
    net, optimizer = build(seed)
    debugger.monitor(net)
    for _ in range(steps):
        update(net, optimizer, poison)
    debugger.stop()
    return debugger


def table(path: Path, step: int = 0, rank: int = 0) -> list[dict[str, str]]:
    data = (path / f"rank{rank}" / f"grad_summary_{step}.csv").read_bytes()
    assert data.startswith(b"\xef\xbb\xbf")
    return list(csv.DictReader(data.decode("utf-8-sig").splitlines()))
