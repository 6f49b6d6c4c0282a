"""Which way rows are made in a check: by kernels of Triton (on the CPU in Triton's interpreter) or by operators of torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from msprobe_engine.core import log
from msprobe_engine.core.process.cores import usable_cores
from msprobe_engine.core.statistics import host_kernel
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.torch.statistics import derived
from msprobe_integrations.torch.statistics import pair_kernels as pairkernels
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.statistics.device import trust as device_trust

Way = Literal["kernels", "operators"]
Result = TypeVar("Result")
_PARALLEL = 8
"""Processes that compile kernels for a device."""


def why_not(device: Device, way: Way) -> str:
    """Why rows cannot be made that way here, "" when they can. On the CPU Triton is imported to interpret its kernels."""
    if way == "operators":
        return ""
    if not device.full and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported: {error}"
    if not device.full and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton {triton.__version__} does not interpret its kernels in this process"
    return ""


@contextmanager
def made_by(device: Device, way: Way) -> Iterator[list[str]]:
    """Rows of tensors on the device are made that way inside; yields what the probe warns of meanwhile."""
    messages = _Messages()
    launchers, pair_launchers = dict(statistics.LAUNCHERS), dict(pairkernels.PAIR_LAUNCHERS)
    before: list[tuple[Any, str, Any]] = [(device_trust, "DEVICES", device_trust.DEVICES)]
    device_trust.DEVICES = () if way == "operators" else (*device_trust.DEVICES, device.type)
    if not device.full:
        before += [(host_kernel, "available", host_kernel.available), (derived, "on_host", derived.on_host)]
        host_kernel.available = False
        if way == "kernels":
            from msprobe_integrations.torch.statistics.device import check as device_check  # imports Triton

            before.append((device_check, "ELEMENTS", device_check.ELEMENTS))
            device_check.ELEMENTS = 8300  # two programs, for the interpreter
        derived.on_host = lambda data: False  # noqa: ARG005
    if way == "operators":
        statistics.LAUNCHERS.clear()
        pairkernels.PAIR_LAUNCHERS.clear()
    log.get_logger().addHandler(messages)
    log.forget_warnings()
    try:
        yield messages.texts
    finally:
        log.get_logger().removeHandler(messages)
        for place, name, value in before:
            setattr(place, name, value)
        statistics.LAUNCHERS.update(launchers)
        pairkernels.PAIR_LAUNCHERS.update(pair_launchers)


def in_processes(device: Device, way: Way, work: Callable[[tuple[Device, Way, Any]], Result], items: Sequence[Any]) -> Iterator[Result]:
    """The result of `work` for each of `items`, in order. Where kernels are compiled for a device, that is done in several processes:
    each takes up to a second.

    Args:
        work: of a module that can be imported; calls `why_not` before it needs Triton.
    """
    given = [(device, way, item) for item in items]
    parallel = min(_PARALLEL, usable_cores() // 2)
    if not device.full or way == "operators" or parallel < 2:
        yield from map(work, given)
        return
    with torch.multiprocessing.get_context("spawn").Pool(parallel) as pool:
        yield from pool.imap(work, given)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
