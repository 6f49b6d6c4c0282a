"""What an operator of the dispatcher is: which are compared, what they write, under which name they are judged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from msprobe_engine.core.operator_traits import UNINITIALISED

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor", "fsdp")
_READS = frozenset(
    ("_local_scalar_dense", "is_pinned", "_pin_memory", "record_stream", "sym_size", "sym_stride", "sym_numel", "is_same_size")
)
_FORM = frozenset(
    ("_unsafe_view", "lift_fresh", "resize_", "resize_as_", "_resize_output_", "set_", "swap_", "set_data", "_nested_view_from_buffer")
)
_WORKSPACE = re.compile(r"workspace|reserve", re.IGNORECASE)
"""Arguments in which a kernel leaves something for its backward in a form of its own: in other types it is not what that expects."""
_KERNEL = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_cudnn_ctc_loss", "_cudnn_init_dropout_state")
_ASSERTS = ("_assert_", "_functional_assert", "_print")

_API = {
    "_softmax": "softmax", "_log_softmax": "log_softmax", "convolution": "conv2d", "_convolution": "conv2d",
    "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "native_batch_norm": "batch_norm",
    "native_dropout": "dropout", "_fused_rms_norm": "rms_norm", "nll_loss_forward": "nll_loss", "_to_copy": "to",
    "copy_": "clone", "max_pool2d_with_indices": "max_pool2d", "embedding_dense": "embedding", "_fused_dropout": "dropout",
    "_linalg_svd": "svd", "_linalg_eigh": "eigh", "linalg_qr": "qr", "linalg_eig": "eig", "constant_pad_nd": "pad",
    "_ctc_loss": "ctc_loss", "_upsample_bilinear2d_aa": "upsample_bilinear", "_upsample_bicubic2d_aa": "upsample_bicubic",
}  # fmt: skip
_BACKWARD = re.compile(r"_backward(_data|_input|_weight|_overrideable)?_?$")
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_RUNNING = ("running_mean", "running_var")
"""Written in training, which the schemas of these do not say."""
_FIRST_ONLY = ("_embedding_bag", "_embedding_bag_forward_only", "_ctc_loss")
"""What stands behind the first result is memory that may have no values."""
_ALL = 1 << 30
_ATTENTION = "_scaled_dot_product_"


class Operator(NamedTuple):
    """What is known of an operator without its arguments.

    Attributes:
        name: without name space and overload, ``"addmm"``.
        api: name that the verdict's standards know it by, ``"softmax"`` for ``_softmax``; its own where they know none.
        gradient: its results are gradients.
        main: results that the program gets; those behind are kept for the backward pass, and nobody promises that they are more
            precise than the inputs.
        first_only: of its results the first is compared.
        skip: why its calls are never compared; empty: they are.
        writes: arguments it writes into: place among the positional ones, and name.
        random: it may draw random numbers.
        foreign: no operator of torch: its schema is taken for what it says, but its arguments are copied all the same.
    """

    name: str
    api: str
    gradient: bool
    main: int
    first_only: bool
    skip: str
    writes: tuple[tuple[int, str], ...]
    random: bool
    foreign: bool


@cache
def describe_operator(func: Any) -> Operator:
    """`Operator` of an overload; of a higher order operator only that it is not compared."""
    if not isinstance(func, torch._ops.OpOverload):
        name = str(getattr(func, "__name__", func))
        return Operator(name, name, False, 1, False, "operator that takes functions", (), False, True)
    schema = func._schema
    space, _, name = schema.name.partition("::")
    silent = _RUNNING if name in _NORMS else ()
    writes = tuple(
        (n, argument.name)
        for n, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in silent
    )
    gradient = _BACKWARD.search(name) is not None
    main = 1 if name.startswith(_ATTENTION) and not gradient else _ALL
    skip = _reason(func, space, name)
    return Operator(
        name,
        _api(name),
        gradient,
        main,
        name in _FIRST_ONLY,
        skip,
        writes,
        torch.Tag.nondeterministic_seeded in func.tags,
        space not in ("aten", "prims"),
    )


def _api(name: str) -> str:
    bare = _BACKWARD.sub("", name)
    return _API.get(bare, bare.removeprefix("_foreach_"))


def _reason(func: Any, space: str, name: str) -> str:
    if space in _COMMUNICATION:
        return "communication"
    if name in _FORM or func.is_view or torch.Tag.inplace_view in func.tags:
        return "changes the form of a tensor only"
    if name in UNINITIALISED:
        return "memory without values"
    if name.startswith(_KERNEL) or any(
        _WORKSPACE.search(argument.name) and "Tensor" in str(argument.type) for argument in func._schema.arguments
    ):
        return "a kernel's own workspace"
    if name in _READS or space in ("prim", "profiler") or name.startswith(_ASSERTS):
        return "reads or asserts, computes nothing"
    return ""


def api_of(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The name by which this call is judged: some arguments make another function of an operator."""
    if kwargs.get("alpha", 1) != 1:
        return "axpy"  # ``add(x, y, alpha=2)`` may round the product
    if operator.name in ("convolution", "convolution_backward"):
        transposed = args[len(args) - 3] if operator.name == "convolution" else args[7]
        return "conv_transpose2d" if transposed is True else operator.api
    return operator.api
