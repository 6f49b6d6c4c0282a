"""Megatron trainings with a planted fault, and their healthy twins."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from every_family import EVERY_FAMILY
from megatron_harness import train_gpt
from replica_cases import Ears, Said, said_of

from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    LayerFeatureSettings,
    MonitorSettings,
    ProbeSettings,
    ReplicaCheckSettings,
    RuleSettings,
    SinkSettings,
)
from msprobe_integrations.megatron import patches
from msprobe_integrations.megatron.layout import unwrap_model
from msprobe_integrations.megatron.observer import TrainingObserver
from msprobe_integrations.torch.monitor.probe import TorchProbe

CHECK = ReplicaCheckSettings(interval=2)
CHEAP = MonitorSettings(gradients=True, parameters=True, updates=True, ops=("norm", "underflow"), replica_check=CHECK)
EVERYTHING = replace(
    EVERY_FAMILY,
    collectives=True,
    digest=True,
    ops=("norm", "min", "max", "mean", "nans", "zeros", "underflow"),
    replica_check=ReplicaCheckSettings(interval=10, gradients=True),
)
RECOMMENDED = (RuleSettings(rule="recommended"),)


class Training:
    """What a fault may change.

    Attributes:
        model: without wrappers, of the first chunk.
        step: number of the present step; set before it begins.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any) -> None:
        self.chunks = list(chunks)
        self.model = unwrap_model(chunks[0])
        self.optimizer = optimizer
        self.rank = dist.get_rank()
        self.step = -1


Plant = Callable[[Training], Callable[[], None] | None]
"""Plants a fault when the training is built; what it gives is called at the beginning of each step."""


def megatron(
    argv: str, plant: Plant | None = None, monitor: MonitorSettings = CHEAP, rules: Sequence[RuleSettings] = RECOMMENDED, place: str = ""
) -> tuple[Ears, list[float | None]]:
    """Train; what was said, and the losses."""
    ears = Ears()
    with tempfile.TemporaryDirectory() as own:
        settings = ProbeSettings(
            output_dir=place or own,
            strict=True,
            log_level="silent",
            monitor=monitor,
            rules=tuple(rules),
            sinks=SinkSettings(csv=CsvSettings(enabled=False)),
            incident=IncidentSettings(enabled=bool(place), capture_level=""),
        )
        observer = TrainingObserver(settings, lambda s: TorchProbe(s, extra_sinks=[ears]))
        patches.observe(lambda: observer)
        a = train_gpt.arguments(["--quiet", "--layers", "1", "--lr", "1e-3", *argv.split()])
        _, chunks, optimizer = train_gpt.build(a)
        training = Training(chunks, optimizer)
        at_step = plant(training) if plant is not None else None

        def on_step(step: int) -> None:
            training.step = step
            if at_step is not None:
                at_step()

        losses = train_gpt.train(a, chunks, optimizer, on_step=on_step)
        observer.close()
    return ears, losses


def alerts(argv: str, plant: Plant | None = None, monitor: MonitorSettings = CHEAP) -> list[tuple[str, Said]]:
    """Rule and content of all alerts of this rank."""
    ears, _ = megatron(argv, plant, monitor)
    return [(alert.rule, said_of(frame, alert)) for frame, alert in ears.alerts]


__all__ = ["CHEAP", "CHECK", "EVERYTHING", "LayerFeatureSettings", "Training", "alerts", "megatron"]
