"""Runs the example GPT in forked ranks, with the probe and without."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from msprobe_engine.probe.sinks.memory import MemorySink

ROOT = Path(__file__).parents[2]
for _place in (ROOT / "tests" / "frameworks", ROOT / "examples" / "megatron"):
    if str(_place) not in sys.path:
        sys.path.insert(0, str(_place))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import fault  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import train_gpt  # noqa: E402

from msprobe_engine.core.records import Frame  # noqa: E402
from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, SinkSettings  # noqa: E402
from msprobe_integrations.megatron import patches  # noqa: E402
from msprobe_integrations.megatron.layout import unwrap_model  # noqa: E402
from msprobe_integrations.megatron.observer import TrainingObserver  # noqa: E402
from msprobe_integrations.torch.monitor.probe import TorchProbe  # noqa: E402


def probe_settings(monitor: MonitorSettings | None, *, level: str = "", output: str = "unused", strict: bool = True) -> ProbeSettings:
    return ProbeSettings(
        output_dir=output,
        strict=strict,
        monitor=monitor,
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(enabled=bool(level), level=level),
    )


def observed(settings: ProbeSettings) -> tuple[TrainingObserver, MemorySink]:
    """An observer whose frames are kept, hooked into Megatron as the launcher does it."""
    sink = MemorySink()
    observer = TrainingObserver(settings, lambda s: TorchProbe(s, extra_sinks=[sink]))
    patches.observe(lambda: observer)
    return observer, sink


def capturing(output: str) -> ProbeSettings:
    """Gradients are monitored, an incident is captured with everything, nothing else is written."""
    return ProbeSettings(
        output_dir=output,
        strict=True,
        log_level="silent",
        monitor=MonitorSettings(gradients=True),
        sinks=SinkSettings(csv=CsvSettings(enabled=False)),
        incident=IncidentSettings(level="mix", ring_steps=3),
    )


def run_with_fault(argv: str, seed: int, settings: ProbeSettings, *, steps: int, spared: str = "") -> dict[str, Any]:
    """Train with NaN or Inf planted in one module of one rank; returns the truth on that rank, nothing on the others.

    Args:
        spared: modules with this in their names are not hit.
    """
    observer = TrainingObserver(settings)
    patches.observe(lambda: observer)
    a = train_gpt.arguments(["--quiet", "--steps", str(steps), *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    now = [0]
    candidates = fault.candidates
    if spared:
        fault.candidates = lambda model: [name for name in candidates(model) if spared not in name]
    answer = fault.plant(
        unwrap_model(chunks[0]),
        seed,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        steps=steps,
        step=lambda: now[0],
        truth=None,
    )
    fault.candidates = candidates
    train_gpt.train(a, chunks, optimizer, on_step=lambda step: now.__setitem__(0, step))
    observer.close()
    return answer


def weights(chunk: Any) -> list[tuple[str, torch.Tensor]]:
    """What this rank keeps of the parameters from step to step."""
    buffer = getattr(chunk, "param_and_grad_buffer", None)  # Megatron-FSDP: the module's own are whole only while it computes
    return list(chunk.named_parameters()) if buffer is None else [(n, p._local_tensor) for n, p in buffer.optimizer_named_parameters]


def run_gpt(argv: str, settings: ProbeSettings | None, after_build: Any = None) -> tuple[dict[str, Any], list[Frame]]:
    """Train; returns what must not depend on the probe, and the frames."""
    observer, sink = observed(settings) if settings is not None else (None, MemorySink())
    a = train_gpt.arguments(["--quiet", *argv.split()])
    _, chunks, optimizer = train_gpt.build(a)
    state: dict[str, Any] = {}
    if after_build is not None:
        after_build(state, chunks, optimizer)
    state["losses"] = train_gpt.train(a, chunks, optimizer)
    if observer is not None:
        observer.close()
    state["weights"] = {n: p.detach().clone().view(torch.uint8).numpy().tobytes() for c in chunks for n, p in weights(c)}
    state["random"] = torch.get_rng_state().numpy().tobytes()
    state["rank"] = dist.get_rank()
    return state, sink.frames
