"""Private formats of an Ascend NPU (FRACTAL_NZ and others): the memory of such a tensor is blocked and padded for the matrix unit, so its
address and its number of elements do not lead to its values.

torch_npu keeps the format with the memory, torch knows nothing of it. Operators of torch_npu convert where they have to; a kernel that is
started by address does not.
"""

from __future__ import annotations

import sys

import torch

from msprobe_engine.core.guard import raise_of_training

_BASE = frozenset((-1, 0, 1, 2, 30))
"""`aclFormat` of memory that is as torch describes it: undefined, NCHW, NHWC, ND, NCDHW."""
_ND = 2


def is_private(tensor: torch.Tensor) -> bool:
    """Is the memory of a tensor of an NPU in a private format?"""
    ask = getattr(sys.modules.get("torch_npu"), "get_npu_format", None)
    return ask is not None and int(ask(tensor)) not in _BASE


def cast_to_nd(tensor: torch.Tensor) -> tuple[torch.Tensor | None, str]:
    """The same values in memory as torch describes it: a copy, made on the current stream, of all the memory that the tensor looks at.
    None, and why, when torch_npu cannot make it (it casts few types)."""
    torch_npu = sys.modules["torch_npu"]
    try:
        made: torch.Tensor = torch_npu.npu_format_cast(tensor.detach(), _ND)
    except Exception as error:
        raise_of_training(error)
        return None, f"private format: {torch_npu.get_npu_format(tensor)}, {type(error).__name__}: {str(error)[:80]}"
    return made, ""
