"""G: two runs of one training that differ only in the order of additions (atomic operations) have no error; one with a fault has."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.measure.options import CompareOptions
from msprobe_engine.report.table.api import compare_dumps
from msprobe_engine.report.table.summary import DIFFERENT, EQUAL, Comparison
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe

_STEPS = 2
_PLACES = 8


class _Scattered(torch.autograd.Function):
    """Sums of rows over few places, forward and backward: on a GPU by atomic additions, whose order no run repeats. The CPU adds in a fixed
    order: there `order` says which. It is no argument, because arguments of two runs are compared."""

    order = 0

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _scatter(x)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        return _scatter(gradients[0])


def _scatter(x: torch.Tensor) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    places = torch.arange(flat.shape[0], device=x.device) % _PLACES
    order = torch.randperm(flat.shape[0], generator=torch.Generator().manual_seed(_Scattered.order)).to(x.device)
    sums = flat.new_zeros(_PLACES, flat.shape[1]).index_add_(0, places[order], flat[order])
    return (sums[places] / (flat.shape[0] / _PLACES)).reshape(x.shape)


class _Mixed(nn.Module):
    """A norm, and a tenth of the mean over tokens."""

    def __init__(self, norm: nn.Module, fault: float) -> None:
        super().__init__()
        self.norm, self.fault = norm, fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        scattered: torch.Tensor = _Scattered.apply(y)  # type: ignore[no-untyped-call]
        mixed: torch.Tensor = y + (0.1 + self.fault) * scattered
        return mixed


def run(device: Device) -> Iterator[Line]:
    """Statistics of all modules and calls, two steps."""
    for dtype in (torch.float32, torch.bfloat16) if device.full else (torch.float32,):
        name = f"noise of two runs, {str(dtype).removeprefix('torch.')}"
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for target, order, fault in (("golden", 0, 0.0), ("again", 1, 0.0), ("faulty", 0, 0.01)):
                _train(device, dtype, root / target, order, fault)
            noise, faulty = (_compare_with_golden(root, target) for target in ("again", "faulty"))
        wrong = []
        if noise.exit_code != EQUAL:
            wrong.append(f"called a difference: {noise.headline()}")
        if faulty.exit_code != DIFFERENT:
            wrong.append(f"a fault of a tenth in one sum was not found: {faulty.headline()}")
        verdicts = ", ".join(f"{word} {number}" for word, number in noise.verdicts.items())
        yield Line(name, "WRONG" if wrong else "ok", verdicts, "no error", "; ".join(wrong))


def _train(device: Device, dtype: torch.dtype, directory: Path, order: int, fault: float) -> None:
    _Scattered.order = order
    job = Job("tiny", str(device.device), dtype)
    blocks: Any = job.model.get_submodule("blocks")
    blocks[0].norm2 = _Mixed(blocks[0].norm2, fault)
    with attach_probe(job, "mix", directory) as step:
        for _ in range(_STEPS):
            step()


def _compare_with_golden(root: Path, target: str) -> Comparison:
    return compare_dumps(root / target, root / "golden", root / f"output-{target}", CompareOptions(scheduler="serial"))
