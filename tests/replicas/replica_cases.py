"""A small training on several ranks under the replica check, and what its alerts said."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import parameter_cases as pc
import torch
from torch import nn

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    MonitorSettings,
    ProbeSettings,
    ReplicaCheckSettings,
    RuleSettings,
    SinkSettings,
)
from msprobe_engine.probe.sinks.base import Sink
from msprobe_integrations.torch.monitor.probe import TorchProbe


class Said(NamedTuple):
    """What matters of an alert."""

    step: int
    kind: str
    name: str
    group: str
    ranks: tuple[int, ...]
    minority: tuple[int, ...]
    over: bool
    frame: int
    """Number of the frame that it came with."""


class Ears(Sink):
    """A sink that keeps alerts and the frames they came with."""

    name = "ears"

    def __init__(self) -> None:
        self.alerts: list[tuple[int, Alert]] = []
        self.frames: list[Frame] = []

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        self.frames.append(frame)
        self.alerts += [(frame.step, alert) for alert in alerts]

    def said(self, rule: str = "replica_mismatch") -> list[Said]:
        return [said_of(frame, alert) for frame, alert in self.alerts if alert.rule == rule]


def said_of(frame: int, alert: Alert) -> Said:
    e: Mapping[str, Any] = alert.extra
    ranks, minority = tuple(e.get("ranks", ())), tuple(e.get("minority", ()))
    return Said(alert.step, alert.kind, alert.name, e.get("group", ""), ranks, minority, bool(e.get("over")), frame)


def settings(place: str, *, rules: Sequence[RuleSettings] = (), incident: str = "", **monitor: Any) -> ProbeSettings:
    """Nothing but the replica check, unless more is asked for."""
    monitor.setdefault("gradients", False)
    monitor.setdefault("replica_check", ReplicaCheckSettings(interval=2))
    return ProbeSettings(
        output_dir=place,
        strict=True,
        log_level="silent",
        monitor=MonitorSettings(**monitor),
        rules=tuple(rules),
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(enabled=bool(incident), severity=incident or "critical", capture_level=""),
    )


class Step(NamedTuple):
    """What a fault may change."""

    number: int
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer


Fault = Callable[[Step], None]


def train(
    kind: str,
    steps: int,
    *,
    after_build: Fault | None = None,
    after_backward: Fault | None = None,
    after_update: Fault | None = None,
    at_step: Callable[[TorchProbe, int], None] | None = None,
    probe: bool = True,
    place: str = "",
    **how: Any,
) -> tuple[Ears, list[bytes]]:
    """Train `kind` of `parameter_cases.wrapped`; what was said, and the bits of the parameters in the end. Between steps there is time
    for what is under way to arrive."""
    rank = torch.distributed.get_rank()
    model = pc.wrapped(kind, pc.net())
    optimizer = pc.optimizer("adamw", [p for p in model.parameters() if p.requires_grad])
    ears = Ears()
    with tempfile.TemporaryDirectory() as own:
        if after_build is not None:
            after_build(Step(-1, rank, model, optimizer))
        one = TorchProbe(settings(place or own, **how), extra_sinks=[ears]) if probe else None
        if one is not None:
            one.attach(model, optimizer)
        for number in range(steps):
            step = Step(number, rank, model, optimizer)
            if one is not None:
                if at_step is not None:
                    at_step(one, number)
                one.begin_step(number)
            model(pc.data(number)).square().mean().backward()
            if after_backward is not None:
                after_backward(step)
            optimizer.step()
            if after_update is not None:
                after_update(step)
            optimizer.zero_grad()
            if one is not None:
                one.end_step()
            torch.distributed.barrier()
            time.sleep(0.02)
        if one is not None:
            one.close()
    found = [pc.whole(p).tobytes() for p in model.parameters()]
    return ears, found


def leaf(model: nn.Module, name: str) -> torch.Tensor:
    """A parameter's memory on this rank."""
    parameter = dict(model.named_parameters())[name]
    data: torch.Tensor = getattr(parameter, "_local_tensor", parameter).data
    return data


def flip_a_bit(tensor: torch.Tensor, bit: int = 14) -> None:
    """One bit of the first number's mantissa, as a faulty device does. The lowest bits may be gone with the rounding of the next update."""
    whole = tensor.view(-1).view(torch.int32)
    whole[0] ^= 1 << bit


__all__ = ["Path", "Said", "Step", "flip_a_bit", "leaf", "settings", "train"]
