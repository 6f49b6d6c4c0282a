"""Trainings with a DeepSpeed engine that a callback follows, or nobody, in forked ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed_harness as harness
import torch
from harness.frameworks.deepspeed_engine import weights_of

from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import CsvSettings, DumpSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_integrations.deepspeed.callback import DeepSpeedCallback

MONITOR = MonitorSettings(activations=True, gradients=True, parameters=True, optimizer_states=True)
QUIET = SinkSettings(csv=CsvSettings(enabled=False), memory=True)


def settings(directory: str = "unused", *, strict: bool = True, **sections: Any) -> ProbeSettings:
    """Frames are kept in memory; no incidents unless asked for."""
    return ProbeSettings(output_dir=directory, strict=strict, **{"sinks": QUIET, "incident": IncidentSettings(enabled=False), **sections})


class Run(NamedTuple):
    """What a training has done, and what was seen of it."""

    losses: list[float]
    weights: dict[str, bytes]
    random: bytes
    frames: list[Frame]
    dumps: dict[str, Any]

    @property
    def bits(self) -> tuple[list[float], dict[str, bytes], bytes]:
        """What has to be the same with and without a probe."""
        return self.losses, self.weights, self.random


def dumps_in(directory: str) -> dict[str, Any]:
    """``"step0/rank1"`` -> content of dump.json."""
    found = Path(directory).glob("dump/step*/rank*/dump.json")
    return {f"{f.parts[-3]}/{f.parts[-2]}": json.loads(f.read_text())["data"] for f in sorted(found)}


def follow(engine: Any, chosen: ProbeSettings | None) -> DeepSpeedCallback | None:
    """A callback that follows the engine."""
    if chosen is None:
        return None
    callback = DeepSpeedCallback(chosen)
    callback.on_setup(engine)
    return callback


def train(conf: dict[str, Any], dtype: str, steps: int, sections: dict[str, Any] | None, body: Callable[..., Any] | None = None) -> Run:
    """`steps` updates with dropout, followed by a callback unless `sections` is None.

    Args:
        body: ``(engine, micro batches)`` instead of the usual loop; returns losses.
    """
    with tempfile.TemporaryDirectory() as directory:
        engine = harness.engine_of(conf)
        callback = follow(engine, None if sections is None else settings(directory, **sections))
        accumulation = engine.gradient_accumulation_steps()
        data = harness.batches(dtype, steps * accumulation)
        losses = (body or loop)(engine, data)
        frames: list[Frame] = []
        if callback is not None:
            probe = callback.observer.probe
            assert probe is not None
            callback.close()
            frames = probe.frames
        return Run(losses, weights_of(engine), torch.get_rng_state().numpy().tobytes(), frames, dumps_in(directory))


def loop(engine: Any, data: list[torch.Tensor]) -> list[float]:
    """The usual loop."""
    losses = []
    for x in data:
        loss = engine(torch.nn.functional.dropout(x, 0.1))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def dump_of(level: str, step: tuple[int, ...] = (0,)) -> DumpSettings:
    """A dump of some steps."""
    return DumpSettings(level=level, step=step)
