"""Fused gradient accumulation: what autograd gets for a weight holds no values, and nothing of it is in a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from msprobe_engine.rows import read
from msprobe_engine.settings.schema import DumpSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.probe import TorchProbe

STAND_IN = torch.full((3, 4), float("nan"))
"""NaN for what happens to be in the memory."""


class Product(torch.autograd.Function):
    """Adds the weight's gradient into ``main_grad`` itself, as Megatron's linear layers and Transformer Engine do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T``."""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """The input's gradient, and a stand-in for the weight's."""
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.t() @ x)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, STAND_IN


class Linear(nn.Module):
    """A layer with such a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))
        self.weight.main_grad = torch.zeros(3, 4)  # type: ignore[attr-defined]
        self.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One product."""
        found: torch.Tensor = Product.apply(x, self.weight)
        return found


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
def test_no_record_has_memory_without_values(level: str, tmp_path: Path) -> None:
    """No statistics of the stand-in at any level, also where the weight is used twice within a call; the gradient of the module's
    parameter is what was added up."""
    model = nn.Sequential(Linear(), nn.Linear(3, 4))
    settings = ProbeSettings(output_dir=str(tmp_path), strict=True, dump=DumpSettings(level=level), sinks=SinkSettings(memory=True))
    probe = TorchProbe(settings)
    probe.attach(model)
    probe.begin_step(0)
    model(model(torch.ones(2, 4))).sum().backward()
    total = float(model[0].weight.main_grad.norm())  # type: ignore[union-attr,operator]
    probe.end_step()
    probe.close()
    (frame,) = probe.frames
    assert frame.entries
    for row in frame.rows:
        assert read(row).nans == 0
    if level != "L1":
        found = [entry for entry in frame.entries if entry.name.startswith("Module.0.Linear.parameters_grad")]
        assert read(frame.rows[found[-1].sections["weight"][0].row]).norm == pytest.approx(total)
