"""Which frames of a call stack are left out: the way of a call through MindSpore and the probe, which nobody wants to see."""

from __future__ import annotations

from pathlib import Path
from types import CodeType

import mindspore

_MINDSPORE = Path(mindspore.__file__).parent.as_posix() + "/"
_OURS = tuple(f"{Path(__file__).parents[3].as_posix()}/{package}/" for package in ("msprobe_integrations", "msprobe_engine"))
_PLUMBING = tuple(
    _MINDSPORE + path
    for path in (
        # how a call gets to what it calls
        "nn/cell.py",
        "graph/",
        "common/",
        "ops/composite/",
        "ops/primitive.py",
        # functions that only hand on: what the call is named after
        "ops/function/",
        "ops/auto_generate/",
        "ops/tensor_method.py",
        "mint/__init__.py",
        "mint/nn/functional.py",
    )
)
_MACHINERY = tuple(_MINDSPORE + path for path in ("common/recompute.py", "nn/cell.py", "graph/", "ops/composite/"))
_machinery: dict[CodeType, bool] = {}


def is_machinery(code: CodeType) -> bool:
    """Is it code of MindSpore that calls functions for itself (recomputation, casts of mixed precision)? Those are no calls of the user."""
    found = _machinery.get(code)
    if found is None:
        found = _machinery[code] = code.co_filename.replace("\\", "/").startswith(_MACHINERY)
    return found


def hides(code: CodeType) -> bool:
    """Is code left out of stacks?"""
    path = code.co_filename.replace("\\", "/")
    return path.startswith(_OURS) or path.startswith(_PLUMBING)
