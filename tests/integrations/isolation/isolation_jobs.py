"""Small trainings with a probe, for faults: each gives bits that no fault of the probe may change."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plants import unarmed
from torch import nn

from msprobe_engine.settings.schema import (
    CsvSettings,
    IncidentSettings,
    LayerFeatureSettings,
    MonitorSettings,
    ProbeSettings,
    RuleSettings,
    SinkSettings,
)
from msprobe_integrations.torch.debugger import PrecisionDebugger
from msprobe_integrations.torch.loop import LoopObserver

STEPS = 2
MONITOR = MonitorSettings(
    gradients=True,
    gradient_phases=("reduced", "unscaled", "clipped"),
    unreduced_gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    momentum_agreement=True,
    activations=True,
    activation_gradients=True,
    collectives=True,
    collective_inputs=True,
    layer_features=LayerFeatureSettings(linear=("*",)),
    ops=("norm", "min", "max", "mean", "nans", "zeros", "kurtosis", "underflow"),
)
Bits = tuple[bytes, ...]
Job = Callable[[], Bits]


class Training:
    """A model, its optimizer, its scaler's clipping and a collective, step by step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.seen: list[bytes] = []

    def step(self) -> torch.Tensor:
        """One update."""
        self.optimizer.zero_grad()
        loss = self.net(torch.randn(3, 4)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        assert work.wait() is True
        self.optimizer.step()
        self.seen.append(total.numpy().tobytes())
        return loss.detach()

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


def plain() -> Bits:
    """Without a probe."""
    training = Training()
    for _ in range(STEPS):
        training.step()
    return training.bits()


def observed(strict: bool = False) -> Bits:
    """Under the observer that all integrations use, with everything on and a capture armed by an alert."""
    training = Training()
    with tempfile.TemporaryDirectory() as place:
        with unarmed():
            settings = ProbeSettings(
                output_dir=place,
                strict=strict,
                monitor=MONITOR,
                sinks=SinkSettings(csv=CsvSettings(enabled=True)),
                rules=(RuleSettings(rule="recommended"), RuleSettings(rule="extreme_value", args={"threshold": 1e-9})),
                incident=IncidentSettings(enabled=True, level="mix"),
            )
        observer = LoopObserver(settings)
        observer.setup(training.net, training.optimizer)
        for step in range(STEPS):
            observer.begin(step)
            observer.micro_batch(0)
            loss = training.step()
            observer.note({"loss": loss})
            with observer.evaluation(), torch.no_grad():
                training.net.eval()(torch.ones(1, 4))
                training.net.train()
            observer.end()
        observer.close()
    return training.bits()


def dumped() -> Bits:
    """Under a debugger of level mix that saves tensors."""
    training = Training()
    with tempfile.TemporaryDirectory() as place:
        PrecisionDebugger._instance = None
        with unarmed():
            debugger = PrecisionDebugger({"task": "tensor", "level": "mix", "dump_path": str(Path(place)), "tensor": {}})
        for _ in range(STEPS):
            debugger.start(training.net)
            training.step()
            debugger.stop()
            debugger.step()
        debugger._at_exit()
        PrecisionDebugger._instance = None
    return training.bits()


def grouped(job: Callable[..., Bits], **options: Any) -> Bits:
    """`job` in a group of its own."""
    with group():
        return job(**options)


JOBS: dict[str, Any] = {"observed": observed, "dumped": dumped}
