"""The stream on which data goes from a device to the host beside the training."""

from __future__ import annotations

from typing import Any

import torch

_streams: dict[Any, Any] = {}


def side_stream(module: Any, device: torch.device) -> Any:
    """The one side stream of a device; `module` is ``torch.cuda`` or its like."""
    if device not in _streams:
        _streams[device] = module.Stream(device=device)
    return _streams[device]
