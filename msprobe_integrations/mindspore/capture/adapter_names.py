"""Which functions are APIs of the dump where torch's names stand for MindSpore (MSAdapter), and what they are called: as in dumps of
PyTorch, ``torch`` is ``Torch``, ``torch.nn.functional`` ``Functional``, methods ``Tensor``, ``torch.distributed`` ``Distributed``.

What these functions call of MindSpore is inside of them, and has no records of its own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MODULES = (
    ("torch", "Torch"),
    ("torch.linalg", "Torch"),
    ("torch.fft", "Torch"),
    ("torch.special", "Torch"),
    ("torch.nn.functional", "Functional"),
    ("torch.distributed", "Distributed"),
)
_FUNCTIONS_TEXT = """
as_tensor asarray autocast can_cast compile compiled_with_cxx11_abi device dtype empty empty_like empty_strided enable_grad finfo
from_dlpack from_numpy frombuffer get_autocast_dtype get_default_device get_default_dtype get_device get_num_threads get_rng_state
has_torch_function handle_torch_function iinfo inference_mode initial_seed is_anomaly_enabled is_autocast_enabled is_complex
is_deterministic_algorithms_enabled is_distributed is_floating_point is_grad_enabled is_inference is_inference_mode_enabled is_nonzero
is_signed is_storage is_tensor is_warn_always_enabled lobpcg load manual_seed no_grad numel promote_types register_dataclass result_type
save seed set_autocast_dtype set_autocast_enabled set_default_device set_default_dtype set_default_tensor_type
set_deterministic_debug_mode set_flush_denormal set_grad_enabled set_num_threads set_printoptions set_rng_state set_warn_always tensor
typename use_deterministic_algorithms value_and_grad wait vmap
"""
_COLLECTIVES_TEXT = """
all_gather all_gather_into_tensor all_reduce all_to_all all_to_all_single batch_isend_irecv broadcast gather irecv isend recv reduce
reduce_scatter reduce_scatter_tensor scatter send
"""
_METHODS_TEXT = """
backward cpu cuda data_ptr dim element_size get_device is_coalesced is_complex is_conj is_contiguous is_floating_point is_inference is_leaf
is_neg is_nonzero is_pinned is_set_to is_shared is_signed nelement new_empty new_tensor npu numel requires_grad_ retain_grad size
storage_type to_dense type_as_ untyped_storage
"""
_NO_OPERATIONS = frozenset(_FUNCTIONS_TEXT.split())
_COLLECTIVES = frozenset(_COLLECTIVES_TEXT.split())
NO_METHODS = frozenset(_METHODS_TEXT.split())
"""Methods of torch's tensors that answer about a tensor, move it, or start a backward pass; no operations on its data."""


def functions() -> Iterator[tuple[Any, str, str, Callable[..., Any]]]:
    """(module, name, prefix, function) of every API that is imported by now."""
    for path, prefix in MODULES:
        module = sys.modules.get(path)
        for name, function in sorted(vars(module).items()) if isinstance(module, types.ModuleType) else ():
            if not name.startswith("_") and isinstance(function, types.FunctionType) and _is_operation(name, function, prefix):
                yield module, name, prefix, function


def _is_operation(name: str, function: Any, prefix: str) -> bool:
    if prefix == "Distributed":
        return name in _COLLECTIVES
    return name not in _NO_OPERATIONS and (function.__module__ or "").partition(".")[0] in _HOMES


_HOMES = ("torch", "mindspore", "mindtorch", "msadapter")
"""Packages whose functions are operations; others are helpers that a module has imported."""
