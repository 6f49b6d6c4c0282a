"""From the name of a record back to the torch function: ``Functional.linear.0`` -> ``torch.nn.functional.linear``.

A dump is not trusted. Only functions that torch itself lists as operations on tensors (`torch.overrides.get_overridable_functions`),
a fixed list of functions that make tensors, operators of ``torch.ops`` that take tensors and no text, and what the user has registered
(`custom`) are found: none that reads a file, unpickles, compiles or loads anything.

Moves of tensors to a device (``x.to("cuda:1")``, ``x.npu()``): each side of a check has one device, and there they change nothing.

What such a call does besides, the cast to another type, is done and checked.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.overrides import get_overridable_functions

from msprobe_engine.core.operator_traits import UNINITIALISED
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun
from msprobe_integrations.torch.op_tools.accuracy.operators.custom import Custom, custom, formula
from msprobe_integrations.torch.op_tools.accuracy.references.formula import with_known_arguments
from msprobe_integrations.torch.randomness.calls import TENSOR, TORCH

Function = Callable[..., Any]

_NOT = frozenset(
    (
        *("from_file", "load", "save", "register_hook", "register_post_accumulate_grad_hook", "backward", "share_memory_"),
        *("requires_grad_", "numpy", "set_", "record_stream", "_print", "warn", "set_data", "__dlpack__", "__array__", "__reduce_ex__"),
    )
)
"""Listed as operations, and no computation (or ones that touch files)."""
_OPERATORS = frozenset(dir(operator)) | {f"__{prefix}{name.strip('_')}__" for name in dir(operator) for prefix in ("", "r", "i")}
_VALUES = frozenset(("__bool__", "__float__", "__int__", "__complex__", "__len__"))
"""Methods of tensors that give a value of Python."""
_SPACES: dict[str, Any] = {"Functional": torch.nn.functional, "Torch": torch, "Tensor": torch.Tensor, "VF": torch._VF}
_PARTS = ("linalg", "fft", "special")
"""Modules of torch whose functions are recorded as ``Torch.<name>``, or ``Torch.linalg.<name>``."""
_MAKERS = frozenset(
    (
        *("arange", "range", "linspace", "logspace", "eye", "full", "zeros", "ones", "tril_indices", "triu_indices", "tensor", "vander"),
        *("as_tensor", "scalar_tensor", "bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window", "fill"),
    )
)
_METHODS = frozenset(("new_zeros", "new_ones", "new_full", "new_tensor"))
"""Methods of tensors that make tensors."""
_RANDOM = frozenset((*TORCH, *TENSOR, "gumbel_softmax", "fractional_max_pool2d", "fractional_max_pool3d"))
_UNLISTED = frozenset(("as_strided", "as_strided_", "segment_reduce", "zero_", "fill_"))
"""Functions of torch that torch's own list of operations does not have."""
_MAY_DRAW = frozenset(("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu"))
_EMPTY = UNINITIALISED | {"resize_", "resize_as_"}
COMMUNICATION = frozenset(("Distributed", "MintDistributed", "c10d", "_c10d_functional"))
_NO_LIBRARIES = frozenset(
    ("aten", "prims", "prim", "profiler", "c10d", "c10d_functional", "_c10d_functional", "inductor", "debugprims", "rngprims")
)
MODULES = frozenset(("Module", "Cell", "Primitive"))


_WORDS = frozenset(
    (
        *("reduce", "activation", "algorithm", "padding_side", "norm", "approximate", "mode", "pad_mode", "ord", "rounding_mode"),
        *("interpolation", "driver", "p", "UPLO", "side", "padding", "equation", "indexing"),
    )
)
"""Arguments of torch's own operators that are text: what is to be computed ("sum", "trunc"). Any other text may name a file, or code."""


class Operator(NamedTuple):
    """What a record is run by.

    Attributes:
        name: of the record without its number, ``"Torch.matmul"``.
        api: its last part, ``"matmul"``.
        functions: what may have been meant, the most probable first (``Torch.norm`` is ``torch.norm`` or ``torch.linalg.norm``). Empty:
            there is nothing here that could be run.
        reference: what the bench runs in its place; None: the same.
        inputs: registered for drawn arguments.
    """

    name: str
    api: str
    functions: tuple[Function, ...]
    reference: Function | None = None
    inputs: Callable[..., Any] | None = None


@lru_cache(maxsize=1)
def _collect_operation_ids() -> frozenset[int]:
    """Identities of all functions that are operations; they live as long as torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return frozenset(id(function) for functions in get_overridable_functions().values() for function in functions)


@lru_cache(maxsize=4096)
def _find_functions(base: str) -> tuple[Function, ...]:
    kind, _, api = base.partition(".")
    last = api.rpartition(".")[2]
    if not all(part.isidentifier() for part in api.split(".")) or last in _NOT:
        return ()
    if kind == "Aten":
        return _find_aten_operator(api)
    if kind == "NPU":
        return _find_npu_function(api) or _find_library_operator("npu", api)
    space = _SPACES.get(kind)
    if space is None and kind not in _NO_LIBRARIES:
        return _find_library_operator(kind, api)
    if kind == "Tensor" and api in MOVES:
        return (MOVES[api],)
    if space is None or (last.startswith("__") and last not in _OPERATORS and not (kind == "Tensor" and api in _VALUES)):
        return ()
    if kind == "Torch":
        part, _, name = api.rpartition(".")
        if part and part not in _PARTS:
            return ()
        spaces = [getattr(torch, part)] if part else [torch, *(getattr(torch, p) for p in _PARTS)]
        made: list[Any] = [getattr(s, name, None) for s in spaces]
        functions: list[Function] = [
            f for f in made if _is_operation(f) or (f is not None and not part and (name in _MAKERS or _is_unlisted(name)))
        ]
        # what torch.special and torch.fft have under a name of torch is the same thing; what torch.linalg has is not always
        return tuple(f for n, f in enumerate(functions) if n == 0 or (getattr(torch.linalg, name, None) is f and f is not functions[0]))
    if "." in api:
        return ()
    function = getattr(torch, api, None) if kind == "VF" else getattr(space, api, None)  # VF: the functions behind torch's own
    known = _is_operation(function) or (kind == "Tensor" and callable(function) and (_is_operator(api) or api in _METHODS | _VALUES))
    if function is not None and (known or (kind == "Functional" and _is_functional(api, function))):
        return (function,)
    behind = getattr(torch._C._nn, api, None) if kind == "Functional" and function is None else None  # flatten_dense_tensors
    return (behind,) if behind is not None and _find_aten_operator(api) else ()


def _is_unlisted(name: str) -> bool:
    """Is it one of torch's functions that are operators of aten and that torch does not list: private ones (``torch._scaled_mm``), forms
    in place of what is listed (``torch.relu_``), and a few more?"""
    if name.startswith("__") or not hasattr(torch._C._VariableFunctions, name) or not _find_aten_operator(name):
        return False
    in_place = name.endswith("_") and _is_operation(getattr(torch, name[:-1], None)) and name[:-1] not in _MAY_DRAW
    return name.startswith("_") or name in _UNLISTED or in_place


def _is_operation(function: Any) -> bool:
    return callable(function) and not isinstance(function, type) and id(function) in _collect_operation_ids()


def _is_functional(name: str, function: Any) -> bool:
    """A few functions of torch.nn.functional (hardswish, upsample_bilinear) are missing in torch's own list."""
    return isinstance(function, FunctionType) and function.__module__ == torch.nn.functional.__name__ and not name.startswith("_")


def _is_operator(name: str) -> bool:
    """Operators of tensors are methods that are made anew for each look; all of them are operations."""
    return name in _OPERATORS and name.startswith("__")


def _find_aten_operator(api: str) -> tuple[Function, ...]:
    name, _, overload = api.partition(".")
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket) or (overload and overload not in packet.overloads()):
        return ()
    taken = _list_arguments(packet)
    if any(argument not in _WORDS for argument, kind in taken if "str" in kind):
        return ()
    if not any("Tensor" in kind for _, kind in taken) and name not in _MAKERS:
        return ()
    return (getattr(packet, overload) if overload else packet,)


def _find_library_operator(space: str, api: str) -> tuple[Function, ...]:
    """An operator that a library has registered with torch, when this process has loaded it. None with text among its arguments: those
    may be names of files."""
    packet = getattr(getattr(torch.ops, space, None), api, None) if space.isidentifier() and not space.startswith("_") else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    kinds = [kind for _, kind in _list_arguments(packet)]
    return (packet,) if any("Tensor" in kind for kind in kinds) and not any("str" in kind for kind in kinds) else ()


def _list_arguments(packet: Any) -> list[tuple[str, str]]:
    """Names and types of the arguments of all overloads of an operator."""
    return [(argument.name, str(argument.type)) for each in packet.overloads() for argument in getattr(packet, each)._schema.arguments]


def _find_npu_function(api: str) -> tuple[Function, ...]:
    module = sys.modules.get("torch_npu")
    function = getattr(module, api, None)
    public = api.startswith(("npu_", "_npu")) or api in ("fast_gelu", "one_")
    return (function,) if public and callable(function) and not isinstance(function, type) else ()


def find(record: str) -> Function | None:
    """The function of a forward record of an API (``Torch.matmul.0.forward``); None when it is not known or no operation on tensors."""
    parts = record.split(".")
    if len(parts) < 4 or parts[-1] != "forward":
        return None
    found = _find_functions(".".join(parts[:-2]))
    return found[0] if found else None


def is_api(record: str) -> bool:
    """Is this a forward call of an API: ``{type}.{name}.{number}.forward``, neither a module nor communication?"""
    parts = record.split(".")
    return len(parts) >= 4 and parts[-1] == "forward" and parts[0] not in MODULES and parts[0] not in COMMUNICATION


def resolve(name: str, reference: Callable[[str], Function | None] = lambda _: None) -> Operator:
    """What the calls ``{name}.{N}`` are run by.

    Args:
        name: without a number, ``"Torch.matmul"``.
        reference: finds a formula for the bench by such a name.

    Raises:
        CannotRun: they are not to be run; why.
    """
    kind, _, _ = name.partition(".")
    api = name.rpartition(".")[2]
    registered = custom(name) or Custom(None, None, None)
    if registered.function is None and registered.reference is None:
        if kind in COMMUNICATION:
            raise CannotRun("communication: other ranks take part in it")
        if kind in MODULES:
            raise CannotRun("a module, no API")
        if api in _RANDOM or _draws_random_numbers(kind, api):
            raise CannotRun("draws random numbers: no two devices draw the same")
        if api in _EMPTY:
            raise CannotRun("gives memory that nobody has written to: there is nothing to compare")
    functions = (registered.function,) if registered.function is not None else _find_functions(name)
    known = registered.reference
    if known is None and (kind in ("NPU", "Aten", "MindSpeed") or not functions):
        known = formula(api) or reference(name)
    if not functions and known is None:
        raise CannotRun(_unknown(kind, name, api))
    return Operator(name, api, functions, None if known is None else with_known_arguments(api, known), registered.inputs)


def _unknown(kind: str, name: str, api: str) -> str:
    if kind == "NPU" and "torch_npu" not in sys.modules:
        return f"{api} is an operator of torch_npu, which is not here, and there is no formula for it; register_operator('{name}', ...)"
    if kind not in (*_SPACES, "Aten", "NPU"):
        return f"{name} is no operator of torch; register_operator('{name}', ...) says how it is run"
    if api in _NOT:
        return f"{api} computes nothing"
    return f"torch {torch.__version__} has no operator {name}"


def _draws_random_numbers(kind: str, api: str) -> bool:
    """Does torch itself say of this operator that it draws? What draws only with some arguments (dropout) is told by those."""
    if kind != "Aten" or "dropout" in api or "attention" in api or api.startswith(("lstm", "gru", "rnn", "rrelu", "_cudnn_rnn")):
        return False
    packet = getattr(torch.ops.aten, api, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, each).tags for each in packet.overloads())


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.Tensor.to`; a device, by name or number, is that of the tensor."""
    if args and (isinstance(args[0], str) or type(args[0]) is int):
        args = (tensor.device, *args[1:])
    if kwargs.get("device") is not None:
        kwargs["device"] = tensor.device
    return tensor.to(*args, **kwargs)


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`torch.Tensor.type`; of ``"torch.cuda.HalfTensor"`` the last word counts."""

    def here(kind: Any) -> Any:
        if not isinstance(kind, str):
            return kind
        device = "" if tensor.device.type == "cpu" else f"{tensor.device.type}."
        return f"torch.{device}{kind.rpartition('.')[2]}"

    if "dtype" in kwargs:
        kwargs["dtype"] = here(kwargs["dtype"])
    return tensor.type(*map(here, args[:1]), *args[1:], **kwargs)


def _same(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    del args, kwargs
    return tensor.view_as(tensor)


MOVES: Mapping[str, Callable[..., Any]] = {"to": _to, "type": _type, **dict.fromkeys(("cuda", "npu", "xpu", "mps", "hpu", "mtia"), _same)}
"""Methods of tensors that may name a device, and what is run in their place."""
