"""Every family on a GPU is what it is on the CPU, and no step waits for the device (skipped where there is none)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.settings.schema import CsvSettings, LayerFeatureSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

MONITOR = MonitorSettings(
    activations=True,
    activation_gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    momentum_agreement=True,
    unreduced_gradients=True,
    histograms=("grad_reduced",),
    layer_features=LayerFeatureSettings(linear=("*",)),
    ops=("norm", "min", "max", "mean", "nans", "zeros", "kurtosis", "underflow"),
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@contextlib.contextmanager
def no_wait(device: str) -> Iterator[None]:
    """On a GPU whatever waits for it raises."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def train(device: str, directory: Path) -> list[Frame]:
    """Three steps of one model; the first one may wait (a new kernel is tried there once)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    data = torch.randn(3, 32, 16).to(device)
    sinks = SinkSettings(csv=CsvSettings(enabled=False), memory=True)
    probe = TorchProbe(ProbeSettings(output_dir=str(directory), strict=True, monitor=MONITOR, sinks=sinks))
    probe.attach(model, optimizer)
    for step in range(3):
        with no_wait(device if step else "cpu"):
            probe.begin_step(step)
            loss = model(data[step]).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step({"loss": loss})
    probe.close()
    return probe.frames


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_every_family(tmp_path: Path, device: str) -> None:
    """Samples of a device have the names of those of the CPU and their numbers, within the rounding of the training itself."""
    want, got = train("cpu", tmp_path / "cpu"), train(device, tmp_path / "device")
    assert [frame.step for frame in got] == [0, 1, 2]
    for a, b in zip(want, got):
        assert {s.family for s in b.samples} >= {
            "actv",
            "actv_grad",
            "grad_reduced",
            "param_updated",
            "exp_avg",
            "update",
            "ratio",
            "linear_hook",
        }
        assert b.lost == a.lost
        assert b.scalars["loss"] == pytest.approx(a.scalars["loss"], rel=1e-4)
        for left, right in zip(a.records(), b.records(), strict=True):
            assert isinstance(left.source, Sample)
            assert isinstance(right.source, Sample)
            assert (left.name, left.source.family, left.source.phase) == (right.name, right.source.family, right.source.phase)
            x, y = left.statistics, right.statistics
            assert (x.count, x.nans, x.infs) == (y.count, y.nans, y.infs)
            if x.norm is not None and math.isfinite(x.norm):
                assert y.norm == pytest.approx(x.norm, rel=2e-3, abs=1e-7), left.name
