"""D1: what memory the probe takes. No temporary above 64 MiB for any one tensor, and the peak of a training with it beside that without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.monitor import feature_math
from msprobe_integrations.torch.statistics import derived
from msprobe_integrations.torch.statistics.device import trust as device_trust

LIMIT = 64 << 20
_MIB = float(1 << 20)
_WIDTH = 8192
Work = Callable[[TorchBackend], object]
Case = tuple[str, Work]


def run(device: Device) -> Iterator[Line]:
    """One line per way of computing, with the largest temporary, and on a device one per mode of a training."""
    for way in ("kernels", "operators"):
        yield from temporaries(device, way)
    if not device.full:
        yield Line("memory of a training", "skipped", why="needs a GPU or NPU: processes share the CPU's allocator")
        return
    yield from trainings(device)


def temporaries(device: Device, way: str) -> Iterator[Line]:
    largest, worst, failed = 0.0, "", []
    with _force_way(way):
        backend = TorchBackend()
        for name, work in cases(device):
            if device.full:
                work(backend)  # compiles, tries kernels on known numbers and makes the memory of rows, which stays
            before = dict(backend.unsupported)
            backend.finish_step()
            taken = peak(device, partial(work, backend))
            if backend.unsupported != before:
                failed.append(f"{name}: {list(backend.unsupported)[-1]}")
            if taken > LIMIT:
                failed.append(f"{name}: {taken / _MIB:.0f} MiB")
            if taken >= largest:
                largest, worst = taken, name
    figure = f"{largest / _MIB:.0f} MiB ({worst})"
    yield Line(f"temporary of one tensor, {way}", "WRONG" if failed else "ok", figure, "64 MiB", "; ".join(failed))


def cases(device: Device) -> Iterator[Case]:
    """What is done with one tensor whose bytes are many times the limit; expanded tensors have 4 bytes of memory."""
    rows = (1 << 17) if device.full else 5 * (1 << 9)
    kind, place = torch.bfloat16, str(device.device)
    every = host_kernel.WANT_DIGEST | host_kernel.WANT_MOMENTS | host_kernel.want_below(1e-3)
    weight = torch.zeros(rows, _WIDTH, dtype=kind, device=place)
    layouts = {
        "whole": weight,
        "expanded gradient of a sum": torch.ones((), dtype=kind, device=place).expand(rows, _WIDTH),
        "expanded float32": torch.ones((), device=place).expand(rows, _WIDTH),
        "transposed": weight.t(),
        "columns": weight[:, 1:],
    }
    for name, tensor in layouts.items():
        if not device.full and name in ("expanded gradient of a sum", "columns"):
            continue  # as those beside them; a processor takes its time
        for what, want in {"statistics": 0, "all words": every, "xor": host_kernel.WANT_XOR}.items():
            yield f"{what}, {name}", partial(_reduce, tensor=tensor, want=want)
        yield f"histogram, {name}", partial(_count, tensor=tensor)
    first = torch.zeros(rows // 4, _WIDTH, device=place)
    states, group = {"exp_avg": first, "exp_avg_sq": first, "step": 10}, {"betas": (0.9, 0.999), "eps": 1e-8}
    yield "update of Adam", lambda backend: backend.reduce_update("adam", None, None, states, group)
    yield "agreement", lambda backend: backend.reduce_agreement(weight[: rows // 4], first)
    yield "histogram of the update", lambda backend: backend.histogram_of_update(states, {**group, "step": 10}, 1e-8, "log2")
    start = feature_math.start_vector(_WIDTH, weight.device)
    query = torch.zeros(1, 1 << 15 if device.full else 1 << 12, 1, 64, dtype=kind, device=place)
    yield "attention", lambda _: feature_math.attention(query, query, "b,s,h,d")
    yield "spectral norm", lambda _: feature_math.spectral_norm(weight, start, 2)


def _reduce(backend: TorchBackend, tensor: torch.Tensor, want: int) -> None:
    backend.forget()
    before, backend._want = backend._want, want
    try:
        backend.reduce(tensor)
    finally:
        backend._want = before


def _count(backend: TorchBackend, tensor: torch.Tensor) -> None:
    backend.histogram(tensor, "log2")


@contextmanager
def _force_way(way: str) -> Iterator[None]:
    """``operators``: what is used where no kernel works."""
    if way == "kernels":
        yield
        return
    places: list[tuple[Any, str, Any]] = [(host_kernel, "available", False), (device_trust, "DEVICES", ())]
    places.append((derived, "on_host", lambda _: False))
    before = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(places, before):
            setattr(owner, name, value)


def peak(device: Device, work: Callable[[], object]) -> float:
    """Bytes of the device's memory that `work` takes beyond what was taken before, at most. On the CPU those of torch's allocator."""
    if device.full:
        module: Any = device.module
        module.synchronize()
        module.reset_peak_memory_stats()
        before = module.memory_allocated()
        work()
        module.synchronize()
        return float(module.max_memory_allocated() - before)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events: Any = profile.kineto_results
    now = most = 0
    for event in sorted((e for e in events.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return float(most)


def trainings(device: Device) -> Iterator[Line]:
    """The peak of steps 2 to 4 of a GPT of 1.4 billion parameters, in bf16."""
    module: Any = device.module
    job = Job("large", str(device.device), torch.bfloat16)

    def most(mode: str) -> tuple[float, float]:
        module.empty_cache()
        with tempfile.TemporaryDirectory() as directory, attach_probe(job, mode, Path(directory)) as step:
            step()
            module.synchronize()
            module.reset_peak_memory_stats()
            for _ in range(3):
                step()
            module.synchronize()
            return float(module.max_memory_allocated()), float(module.max_memory_reserved())

    most("off")
    plain, reserved = most("off")
    for mode in ("gradients", "monitor", "L0", "mix", "digest"):
        taken, held = most(mode)
        more = taken - plain
        good = more <= max(0.01 * plain, 0.0 if mode in ("gradients", "monitor") else 256 * _MIB)
        figure = f"{more / _MIB:+.0f} MiB of {plain / _MIB:.0f} ({more / plain:+.1%}); reserved {(held - reserved) / _MIB:+.0f} MiB"
        yield Line(f"memory of a training, {mode}", "ok" if good else "WRONG", figure, "1 %, dumps at least 256 MiB")
