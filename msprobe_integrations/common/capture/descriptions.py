"""Descriptions of tensors, one object for all that are equal."""

from __future__ import annotations

import sys
from typing import Any

from msprobe_engine.core.records import TensorDescription

LIMIT = 100_000
"""Shapes that never repeat (packed sequences) must not fill the memory: a table of so many descriptions begins anew."""

_interned: dict[tuple[Any, ...], TensorDescription] = {}


def intern(
    text: str, dtype: str, shape: tuple[int, ...], requires_grad: bool | None, device: str, extra: tuple[tuple[str, Any], ...] = ()
) -> TensorDescription:
    """The one description with these fields."""
    text = sys.intern(text)
    key = (text, dtype, shape, requires_grad, device, repr(extra) if extra else "")
    found = _interned.get(key)
    if found is None:
        if len(_interned) > LIMIT:
            _interned.clear()
        found = _interned[key] = TensorDescription(text, sys.intern(dtype), shape, requires_grad, device, extra)
    return found
