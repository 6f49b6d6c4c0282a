"""A training under the module side of the monitor, and what its frames say, as plain numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    LayerFeatureSettings,
    MonitorSettings,
    ProbeSettings,
    SinkSettings,
)
from msprobe_engine.core.statistics import rows
from msprobe_engine.probe.sinks.memory import MemorySink
from msprobe_integrations.torch.monitor.probe import TorchProbe

Step = Callable[[int], Any]
Key = tuple[int, str, str, int]


class Value(NamedTuple):
    """Statistics of one sample."""

    norm: float | None
    mean: float | None
    numel: int
    extra: dict[str, Any]


def features(**keys: Any) -> MonitorSettings:
    """A monitor of layer features only."""
    return MonitorSettings(gradients=False, layer_features=LayerFeatureSettings(**keys))


def monitor(**keys: Any) -> MonitorSettings:
    """A monitor without parameter-side families."""
    return MonitorSettings(gradients=False, **keys)


def watch(
    model: nn.Module | list[nn.Module], settings: MonitorSettings, step: Step, steps: int = 1, *, strict: bool = True, output: Any = None
) -> list[Frame]:
    """Frames of `steps` calls of `step(number)` with the monitor on."""
    memory = MemorySink()
    probe = make(settings, memory, strict=strict, output=output)
    probe.attach(model)
    for number in range(steps):
        probe.begin_step(number)
        step(number)
        probe.end_step()
    probe.close()
    return memory.frames


def make(settings: MonitorSettings, memory: MemorySink, *, strict: bool = True, output: Any = None) -> TorchProbe:
    """A probe that writes to `memory` only, and to CSV files with `output`."""
    return TorchProbe(
        ProbeSettings(
            output_dir=str(output or Path(tempfile.gettempdir()) / "msprobe-not-written"),
            monitor=settings,
            strict=strict,
            log_level="error",
            sinks=SinkSettings(csv=CsvSettings(enabled=output is not None)),
            incident=IncidentSettings(enabled=False),
        ),
        extra_sinks=[memory],
    )


def values(frames: list[Frame], *families: str) -> dict[Key, Value]:
    """(step, family, name, micro step) to statistics; a sample that is there twice is an error."""
    found: dict[Key, Value] = {}
    for frame in frames:
        for sample in frame.samples:
            if families and sample.family not in families:
                continue
            key = (frame.step, sample.family, sample.name, sample.micro_step)
            if "column" in sample.extra:
                key = (frame.step, sample.family, f"{sample.name}/{sample.extra['column']}", sample.micro_step)
            assert key not in found, f"{key} is there twice"
            read = rows.read_row(frame.rows[sample.ref.row])
            found[key] = Value(read.norm, read.mean, read.count, dict(sample.extra))
    return found


def norm(tensor: torch.Tensor) -> float:
    """In float64."""
    return float(torch.linalg.vector_norm(tensor.detach().double()))
