"""Operators that a library on top of torch calls as C++ extensions: neither `__torch_function__` nor the dispatcher sees them.

The library has one Python function for each, which gets a record of its own, named as the existing tool names it. A function is replaced
once, where it is defined and in modules that have taken the name already, and stays replaced: modules that take the name while nothing
is captured take the wrapper, too. Without a capture it calls the function. Nothing is imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from msprobe_integrations.autoload.imports import after_import
from msprobe_integrations.patching import Patches

PACKAGE, PREFIX = "mindspeed.ops", "MindSpeed"
OPERATORS: dict[str, tuple[str, ...]] = {
    # of the existing tool
    "dropout_add_layer_norm": ("npu_dropout_add_layer_norm",),
    "ffn": ("npu_ffn",),
    "fusion_attention_v2": ("npu_fusion_attention", "npu_fusion_attention_grad"),
    "gmm": ("npu_gmm", "npu_gmm_v2"),
    "npu_apply_fused_ema_adamw": ("npu_apply_fused_ema_adamw",),
    "npu_grouped_mat_mul_all_reduce": ("npu_grouped_mat_mul_all_reduce",),
    "npu_groupmatmul_add": ("npu_groupmatmul_add_fp32",),
    "npu_matmul_add": ("npu_matmul_add_fp32",),
    "npu_mm_all_reduce_add_rms_norm": ("npu_mm_all_reduce_add_rms_norm",),
    "npu_mm_all_reduce_add_rms_norm_": ("npu_mm_all_reduce_add_rms_norm_",),
    "npu_moe_token_permute": ("npu_moe_token_permute",),
    "npu_moe_token_unpermute": ("npu_moe_token_unpermute",),
    "npu_ring_attention_update": ("npu_ring_attention_update",),
    "npu_rotary_position_embedding": ("npu_rotary_position_embedding",),
    "quant_gmm": ("npu_quant_gmm", "npu_quant_gmm_v2"),
    # beside these, and `npu_fusion_attention_grad` above: extensions that nothing else would show
    "dropout_add_rms_norm": ("npu_dropout_add_rms_norm",),
    "npu_all_to_all_all_gather_bmm": ("npu_alltoall_allgather_bmm",),
    "npu_apply_fused_adamw_v2": ("npu_apply_fused_adamw_v2",),
    "npu_bmm_reduce_scatter_all_to_all": ("npu_bmm_reducescatter_alltoall",),
    "weight_quant_gmm": ("npu_weight_quant_gmm", "npu_weight_quant_gmm_v2"),
}
"""Module of `PACKAGE` to its functions; what a version of MindSpeed lacks is left out."""

Handler = Callable[..., Any]
"""Called with the prefix, the name, the next function in line and the arguments; whatever it returns is the result."""

_compiling = torch.compiler.is_compiling
_replaced = Patches("torch", "torch_npu")
_handlers: tuple[Handler, ...] = ()
_asked = False


def add(handler: Handler) -> None:
    """`handler` sees all calls from now on, before those that came earlier."""
    global _handlers, _asked
    if handler not in _handlers:
        _handlers = (*_handlers, handler)
    if not _asked:
        _asked = True
        after_import(PACKAGE, _package)


def discard(handler: Handler) -> None:
    """`handler` sees no more calls."""
    global _handlers
    _handlers = tuple(h for h in _handlers if h != handler)


def _package(_: ModuleType) -> None:
    for name in OPERATORS:
        after_import(f"{PACKAGE}.{name}", _module)
    if _replaced:  # a module that is imported later is replaced before anybody can take a name from it
        _replaced.early_imports()


def _module(module: ModuleType) -> None:
    for name in OPERATORS[module.__name__.rpartition(".")[2]]:
        _replaced.wrap(module, name, functools.partial(_wrap_function, name))


def _wrap_function(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _compiling():  # first: what is looked at in a compiled region is guarded, and compiled again when it changes
            return function(*args, **kwargs)
        following = function
        for handler in _handlers:
            following = functools.partial(handler, PREFIX, name, following)
        return following(*args, **kwargs)

    return call
