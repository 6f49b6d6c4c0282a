"""What an operator of the dispatcher is: which are compared, what they write, under which name they are judged."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

_COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor", "fsdp")
_READS = frozenset(("_local_scalar_dense", "is_pinned", "_pin_memory", "record_stream", "sym_size", "sym_stride", "sym_numel", "is_same_size"))
_FORM = frozenset(("_unsafe_view", "lift_fresh", "resize_", "resize_as_", "_resize_output_", "set_", "swap_", "set_data", "_nested_view_from_buffer"))
_NO_VALUES = frozenset(("empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty", "empty_permuted", "_empty_affine_quantized"))
_ASSERTS = ("_assert_", "_functional_assert", "_print")

_API = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "convolution": "conv2d",
    "_convolution": "conv2d",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "native_dropout": "dropout",
    "_fused_rms_norm": "rms_norm",
    "nll_loss_forward": "nll_loss",
    "_to_copy": "to",
    "copy_": "clone",
    "max_pool2d_with_indices": "max_pool2d",
}


class Operator(NamedTuple):
    """What is known of an operator without its arguments.

    Attributes:
        name: without name space and overload, ``"addmm"``.
        api: name that the verdict's standards know it by, ``"softmax"`` for ``_softmax``.
        skip: why its calls are never compared; empty: they are.
        writes: arguments it writes into: place among the positional ones, and name.
        random: it may draw random numbers.
        foreign: no operator of torch: its schema is taken for what it says, but its arguments are copied all the same.
    """

    name: str
    api: str
    skip: str
    writes: tuple[tuple[int, str], ...]
    random: bool
    foreign: bool


@lru_cache(maxsize=None)
def known(func: Any) -> Operator:
    """`Operator` of an overload; of a higher order operator only that it is not compared."""
    if not isinstance(func, torch._ops.OpOverload):
        name = str(getattr(func, "__name__", func))
        return Operator(name, name, "operator that takes functions", (), False, True)
    schema = func._schema
    space, _, name = schema.name.partition("::")
    writes = tuple((n, a.name) for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    api = _API.get(name, name.removeprefix("_foreach_") if name.startswith("_foreach_") else name)
    skip = _reason(func, space, name)
    return Operator(name, api, skip, writes, torch.Tag.nondeterministic_seeded in func.tags, space not in ("aten", "prims"))


def _reason(func: Any, space: str, name: str) -> str:
    if space in _COMMUNICATION:
        return "communication"
    if name in _FORM or func.is_view or torch.Tag.inplace_view in func.tags:
        return "changes the form of a tensor only"
    if name in _NO_VALUES:
        return "memory without values"
    if name in _READS or space in ("prim", "profiler") or name.startswith(_ASSERTS):
        return "reads or asserts, computes nothing"
    return ""


_TIES = frozenset(("sort", "topk", "max", "min", "kthvalue", "mode", "median", "nanmedian", "cummax", "cummin", "argmax", "argmin", "argsort"))


def same_values(func: Any, args: Any, kwargs: Any, device: torch.Tensor, bench: torch.Tensor) -> bool:
    """Do two results that are indices point at equal values of the operator's first argument? Among equal values any order is right."""
    operator = known(func)
    if operator.name not in _TIES or device.shape != bench.shape or not args or not isinstance(args[0], torch.Tensor):
        return False
    if device.dtype != torch.int64 or bench.dtype != torch.int64 or not device.numel():
        return False
    given = dict(zip((a.name for a in func._schema.arguments), args)) | dict(kwargs)
    values, dim = args[0].detach().cpu(), given.get("dim", -1 if operator.name in ("sort", "topk", "kthvalue", "mode") else None)
    device, bench = device.cpu(), bench.cpu()
    if dim is None:
        values, dim, device, bench = values.reshape(-1), 0, device.reshape(-1), bench.reshape(-1)
    elif device.dim() < values.dim():
        device, bench = device.unsqueeze(dim), bench.unsqueeze(dim)
    size = values.shape[dim] if values.dim() else 1
    if bool(((device < 0) | (device >= size)).any()) or bool(((bench < 0) | (bench >= size)).any()):
        return False
    if operator.name in ("sort", "argsort", "topk") and bool((device.sort(dim).values.diff(dim=dim) == 0).any()):
        return False  # one place twice
    a, b = values.gather(dim, device), values.gather(dim, bench)
    return bool(torch.equal(a, b) or torch.equal(a.isnan() | (a == b), torch.ones_like(a, dtype=torch.bool)) and torch.equal(a.isnan(), b.isnan()))
