"""Which frames of a call stack are the user's: told by their file, once per code object."""

from __future__ import annotations

from pathlib import Path
from types import CodeType, FrameType

import torch

PLAIN, PLUMBING, INTERNAL = 0, 1, 2

_TORCH = Path(torch.__file__).parent.as_posix() + "/"
_OURS = tuple(f"{Path(__file__).parents[3].as_posix()}/{package}/" for package in ("msprobe_integrations", "msprobe_engine"))
_PLUMBING = tuple(
    _TORCH + path
    for path in (
        # how a call gets to what it calls
        "nn/modules/module.py",
        "overrides.py",
        "utils/_contextlib.py",
        "autograd/function.py",
        "_compile.py",
        "_ops.py",
        "_library/",
        "_dynamo/",
        # functions that only hand on: what the call is named after
        "nn/functional.py",
        "functional.py",
        "_tensor.py",
    )
)
_INTERNAL = tuple(
    _TORCH + path
    for path in (
        "distributed/tensor/",
        "distributed/fsdp/",
        "distributed/_composable/",
        "distributed/_functional_collectives.py",
        "nn/parallel/",
        "nested/_internal/",
        "_subclasses/",
        "_functorch/",
        "_higher_order_ops/",
        "_refs/",
        "_prims",
        "_decomp/",
        "_inductor/",
        "fx/",
    )
)
_TRANSFER = "torch_npu/contrib/transfer_to_npu.py"
"""Its functions stand in place of torch's, and hand on with ``npu`` where ``cuda`` was written."""
kinds: dict[CodeType, int] = {}
"""What `kind_of` has found so far."""


def kind_of(code: CodeType) -> int:
    """`PLAIN`: somebody's own code. `PLUMBING`: the way of a call, which nobody wants to see in a stack. `INTERNAL`: machinery of torch
    that works in Python (tensor subclasses, transforms, compilation); what it calls on its own is no call of the user."""
    found = kinds.get(code)
    if found is None:
        found = kinds[code] = _classify(code.co_filename.replace("\\", "/"))
    return found


def _classify(path: str) -> int:
    if path.startswith(_OURS) or path.startswith(_PLUMBING) or path.endswith(_TRANSFER):
        return PLUMBING
    return INTERNAL if path.startswith(_INTERNAL) else PLAIN


def hides(code: CodeType) -> bool:
    """Is code left out of stacks?"""
    return kind_of(code) == PLUMBING


def called_internally(frame: FrameType | None) -> bool:
    """Is a call made at `frame` one of torch's machinery?"""
    while frame is not None:
        kind = kind_of(frame.f_code)
        if kind != PLUMBING:
            return kind == INTERNAL
        frame = frame.f_back
    return False
