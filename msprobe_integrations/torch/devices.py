"""Kinds of accelerators of this process: CUDA, an Ascend NPU, whatever else torch or an extension of it brings."""

from __future__ import annotations

from typing import Any

import torch


def kinds() -> tuple[str, ...]:
    """Types of devices there may be beside the processor. An extension (torch_npu) has its name in torch from its import on."""
    extension = torch._C._get_privateuse1_backend_name()
    return ("cuda", "xpu", *(() if extension == "privateuseone" else (extension,)))


def in_use() -> list[tuple[str, Any]]:
    """Kinds that this process has initialised, with their modules (`torch.cuda` and its like). Starts none."""
    found = []
    for kind in kinds():
        module = getattr(torch, kind, None)
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            found.append((kind, module))
    return found


def is_capturing(kind: str) -> bool:
    """Is the current stream of devices of this type recording a graph? What is called now runs later, and again."""
    return bool(getattr(getattr(torch, kind, None), "is_current_stream_capturing", bool)())


def capturing() -> bool:
    """`is_capturing` for any of the devices that this process uses."""
    return any(is_capturing(kind) for kind, _ in in_use())
