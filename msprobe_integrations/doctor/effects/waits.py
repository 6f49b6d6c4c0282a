"""B2: the training thread never waits for the device because of the probe."""

from __future__ import annotations

import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.common.parameters.update_pairs import Pair
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import MONITOR, attach_probe
from msprobe_integrations.torch import testing
from msprobe_integrations.torch.backend import TorchBackend

_MODES = (*MONITOR, "L0", "L1", "mix", "digest", "tensor")
_WARM, _STEPS = 2, 6
_MAY_WAIT = ("md5",)
"""Modes whose waits are stated only: bytes for checksums go to the host in blocks, and a full queue holds the training."""


def run(device: Device) -> Iterator[Line]:
    """A line per mode; on the CPU a device of the tests stands in, which refuses what would wait."""
    if not device.full:
        yield _stand_in()
        return
    if not hasattr(device.module, "set_sync_debug_mode"):
        yield Line("waits for the device", "skipped", why=f"torch.{device.type} cannot tell of them")
        return
    plain = waits_of(device, "off")
    if plain:
        yield Line("waits for the device", "skipped", why=f"the training waits without the probe: {plain[0]}")
        return
    for mode in (*_MODES, *_MAY_WAIT):
        try:
            waits = waits_of(device, mode)
        except Exception as error:
            yield Line(f"waits, {mode}", "WRONG", why=f"{type(error).__name__}: {str(error)[:300]}")
            continue
        allowed = mode in _MAY_WAIT
        places = "; ".join(f"{waits.count(place)} times at {place}" for place in list(dict.fromkeys(waits))[:3])
        goal = "stated" if allowed else "0"
        yield Line(f"waits, {mode}", "WRONG" if waits and not allowed else "ok", f"{len(waits)} in {_STEPS - _WARM} steps", goal, places)


def waits_of(device: Device, mode: str) -> list[str]:
    """Where the training thread has waited, after the steps in which kernels are checked and memory is made."""
    job = Job("tiny", str(device.device))
    with tempfile.TemporaryDirectory() as directory, attach_probe(job, mode, Path(directory)) as step:
        for _ in range(_WARM):
            step()
        device.synchronize()
        with _record_waits(device) as places:
            for _ in range(_STEPS - _WARM):
                step()
    return places


@contextmanager
def _record_waits(device: Device) -> Iterator[list[str]]:
    """Yields the places at which this thread waits: torch warns of each operation that does."""
    places: list[str] = []
    thread = threading.get_ident()

    def record_wait(message: Any, *_: Any, **__: Any) -> None:
        if "called a synchronizing" in str(message) and threading.get_ident() == thread:
            own = [frame for frame in traceback.extract_stack() if _is_ours(Path(frame.filename))]
            places.append(f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "the training")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record_wait
        device.module.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            device.module.set_sync_debug_mode("default")


def _is_ours(path: Path) -> bool:
    return "doctor" not in path.parts and not {"msprobe_integrations", "msprobe_engine"}.isdisjoint(path.parts)


def _stand_in() -> Line:
    """Rows, rows of pairs and histograms of tensors whose values nobody may read before the step has ended."""
    backend = TorchBackend(digest=True)
    waited: list[str] = []
    tensors = [torch.randn(100, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    wrapped = [testing.ProbeDevice.wrap(tensor) for tensor in tensors]
    for want in (0, host_kernel.WANT_DIGEST, host_kernel.WANT_MOMENTS | host_kernel.want_below(0.5), host_kernel.WANT_XOR):
        backend._want = want
        backend.forget()
        try:
            with testing.reads_forbidden():
                for wrapped_tensor in wrapped:
                    backend.reduce(wrapped_tensor)
                    backend.reduce(wrapped_tensor.view(10, 10).t())
                    backend.reduce_pair(Pair(0, wrapped_tensor, wrapped_tensor, (0.0, 0.0, 0.0)))
                    backend.histogram(wrapped_tensor, "log2")
                pending = backend.finish_step()
            pending.rows()
        except testing.EarlyRead as error:
            waited.append(str(error))
    wrong = [*waited, *backend.unsupported]
    return Line("waits of rows, with a stand-in for the device", "WRONG" if wrong else "ok", f"{len(waited)}", "0", "; ".join(wrong))
