"""Small trainings on plain torch, for faults: each gives bits that no fault of the probe may change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from every_family import EVERY_FAMILY
from isolation_run import Bits, Job
from plants import unarmed
from torch import nn

from msprobe_engine.settings.schema import (
    CsvSettings,
    IncidentSettings,
    LayerFeatureSettings,
    ProbeSettings,
    RuleSettings,
    SinkSettings,
)
from msprobe_integrations.autoload import imports
from msprobe_integrations.torch.debugger import PrecisionDebugger
from msprobe_integrations.torch.loop import LoopObserver

STEPS = 2
MONITOR = replace(
    EVERY_FAMILY,
    collectives=True,
    collective_inputs=True,
    layer_features=LayerFeatureSettings(linear=("*",)),
    ops=("norm", "min", "max", "mean", "nans", "zeros", "kurtosis", "underflow"),
)


class Training:
    """A model, its optimizer, its scaler's clipping and a collective, step by step."""

    def __init__(self, scaler: bool = False) -> None:
        torch.manual_seed(0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaler)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.seen: list[bytes] = []

    def step(self) -> torch.Tensor:
        """One update."""
        self.optimizer.zero_grad()
        loss = self.net(torch.randn(3, 4)).square().mean()
        self.scaler.scale(loss).backward()
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        assert work.wait() is True
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.seen.append(total.numpy().tobytes())
        return loss.detach()

    def evaluate(self) -> None:
        """A pass that is no training."""
        with torch.no_grad():
            self.net.eval()(torch.ones(1, 4))
        self.net.train()

    def bits(self) -> Bits:
        """Everything a probe could have changed."""
        weights = [p.detach().numpy().tobytes() for p in self.net.parameters()]
        return (*self.seen, *weights, torch.get_rng_state().numpy().tobytes())


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with tempfile.TemporaryDirectory() as place:
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def observed(place: Path, seen: bool, strict: bool = False) -> Bits:
    """Under the observer that all integrations use, with everything on and a capture armed by an alert."""
    with group():
        training = Training()
        observer: LoopObserver | None = None
        if seen:
            with unarmed():
                settings = ProbeSettings(
                    output_dir=str(place),
                    strict=strict,
                    monitor=MONITOR,
                    sinks=SinkSettings(csv=CsvSettings(enabled=True)),
                    rules=(RuleSettings(rule="recommended"), RuleSettings(rule="extreme_value", args={"threshold": 1e-9})),
                    incident=IncidentSettings(enabled=True, level="mix"),
                )
            observer = LoopObserver(settings)
            observer.setup(training.net, training.optimizer)
        for step in range(STEPS):
            if observer is None:
                training.step()
                training.evaluate()
                continue
            observer.begin(step)
            observer.micro_batch(0)
            loss = training.step()
            observer.note({"loss": loss})
            with observer.evaluation():
                training.evaluate()
            observer.end()
        if observer is not None:
            observer.close()
        return training.bits()


def dumped(place: Path, seen: bool) -> Bits:
    """Under a debugger of level mix that saves tensors."""
    with group():
        training = Training()
        debugger: PrecisionDebugger | None = None
        if seen:
            PrecisionDebugger._instance = None
            with unarmed():
                debugger = PrecisionDebugger({"task": "tensor", "level": "mix", "dump_path": str(place), "tensor": {}})
        for _ in range(STEPS):
            if debugger is not None:
                debugger.start(training.net)
            training.step()
            if debugger is not None:
                debugger.stop()
                debugger.step()
        return training.bits()


SECTIONS: dict[str, Any] = {
    "monitor": {**dataclasses.asdict(MONITOR), "layer_features": {"linear": ["*"]}, "replica_check": {"interval": 1}},
    "dump": {"step": [1], "level": "mix"},
    "grad_probe": {"grad_level": "L1"},
    "rules": [{"rule": "extreme_value", "severity": "critical", "args": {"threshold": 1e-30}}],
    "incident": {"level": "L0", "capture_level": "mix", "max_incidents": 1},
}
"""Everything on, as in a settings file."""


def asked(place: Path, *frameworks: str, **sections: Any) -> Path:
    """A process as MSPROBE_CONFIG makes it, which is about to import these frameworks; returns the settings file."""
    file = place / "probe.json"
    file.write_text(json.dumps({"output_dir": str(place / "out"), **SECTIONS, **sections}))
    os.environ["MSPROBE_CONFIG"] = str(file)
    for name in frameworks:
        imports.before_import(name, import_module(f"msprobe_integrations.{name}.autoload").arm)
    return file


def followed(place: Path, seen: bool) -> Bits:
    """A loop of plain torch that makes no call, with a gradient scaler and evaluations."""
    with group():
        if seen:
            asked(place, "torch")
        training = Training(scaler=True)
        for _ in range(STEPS + 1):
            training.step()
            training.evaluate()
        return training.bits()


EVENTS = ("setup", "begin", "end", "note", "micro_batch", "evaluation")
JOBS: dict[str, Job] = {
    "observed": Job(observed, calls=("LoopObserver.__init__", *(f"LoopObserver.{name}" for name in EVENTS))),
    "dumped": Job(dumped, calls=tuple(f"PrecisionDebugger.{name}" for name in ("start", "stop", "step"))),
    "plain loop": Job(followed),
}
