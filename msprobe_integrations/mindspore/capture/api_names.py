"""Which functions of MindSpore are APIs of the dump, and what they are called: ``ops`` are ``Functional``, ``mint`` is ``Mint``,
``mint.nn.functional`` ``MintFunctional``, methods ``Tensor``, ``mint.distributed`` ``MintDistributed``, ``communication.comm_func``
``Distributed``.

Nothing is listed: the modules say what they have, and what is no operation on data is left out. (The existing tool has a list, which is
older than half of ``mint``.)
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from itertools import starmap
from typing import Any, NamedTuple

import mindspore

from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.capture import adapter_names

Tensor: Any = mindspore.Tensor


class Api(NamedTuple):
    """One function that is looked at.

    Attributes:
        owner: the module, or the class of tensors.
        name: attribute, and last part of the record name.
    """

    owner: Any
    name: str
    prefix: str
    function: Any


_MODULES = (
    ("mindspore.ops", "Functional"),
    ("mindspore.mint", "Mint"),
    ("mindspore.mint.linalg", "Mint"),
    ("mindspore.mint.special", "Mint"),
    ("mindspore.mint.nn.functional", "MintFunctional"),
    ("mindspore.mint.distributed", "MintDistributed"),
    ("mindspore.communication.comm_func", "Distributed"),
)
COLLECTIVES = frozenset(("MintDistributed", "Distributed"))
"""Prefixes of communication."""

_NO_OPERATIONS = (
    # modules whose functions transform functions, register kernels, print, or are there under another prefix
    "grad.grad_func",
    "function.vmap_func",
    "function.debug_func",
    "function.reshard_func",
    "function.comm_func",
    "ops.primitive",
    "op_info_register",
    "vm_impl_registry",
    "operations._ms_kernel",
)
_NAMES_TEXT = """
constexpr add_flags kernel ms_kernel deprecated jit_class jit_forbidden_register jit_view_unsupported vmap cond get_cache_group_rank
get_cache_group_size get_group_size get_group_rank_from_world_rank get_backend get_global_rank get_group_rank get_process_group_ranks
get_rank get_world_size init_process_group destroy_process_group is_available is_initialized new_group set_comm_ops_inplace barrier
empty empty_like all_gather_object broadcast_object_list gather_object scatter_object_list send_object_list recv_object_list
"""
_NAMES = frozenset(_NAMES_TEXT.split())
_ALIASES = ("_ext", "_op", "_impl", "_func", "_ex")
"""Ends of names under which modules keep what their own functions call."""

_QUESTIONS_TEXT = """
asnumpy assign_value_cpp convert_bytes_to_tensor data_ptr data_sync dim flush_from_cache from_dlpack get_bytes getitem_index_info hooks
init_data is_contiguous is_floating_point is_init is_pinned is_shared item itemset ndimension numel numpy offload offload_file_path
register_hook remove_hook requires_grad_ set_cast_dtype set_const_arg set_device_address set_dtype set_init_flag set_param_info
setitem_index_info storage storage_offset stride to_dlpack tolist type untyped_storage value wait_pipeline pin_memory set_ new_empty
"""
_QUESTIONS = frozenset(_QUESTIONS_TEXT.split())
"""Methods that answer about a tensor, or move it; no operations on its data."""

_OPERATORS_TEXT = """
abs add and bool eq floordiv ge getitem gt iadd ifloordiv imatmul imod imul invert isub itruediv le lt matmul mod mul ne neg or pos pow
radd rfloordiv rmatmul rmod rmul round rpow rsub rtruediv setitem sub truediv xor
"""
_OPERATORS = frozenset(f"__{name}__" for name in _OPERATORS_TEXT.split())


def apis() -> Iterator[Api]:
    """All APIs of the installed MindSpore; where torch's names stand for it, those of torch."""
    adapter = environment.adapter()
    questions = _QUESTIONS | adapter_names.NO_METHODS if adapter else _QUESTIONS
    if adapter:
        yield from starmap(Api, adapter_names.functions())
    for path, prefix in () if adapter else _MODULES:
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        public = set(getattr(module, "__all__", ()))
        for name, function in sorted(vars(module).items()):
            if not name.startswith("_") and isinstance(function, types.FunctionType) and _is_operation(name, function, prefix, public):
                yield Api(module, name, prefix, function)
    for name in dir(Tensor):
        if (not name.startswith("_") and name not in questions) or name in _OPERATORS:
            function = getattr(Tensor, name)
            if isinstance(function, (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
                yield Api(Tensor, name, "Tensor", function)


def _is_operation(name: str, function: Any, prefix: str, public: set[str]) -> bool:
    if name in _NAMES or (name not in public and name.endswith(_ALIASES)):
        return False
    home = function.__module__ or ""
    if prefix in COLLECTIVES:
        return "comm_func" in home or "distributed" in home
    return name == "stop_gradient" or not home.endswith(_NO_OPERATIONS)
