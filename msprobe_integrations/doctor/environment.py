"""H: what of the machine decides whether the probe works and what it costs."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from collections.abc import Iterator

import torch

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.common.ranks.addresses import own_hosts
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
    yield ranks_connect()
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


def ranks_connect() -> Line:
    """Ranks tell each other what they see over connections of the probe's own; those of other machines need an address of this one."""
    name = "ranks connect to this machine"
    hosts = [host for host in own_hosts(os.environ.get("MASTER_ADDR", "")) if not host.startswith("127.") and host != "::1"]
    try:
        with socket.create_server(("", 0)) as listener:
            for host in ("127.0.0.1", *hosts[:1]):
                socket.create_connection((host, listener.getsockname()[1]), timeout=3.0).close()
    except OSError as error:
        return Line(name, "WRONG", why=f"replicas and shards cannot be compared over ranks: {type(error).__name__}: {str(error)[:200]}")
    why = "" if hosts else "only those of this machine: jobs of several need MASTER_ADDR, or GLOO_SOCKET_IFNAME"
    return Line(name, "ok", f"{len(hosts)} addresses", why=why)


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
