"""Cost of statistics per tensor: kernel, kernel with digest, checksums or moments, Adam's update, torch operators, and the usual four
separate passes.

    python benchmarks/reduce.py [--dtype float32] [--threads 1] [--max 10000000]
    python benchmarks/reduce.py --device cuda [--dtype bfloat16] [--max 1000000000]      (npu likewise)

Prints microseconds per tensor and GB/s by size, then the cost model fitted to the backend's numbers:
added time = bytes / bandwidth + fixed microseconds per tensor.

On a device every size has two numbers per way: how long the device is busy with one tensor (device events around many launches;
where the host cannot launch as fast, this is the host's time too) and how long the host takes to launch one.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics.rows import underflow_limit
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics.device import trust as device_trust
from msprobe_integrations.torch.statistics.device_rows import DeviceRows, Taker
from msprobe_integrations.torch.statistics.rows import host_flags, reduce_device


def seconds(work: Callable[[], object], size: int) -> float:
    """Best of five, per call."""
    number = max(1, min(3000, 3_000_000 // size))
    return min(timeit.repeat(work, number=number, repeat=5)) / number


def four_passes(x: torch.Tensor) -> list[float]:
    """What a tool without a kernel does: one operator and one read per statistic."""
    y = x.float()
    return [y.max().item(), y.min().item(), y.mean().item(), torch.norm(y).item()]


def through_backend(backend: TorchBackend, x: torch.Tensor, size: int) -> float:
    """Description, duplicate detection, row and kernel, as a hook pays them; the end of the step is not in it."""
    backend.finish_step()

    def work() -> None:
        backend.forget()
        backend.reduce(x)

    return seconds(work, size)


def update(backend: TorchBackend, x: torch.Tensor, size: int) -> float:
    """Adam's update of two states of the type of `x`; the GB/s are those of one of them."""
    backend.finish_step()
    states, group = {"exp_avg": x, "exp_avg_sq": x.square(), "step": 10}, {"betas": (0.9, 0.999), "eps": 1e-8}
    return seconds(lambda: backend.reduce_update("adam", None, None, states, group), size)


def by_operators(x: torch.Tensor, size: int) -> float:
    """The torch operators that other devices use, here on the CPU."""
    take = Taker(DeviceRows(x, 1 << 14), x, 0, host_flags(x.dtype, False))
    return seconds(lambda: reduce_device(x, take, False), size)


def cost_model(name: str, found: list[tuple[int, float]]) -> None:
    """Fit and print the line through (bytes, seconds)."""
    nbytes, times = np.array(found).T
    slope, fixed = np.polyfit(nbytes, times, 1, w=1 / times)  # relative errors: small tensors count as much as large ones
    print(f"cost model, {name}: added time = bytes / {1e-9 / slope:.1f} GB/s + {fixed * 1e6:.2f} us per tensor")


def device_seconds(module: Any, work: Callable[[], object], nbytes: int) -> tuple[float, float]:
    """Median of seven rounds, per call: seconds between two events around the calls, and seconds the host took to launch them.

    After 64 MiB the data come from memory, not from the cache, because each call reads more than the cache holds; smaller
    tensors are read from the cache, as they are right after the operation that made them."""
    number = max(3, min(200, (1 << 31) // max(nbytes, 1)))
    for _ in range(3):
        work()  # compiles, and decides which way is taken
    busy, host = [], []
    for _ in range(7):
        begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
        module.synchronize()
        begin.record()
        start = time.perf_counter()
        for _ in range(number):
            work()
        host.append((time.perf_counter() - start) / number)
        end.record()
        module.synchronize()
        busy.append(begin.elapsed_time(end) / 1e3 / number)
    return statistics.median(busy), statistics.median(host)


def on_device(device: str, dtype: torch.dtype, largest: int) -> None:
    """The table for an accelerator: the kernel without and with digest, torch operators, four passes with a read each."""
    module = getattr(torch, torch.device(device).type)
    print(f"{dtype}, {module.get_device_name()}, torch {torch.__version__}; us per tensor on the device | on the host (GB/s of the device)")
    names = ["kernel", "kernel+digest", "torch operators", "max/min/mean/norm"]
    print(f"{'elements':>10} " + " ".join(f"{name:>30}" for name in names))
    kernels = device_trust.DEVICES
    points: dict[str, list[tuple[int, float]]] = {"kernel": [], "kernel+digest": []}
    size = 10
    while size <= largest:
        x = torch.randn(size, device=device, dtype=torch.float32).to(dtype)
        take = Taker(DeviceRows(x, 1 << 14), x, 0, host_flags(dtype, True))
        found = []
        for name in names:
            device_trust.DEVICES = kernels if name.startswith("kernel") else ()
            digest = name.endswith("digest")
            work = (lambda x=x: four_passes(x)) if name == names[3] else lambda x=x, take=take, d=digest: reduce_device(x, take, d)
            busy, host = device_seconds(module, work, x.nbytes)
            found.append(f"{busy * 1e6:>9.2f} | {host * 1e6:>7.2f} ({x.nbytes / busy / 1e9:6.0f})")
            if name in points:
                points[name].append((x.nbytes, busy))
        device_trust.DEVICES = kernels
        print(f"{size:>10} " + " ".join(f"{text:>30}" for text in found), flush=True)
        size *= 10
    used = {digest for (_, _, t, digest), trusted in device_trust.TRUSTED.items() if t == dtype and trusted}
    print(f"the Triton kernel was {'used' if used == {False, True} else f'NOT used everywhere: {device_trust.TRUSTED}'}")
    for name, pairs in points.items():
        cost_model(name, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16", "float64"])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch; the kernel has one")
    parser.add_argument("--max", type=int, default=10_000_000, help="largest number of elements")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu")
    options = parser.parse_args()
    if not options.device.startswith("cpu"):
        on_device(options.device, getattr(torch, options.dtype), options.max)
        return
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    plain, digest, crc, xor, moments = TorchBackend(), TorchBackend(digest=True), TorchBackend(), TorchBackend(), TorchBackend()
    crc.want_checksum, xor.want_checksum = "crc32", "xor"
    moments.want_moments, moments.below = True, underflow_limit("bfloat16")
    print(f"{options.dtype}, {options.threads} thread(s), C kernel: {'yes' if host_kernel.available else 'no'}; us per tensor (GB/s)")
    heads = ["kernel", "kernel+digest", "kernel+CRC-32", "kernel+XOR", "kernel+moments", "update", "torch operators", "max/min/mean/norm"]
    print(f"{'elements':>10} " + " ".join(f"{head:>18}" for head in heads))
    points: dict[str, list[tuple[int, float]]] = {"statistics": [], "with digest": []}
    size = 10
    while size <= options.max:
        x = torch.randn(size).to(dtype)
        size_bytes = size * x.element_size()
        a, b = through_backend(plain, x, size), through_backend(digest, x, size)
        times = [a, b, *(through_backend(backend, x, size) for backend in (crc, xor, moments))]
        times += [update(plain, x, size), by_operators(x, size)]
        times.append(seconds(lambda x=x: four_passes(x), size))  # type: ignore[misc]
        print(f"{size:>10} " + " ".join(f"{t * 1e6:>10.2f} ({size_bytes / t / 1e9:5.1f})" for t in times), flush=True)
        points["statistics"].append((size_bytes, a))
        points["with digest"].append((size_bytes, b))
        size *= 10
    for name, found in points.items():
        cost_model(name, found)


if __name__ == "__main__":
    main()
