"""The stream on which data goes from a device to the host beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from msprobe_engine.core.log import warn_once
from msprobe_integrations.torch.statistics.capture_mode import relax_capture_mode

_streams: dict[Any, Any] = {}


def side_stream(module: Any, device: torch.device) -> Any:
    """The one side stream of a device; `module` is ``torch.cuda`` or its like."""
    if device not in _streams:
        _streams[device] = module.Stream(device=device)
    return _streams[device]


def record_event(device: torch.device, **options: Any) -> Any:
    """An event that is over when the current stream of `device` has come to this point; options as those of ``torch.cuda.Event``."""
    module = getattr(torch, device.type)
    with module.device(device):
        event = module.Event(**options)
        event.record()
    return event


def wait_for(event: Any) -> None:
    """Wait for an event of a device, on whatever thread; a capture of a graph on another thread goes on."""
    relax_capture_mode()
    event.synchronize()


def host_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host that a device writes to without a wait, where its backend has such; else ordinary memory, and it is said."""
    try:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError) as error:
        if "out of memory" in str(error):
            raise
        text = f"copies from the device are waited for: its backend has no pinned memory ({type(error).__name__}: {str(error)[:200]})"
        warn_once("pinned memory", text)
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
