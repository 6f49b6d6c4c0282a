"""D3: how fast tensors are read, beside a copy of the same bytes on the same device, and what the host pays for a small one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from msprobe_engine.workflow.doctor import Line, Verdict
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.torch.backend import TorchBackend

SHARE = 0.7
"""Of the bytes that a copy reads and writes per second; goal for tensors of `LARGE` bytes and more."""
LARGE = 64 << 20
HOST = 20e-6
"""Seconds of the host per small tensor; goal."""
SMALL = 1000
_TYPES = ("float32", "bfloat16", "float8_e4m3fn")


def run(device: Device) -> Iterator[Line]:
    """One line per type without and with digest, then those of small tensors."""
    sizes = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
    if device.full:
        sizes += [LARGE, 256 << 20, 1 << 30, 4 << 30]
    source = torch.randn(sizes[-1] // 4, device=str(device.device))
    copied = {size: _copy(device, source[: size // 4]) for size in sizes}
    yield Line("copy", "ok", _speeds(copied))
    for name in _TYPES if device.full else _TYPES[:1]:
        if not hasattr(torch, name):
            yield Line(f"reading {name}", "skipped", why="this torch does not have the type")
            continue
        dtype = getattr(torch, name)
        for digest in (False, True):
            yield measure_reading(device, source.view(dtype), copied, digest)
    del source
    yield from small(device)


def _copy(device: Device, source: torch.Tensor) -> float:
    """Bytes read and written per second."""
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(device, lambda: target.copy_(source), source.nbytes)


def measure_reading(device: Device, values: torch.Tensor, copied: dict[int, float], digest: bool) -> Line:
    backend = TorchBackend(digest=digest)
    speeds = {}
    for size in copied:
        tensor = values[: size // values.element_size()]
        speeds[size] = size / _seconds(device, lambda tensor=tensor: _reduce(backend, tensor), size)  # type: ignore[misc]
        backend.finish_step()
    share = min(speeds[size] / copied[size] for size in copied if size >= min(LARGE, max(copied)))
    name = f"reading {str(values.dtype).removeprefix('torch.')}{' with digest' if digest else ''}"
    if backend.unsupported:
        return Line(name, "WRONG", why=f"tensors without numbers: {backend.unsupported}")
    # a processor converts small types while it reads: no goal
    verdict: Verdict = "ok" if share >= SHARE or not device.full else "slow"
    goal = f"{SHARE:.0%} of copy from {LARGE >> 20} MiB on" if device.full else ""
    return Line(name, verdict, f"{share:.0%} of copy; {_speeds(speeds)}", goal)


def _reduce(backend: TorchBackend, tensor: torch.Tensor) -> None:
    backend.forget()
    backend.reduce(tensor)


def _seconds(device: Device, work: Callable[[], object], size: int) -> float:
    """Median of five rounds, per call. What is smaller than the cache of the device is read from there."""
    number = max(2, min(100, (1 << 31 if device.full else 1 << 27) // size))
    for _ in range(3):
        work()  # compiles, and decides which way is taken
    rounds = []
    for _ in range(5):
        device.synchronize()
        if device.full:
            module: Any = device.module
            begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
            begin.record()
            for _ in range(number):
                work()
            end.record()
            module.synchronize()
            rounds.append(begin.elapsed_time(end) / 1e3 / number)
        else:
            start = time.perf_counter()
            for _ in range(number):
                work()
            rounds.append((time.perf_counter() - start) / number)
    return float(statistics.median(rounds))


def _speeds(speeds: dict[int, float]) -> str:
    units = [(30, "GiB"), (20, "MiB"), (10, "KiB")]
    named = {size: next(f"{size >> power} {unit}" for power, unit in units if size >> power) for size in speeds}
    return ", ".join(f"{named[size]} {speed / 1e9:.0f}" for size, speed in speeds.items()) + " GB/s"


def small(device: Device) -> Iterator[Line]:
    """The host's time for a tensor whose like has been seen, one by one as in hooks, and in batches as for parameters."""
    tensors = [torch.randn(1024, device=str(device.device), dtype=torch.bfloat16) for _ in range(SMALL)]
    states = {"exp_avg": torch.rand(1024, device=str(device.device)), "exp_avg_sq": torch.rand(1024, device=str(device.device)), "step": 10}
    group = {"betas": (0.9, 0.999), "eps": 1e-8}

    def alone(backend: TorchBackend) -> None:
        for tensor in tensors:
            backend.reduce(tensor)

    def reduce_in_batch(backend: TorchBackend) -> None:
        with backend.batched():
            alone(backend)

    def updates(backend: TorchBackend) -> None:
        with backend.batched():
            for _ in range(SMALL):
                backend.reduce_update("adam", None, None, states, group)

    for name, work in {"small tensors": alone, "small tensors in a batch": reduce_in_batch, "small updates in a batch": updates}.items():
        for digest in (False, True):
            backend, rounds = TorchBackend(digest=digest), []
            for _ in range(8):
                device.synchronize()
                begin = time.perf_counter()
                work(backend)
                rounds.append((time.perf_counter() - begin) / SMALL)
                backend.finish_step().rows()
            cost = statistics.median(rounds[3:])
            verdict: Verdict = "ok" if cost <= HOST else "slow"
            title = f"host, {name}{' with digest' if digest else ''}"
            yield Line(title, verdict, f"{cost * 1e6:.1f} us a tensor", f"{HOST * 1e6:.0f} us")
