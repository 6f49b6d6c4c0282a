"""What users hand to `end_step`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from msprobe_engine.records import Frame
from msprobe_engine.rules.base import Alert
from msprobe_engine.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings
from msprobe_integrations.torch.probe import TorchProbe


class Frames:
    name = "frames"

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def write(self, frame: Frame, alerts: list[Alert]) -> None:  # noqa: ARG002 - the protocol's signature
        self.frames.append(frame)

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None


def test_a_scalar_that_is_no_number_costs_itself_only(tmp_path: Path) -> None:
    """Text, huge integers, complex numbers and containers are left out and counted; steps stay apart and memory does not grow."""
    sink = Frames()
    settings = ProbeSettings(output_dir=str(tmp_path), monitor=MonitorSettings(), incident=IncidentSettings(level="mix"))
    probe = TorchProbe(settings, extra_sinks=[sink])  # type: ignore[list-item]
    model = nn.Linear(2, 2)
    probe.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    for step, value in enumerate(["text", 10**400, 1j, {"loss": 1.0}, [1.0], object()]):
        probe.begin_step(step)
        model(torch.ones(1, 2)).sum().backward()
        probe.end_step({"loss": value, "other": step})
        assert probe.pipeline.empty
    probe.close()
    assert [frame.scalars["other"] for frame in sink.frames] == [0, 1, 2, 3, 4, 5]
    assert all(frame.lost == {"scalar loss": 1} and "loss" not in frame.scalars for frame in sink.frames)
    assert len({len(frame.entries) for frame in sink.frames}) == 1
