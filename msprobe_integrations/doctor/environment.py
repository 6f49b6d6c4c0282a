"""H: what of the machine decides whether the probe works and what it costs."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator

import torch
import torch.distributed as dist

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics.device import trust as device_trust

_FILES = 4096
_GIB = 1 << 30


def run(device: Device) -> Iterator[Line]:
    """One line per property."""
    available = host_kernel.available
    yield Line("C kernel of the host", "ok" if available else "slow", why="" if available else "not built: numpy takes its place")
    yield triton_works(device)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files >= _FILES or files == resource.RLIM_INFINITY
    remark = "" if enough else "raise it (ulimit -n) for jobs of many ranks on a machine"
    yield Line("open files of a process", "ok" if enough else "slow", str(files), f">= {_FILES}", remark)
    yield _shared_memory()
    yield gloo_works()
    if device.full:
        yield _pinned_memory()
    if device.type == "cuda":
        yield _clocks()


def triton_works(device: Device) -> Line:
    """Is the kernel of rows compiled, and does it give known numbers?"""
    name = "Triton compiles the kernels"
    if not device.full:
        return Line(name, "skipped", why="needs a GPU or NPU")
    try:
        from msprobe_integrations.torch.statistics.device import check as device_check

        wrong = device_check.check(device.device, torch.float32, 0)
    except Exception as error:
        return Line(name, "slow", why=f"torch operators take their place: {type(error).__name__}: {str(error)[:300]}")
    if wrong:
        return Line(name, "WRONG", why=wrong)
    TorchBackend().reduce(torch.ones(8, device=device.device))
    used = device_trust.TRUSTED.get((device.type, "row", torch.float32, 0), False)
    return Line(name, "ok" if used else "slow", why="" if used else "the kernel is right but not used")


def _shared_memory() -> Line:
    name = "free in /dev/shm"
    try:
        state = os.statvfs("/dev/shm")
    except OSError as error:
        return Line(name, "slow", "none", ">= 1 GiB", f"{error.strerror}: workers of loaders and ranks of a machine may need it")
    free = state.f_bavail * state.f_frsize
    enough = free >= _GIB
    return Line(
        name, "ok" if enough else "slow", f"{free / _GIB:.1f} GiB", ">= 1 GiB", "" if enough else "little: loaders with workers may fail"
    )


def gloo_works() -> Line:
    """The probe's own group of ranks is one of gloo, which asks the network for the name of this machine."""
    name = "gloo finds an interface"
    if not dist.is_available() or not dist.is_gloo_available():
        return Line(name, "skipped", why="this torch has no gloo")
    from torch._C._distributed_c10d import HashStore

    first = ""
    for interface in (os.environ.get("GLOO_SOCKET_IFNAME", ""), "lo"):
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        try:
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
        except Exception as error:
            first = first or f"{type(error).__name__}: {str(error)[:200]}"
            continue
        return Line(name, "ok", why=f"only with GLOO_SOCKET_IFNAME=lo; without it: {first}" if first else "")
    return Line(name, "WRONG", why=f"replicas and shards cannot be compared over ranks: {first}")


def _pinned_memory() -> Line:
    name = "pinned memory of the host"
    try:
        torch.empty(_GIB, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Line(name, "slow", "less than 1 GiB", "1 GiB", f"copies to the host are waited for: {str(error)[:200]}")
    return Line(name, "ok", "1 GiB", "1 GiB")


def _clocks() -> Line:
    name = "clocks and memory errors"
    query = "clocks.sm,clocks.max.sm,temperature.gpu,ecc.mode.current,ecc.errors.uncorrected.volatile.total"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
        clock, most, heat, ecc, errors = (part.strip() for part in done.stdout.strip().split(","))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Line(name, "skipped", why=f"nvidia-smi does not tell ({type(error).__name__})")
    remark = f"{errors} memory errors that could not be corrected: have the device replaced" if errors not in ("0", "[N/A]") else ""
    return Line(name, "WRONG" if remark else "ok", f"{clock} of {most}, {heat} C, ECC {ecc}", why=remark)
