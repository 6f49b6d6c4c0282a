"""Which device kernels may be used: decided at the first tensor of a kind by known numbers, and taken back when one fails."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import warn_once

TRUSTED: dict[tuple[Hashable, ...], bool] = {}
"""Device type, and what tells kernels apart, to whether the kernel is used. Missing: not decided."""
DEVICES: tuple[str, ...] = ("cuda", "npu")
"""Types of devices on which Triton is tried."""
_PASSING = ("out of memory", "synchroniz", "captur")
"""Parts of messages of errors that say nothing of a kernel: there was no room; an operation that waits is forbidden at present; a graph is
recorded at present."""
_TRIES = 5
_failed: dict[tuple[Hashable, ...], int] = {}


def by_kernel(
    device: torch.device,
    key: tuple[Hashable, ...],
    what: str,
    check: Callable[[], str | None],
    launch: Callable[[], None],
    instead: str = "torch operators, many launches per tensor instead of one or two",
) -> bool:
    """Let a kernel do the work. False when it cannot: why is said once, and the kernel is not tried again.

    Args:
        key: what tells kernels on devices of this type apart.
        what: for the message, "statistics of torch.float32 tensors".
        check: runs known numbers at the first call; what is wrong, "" when nothing is, None when there is no kernel for it.
        instead: for the message, what is done without the kernel.
    """
    name = (device.type, *key)
    try:
        trusted = TRUSTED.get(name)
        if trusted is None:
            with waits_allowed(device.type):
                wrong = check()
            if wrong:
                raise _Wrong(wrong)
            TRUSTED[name] = trusted = wrong is not None
        if trusted:
            launch()
        return trusted
    except Exception as error:
        raise_of_training(error)
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in str(error):  # torch_npu has no class of its own for it
            raise  # the copy of a strided tensor had no room; no reason to doubt the kernel, and operators need more
        if (not isinstance(error, _Wrong) and any(part in str(error) for part in _PASSING)) and _failed.setdefault(name, 0) < _TRIES:
            _failed[name] += 1
            return False
        TRUSTED[name] = False
        why = f"{type(error).__name__}: {str(error)[:300]}"
        warn_once(
            f"device kernel on {device.type}: {instead}",
            f"{what} on '{device.type}' take {instead}: the Triton kernel cannot be used ({why}). The numbers are the same. To get the "
            "kernel: a Triton for this device (on Ascend: triton-ascend) and a C compiler",
        )
        return False


class _Wrong(RuntimeError):
    """Known numbers gave another row."""


@contextmanager
def waits_allowed(kind: str) -> Iterator[None]:
    """`set_sync_debug_mode` of the user refuses nothing inside: the check of a kernel waits for its own launches."""
    module: Any = getattr(torch, kind, None)
    try:
        mode = module.get_sync_debug_mode()
    except Exception as error:  # no such function, or no such device in this process
        raise_of_training(error)
        mode = 0
    if not mode:
        yield
        return
    module.set_sync_debug_mode(0)
    try:
        yield
    finally:
        module.set_sync_debug_mode(mode)
