"""Calls of MindSpore's functions, made again on other inputs: which of them can be, and how arguments are rebuilt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_integrations.common.capture.nested import lister, mapper
from msprobe_integrations.mindspore.capture.api_names import COLLECTIVES, Api

Tensor: Any = mindspore.Tensor
FLOATS = {"Float16": "float16", "BFloat16": "bfloat16", "Float32": "float32", "Float64": "float64"}
"""Types that are perturbed and compared, as tensors print them, and what the engine calls them."""

_RANDOM = re.compile(
    r"(?:^|_)(?:rand\w*|\w*dropout\w*|normal|uniform|bernoulli|multinomial|gamma|poisson|shuffle|gumbel\w*|rrelu|laplace|exponential|"
    r"\w*sampler|choice_with_mask|fractional\w*|cauchy|geometric)(?:_|\d|$)"
)
_CHANGES_ITS_INPUT = re.compile(
    r"(?:assign|apply_|inplace_|copy_|set_)|__(?:i(?:add|sub|mul|mod|matmul|truediv|floordiv)|setitem)__$|\w*[^_]_$"
)
_MAKES_TENSORS = ("from_", "empty", "new_", "full", "ones", "zeros", "eye", "arange", "linspace")


def left_out(api: Api, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call is not made again, None when it is. A random one would draw numbers that the training does not get."""
    if api.prefix in COLLECTIVES:
        return "communication"
    if _RANDOM.search(api.name) or any(_drops(name, value) for name, value in kwargs.items()):
        return "random"
    if _CHANGES_ITS_INPUT.match(api.name) or (api.name.startswith("scatter") and args and isinstance(args[0], mindspore.Parameter)):
        return "changes its input"
    return "makes tensors" if api.name.startswith(_MAKES_TENSORS) else None


def _drops(name: str, value: Any) -> bool:
    return ("dropout" in name and bool(value)) or (name == "keep_prob" and value != 1)


mapped = mapper(Tensor)
tensors_of = lister(mapped)


def kind(tensor: Any) -> str | None:
    """Name of its type for the engine, None when it is not compared."""
    return FLOATS.get(str(tensor.dtype))


def values_of(tensor: Any) -> npt.NDArray[Any]:
    """The values, bfloat16 as float32; may lie in the tensor's memory, do not write. Waits for the tensor."""
    found: npt.NDArray[Any] = tensor.asnumpy()
    return found.astype(np.float32) if str(tensor.dtype) == "BFloat16" else found


def copy_tensor(tensor: Any) -> Any:
    """A tensor of its own with the same values, also of a Parameter."""
    return Tensor(values_of(tensor).copy(), tensor.dtype) if kind(tensor) else Tensor(tensor.asnumpy().copy(), tensor.dtype)
