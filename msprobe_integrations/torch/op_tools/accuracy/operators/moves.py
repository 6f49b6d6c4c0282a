"""Moves of tensors to a device (``x.to("cuda:1")``, ``x.npu()``): each side of a check has one device, and there they change nothing.

What such a call does besides, the cast to another type, is done and checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.Tensor.to`; a device, by name or number, is that of the tensor."""
    if args and (isinstance(args[0], str) or type(args[0]) is int):
        args = (tensor.device, *args[1:])
    if kwargs.get("device") is not None:
        kwargs["device"] = tensor.device
    return tensor.to(*args, **kwargs)


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor.type`; of ``"torch.cuda.HalfTensor"`` the last word counts."""

    def here(kind: Any) -> Any:
        if not isinstance(kind, str):
            return kind
        device = "" if tensor.device.type == "cpu" else f"{tensor.device.type}."
        return f"torch.{device}{kind.rpartition('.')[2]}"

    if "dtype" in kwargs:
        kwargs["dtype"] = here(kwargs["dtype"])
    return tensor.type(*map(here, args[:1]), *args[1:], **kwargs)


def _same(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    del args, kwargs
    return tensor.view_as(tensor)


MOVES: Mapping[str, Callable[..., Any]] = {"to": _to, "type": _type, **dict.fromkeys(("cuda", "npu", "xpu", "mps", "hpu", "mtia"), _same)}
"""Methods of tensors that may name a device, and what is run in their place."""
