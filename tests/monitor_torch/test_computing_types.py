"""The run says what it computes in, whatever is written: gradients in float32 may come from products in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

pytestmark = pytest.mark.framework


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def autocast_that_is_off(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return model(x)


@pytest.mark.parametrize(
    ("forward", "dtype", "types"),
    [
        (plain, torch.float32, {"float32": "parameters"}),
        (plain, torch.bfloat16, {"bfloat16": "parameters"}),
        (autocast, torch.float32, {"float32": "parameters", "bfloat16": "autocast"}),
        (autocast_that_is_off, torch.float32, {"float32": "parameters"}),
    ],
)
def test_what_a_run_says(
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor], dtype: torch.dtype, types: dict[str, str], tmp_path: Path
) -> None:
    """In run.json of its rank; at the end torch is as it was."""
    entered = torch.autocast.__enter__
    model = nn.Linear(4, 4).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(ProbeSettings(output_dir=str(tmp_path), strict=True, monitor=MonitorSettings(), sinks=SinkSettings()))
    probe.attach(model, optimizer)
    for step in range(2):
        probe.begin_step(step)
        forward(model, torch.ones(2, 4, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.end_step()
    probe.close()
    (run,) = tmp_path.glob("monitor/*/run.json")
    assert json.loads(run.read_text())["computed_in"] == types
    assert torch.autocast.__enter__ is entered
