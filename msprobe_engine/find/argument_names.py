"""What an argument of a recorded call is called: a record numbers arguments, people know ``eps``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msprobe_engine.core.text.source_line import argument_text, parse_line
from msprobe_engine.find.nonfinite.trace import module_path

_PARAMETERS: Mapping[str, str] = {
    "addcdiv": "input tensor1 tensor2",
    "addcmul": "input tensor1 tensor2",
    "batch_norm": "input running_mean running_var weight bias training momentum eps",
    "clamp": "input min max",
    "conv2d": "input weight bias stride padding dilation groups",
    "cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing",
    "cumsum": "input dim",
    "dropout": "input p training inplace",
    "elu": "input alpha inplace",
    "embedding": "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
    "gelu": "input approximate",
    "group_norm": "input num_groups weight bias eps",
    "layer_norm": "input normalized_shape weight bias eps",
    "leaky_relu": "input negative_slope inplace",
    "lerp": "input end weight",
    "linear": "input weight bias",
    "log_softmax": "input dim",
    "masked_fill": "input mask value",
    "mean": "input dim keepdim",
    "nll_loss": "input target weight size_average ignore_index reduce reduction",
    "normalize": "input p dim eps",
    "pow": "input exponent",
    "rms_norm": "input normalized_shape weight eps",
    "roll": "input shifts dims",
    "scaled_dot_product_attention": "query key value attn_mask dropout_p is_causal",
    "softmax": "input dim",
    "sum": "input dim keepdim",
    "topk": "input k dim",
    "transpose": "input dim0 dim1",
    "tril": "input diagonal",
    "triu": "input diagonal",
}
"""Functions of torch -> their parameters, in order."""
_OPERANDS: Mapping[str, str] = {
    "add": "addend",
    "div": "divisor",
    "floordiv": "divisor",
    "mod": "divisor",
    "mul": "factor",
    "pow": "exponent",
    "rpow": "base",
    "rtruediv": "dividend",
    "rsub": "minuend",
    "sub": "subtrahend",
    "truediv": "divisor",
}
"""Operators and methods that are one -> what their other operand is called."""
_PLACE = re.compile(r"(?:.*\.)?input\.(\d+)")


def find_callee_name(record: str) -> str:
    """What a record is a call of: ``relu`` of a function, the path of a module."""
    parts = record.split(".")
    return module_path(record) or (parts[-3] if len(parts) >= 4 else record)


def argument_name(record: str, place: str, stack: Sequence[str]) -> str:
    """Name of an argument.

    Args:
        record: name of the call, ``Functional.rms_norm.2.forward``.
        place: of the argument in it, ``input.3`` or, of one that was given by name, ``input.eps``.
        stack: lines of the call, innermost first.

    Returns:
        The function's own word (``rms_norm eps``), else what the line of source has there (``self.base``), else what operands are called;
        `place` where nobody knows.
    """
    word = place.rpartition("input.")[2]
    match = _PLACE.fullmatch(place)
    parts = record.split(".")
    if len(parts) < 4 or not parts[-2].isdecimal():
        return place
    function, method = parts[-3], parts[0] == "Tensor"
    line = parse_line(stack[0]) if stack else None
    code = line.code if line is not None else ""
    if match is None:
        return argument_text(code, function, word) or (f"{function} {word}" if word.isidentifier() else place)
    position = int(match[1])
    names = _PARAMETERS.get(function.rstrip("_"), "").split()
    if position < len(names) and not method:
        return f"{function} {names[position]}"
    text = argument_text(code, function, position, method)
    if text or position >= len(names):
        return text or (_operand(function) if position == 1 else "") or place
    return f"{function} {names[position]}"


def _operand(function: str) -> str:
    bare = function.strip("_")
    return _OPERANDS.get(bare) or _OPERANDS.get(bare.removeprefix("i").removeprefix("r"), "")
