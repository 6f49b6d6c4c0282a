"""Kinds of accelerators of this process: CUDA, an Ascend NPU, whatever else torch or an extension of it brings."""

from __future__ import annotations

import warnings
from typing import Any

import torch


def kinds() -> tuple[str, ...]:
    """Types of devices there may be beside the processor. An extension (torch_npu) has its name in torch from its import on."""
    extension = torch._C._get_privateuse1_backend_name()
    return ("cuda", "xpu", *(() if extension == "privateuseone" else (extension,)))


def modules() -> list[tuple[str, Any]]:
    """Kinds with their modules (`torch.cuda` and its like), each device once: torch_npu's `transfer_to_npu` puts the functions of
    ``torch.npu`` into ``torch.cuda``, which then speaks of the NPU."""
    loaded = [(kind, module) for kind in kinds() if (module := getattr(torch, kind, None)) is not None]
    own = [vars(module).get("is_initialized") for _, module in loaded]
    return [entry for position, entry in enumerate(loaded) if own[position] is None or own[position] not in own[position + 1 :]]


def in_use() -> list[tuple[str, Any]]:
    """`modules` of the kinds that this process has initialised. Starts none."""
    return [(kind, module) for kind, module in modules() if getattr(module, "is_initialized", lambda: False)()]


def is_capturing(kind: str) -> bool:
    """Is the current stream of devices of this type recording a graph? What is called now runs later, and again."""
    return bool(getattr(getattr(torch, kind, None), "is_current_stream_capturing", bool)())


def is_any_capturing() -> bool:
    """`is_capturing` for any of the devices that this process uses."""
    return any(is_capturing(kind) for kind, _ in in_use())


FLOAT64: dict[str, bool] = {}
"""Type of a device to whether `widest` is float64 there, once known."""


def widest(like: torch.Tensor) -> torch.dtype:
    """float64, or float32 where operators on the device of `like` do not compute in float64: torch_npu makes float32 of
    ``.to(torch.float64)``, others raise."""
    known = FLOAT64.get(like.device.type)
    if known is None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch_npu says what it does
                known = like.new_ones((), dtype=torch.float32).to(torch.float64).dtype == torch.float64
        except (TypeError, RuntimeError, NotImplementedError):
            known = False
        FLOAT64[like.device.type] = known
    return torch.float64 if known else torch.float32


def accelerator() -> torch.device | None:
    """The accelerator, without an index; None where there is none. A build of torch for one says its name on machines without it, too."""
    if hasattr(torch, "accelerator"):  # torch 2.6
        return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cuda") if torch.cuda.is_available() else None
