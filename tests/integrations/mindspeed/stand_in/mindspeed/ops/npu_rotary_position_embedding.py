"""Rotary embedding."""

from __future__ import annotations

from typing import Any

from mindspeed.ops import extension

__all__ = ["npu_rotary_position_embedding"]


def npu_rotary_position_embedding(x: Any, cos: Any, sin: Any, mode: int = 0) -> Any:
    """One call of the extension."""
    del mode
    return extension.rotary(x, cos, sin)
