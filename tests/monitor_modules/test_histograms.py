"""Histograms of activations and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from watched import monitor, watch

from msprobe_engine.core.statistics import histograms

pytestmark = pytest.mark.framework


def slow(tensor: torch.Tensor) -> list[int]:
    """Counts by the exponent of the absolute value."""
    counts = [0] * histograms.bins("log2")
    for value in tensor.detach().double().flatten().tolist():
        if value:
            exponent = torch.frexp(torch.tensor(value, dtype=torch.float64))[1].item() - 1
            counts[min(max(int(exponent) + 40, 0), len(counts) - 1)] += 1
    return counts


def test_of_both_directions() -> None:
    """With histograms asked for, each sample of the family refers to the counts of its tensor; other families have none."""
    torch.manual_seed(0)
    model, kept = nn.Sequential(nn.Linear(5, 7), nn.ReLU()), {}

    def step(_: int) -> None:
        y = model[0](torch.randn(4, 5))
        y.retain_grad()
        kept["y"] = y
        (model[1](y).square()).sum().backward()

    for family in ("actv", "actv_grad"):
        (frame,) = watch(model, monitor(activations=True, activation_gradients=True, histograms=(family,)), step)
        found: dict[str, Any] = {s.name: s.extra["histogram"] for s in frame.samples if "histogram" in s.extra}
        assert {s.family for s in frame.samples if "histogram" in s.extra} == {family}
        said = found["0.output"]
        tensor = kept["y"] if family == "actv" else kept["y"].grad
        assert tensor is not None
        assert said["kind"] == "log2"
        assert histograms.counts(frame.rows, said["row"], "log2").tolist() == slow(tensor)
