"""Which name a torch callable has in records: ``Functional.linear``, ``Tensor.__matmul__``, ``Torch.norm``.

Prefixes and names follow the existing dump format (spec of record names): the last segment of the public name, methods that were
called through an operator under the operator's name.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.nn import functional

from msprobe_engine.core.names import OPERATOR_SPACES
from msprobe_engine.core.operator_traits import NO_OPERATIONS

COMPOSED = frozenset(
    function
    for name in ("__rdiv__", "__rtruediv__", "__rfloordiv__", "__rmatmul__")
    if hasattr(function := getattr(torch.Tensor, name, None), "__wrapped__")
)
"""Operators written in Python that the existing format shows by what they call: ``1 / x`` is a reciprocal and a multiplication."""

_OPERATORS: dict[str, tuple[str, str]] = {
    "+": ("__add__", "add"),
    "-": ("__sub__", "sub"),
    "*": ("__mul__", "mul"),
    "/": ("__truediv__", "div"),
    "//": ("__floordiv__", "floor_divide"),
    "%": ("__mod__", "remainder"),
    "**": ("__pow__", "pow"),
    "@": ("__matmul__", "matmul"),
    "&": ("__and__", "__and__"),
    "|": ("__or__", "__or__"),
    "^": ("__xor__", "__xor__"),
    "+=": ("__iadd__", "add_"),
    "-=": ("__isub__", "sub_"),
    "*=": ("__imul__", "mul_"),
    "/=": ("__itruediv__", "div_"),
    "//=": ("__ifloordiv__", "floor_divide_"),
    "%=": ("__imod__", "remainder_"),
    "**=": ("__ipow__", "pow_"),
    "<": ("__lt__", "lt"),
    "<=": ("__le__", "le"),
    "==": ("__eq__", "eq"),
    "!=": ("__ne__", "ne"),
    ">": ("__gt__", "gt"),
    ">=": ("__ge__", "ge"),
}
# Python 3.10 has one opcode per operator; from 3.11 on BINARY_OP names it in its argument.
_OPCODES_310 = {
    "ADD": "+", "SUBTRACT": "-", "MULTIPLY": "*", "TRUE_DIVIDE": "/",
    "FLOOR_DIVIDE": "//", "MODULO": "%", "POWER": "**", "MATRIX_MULTIPLY": "@",
}  # fmt: skip
_UNARY = {"UNARY_NEGATIVE": ("neg", "__neg__"), "UNARY_POSITIVE": ("positive", "__pos__"), "UNARY_INVERT": ("bitwise_not", "__invert__")}
_COMPARED = frozenset(("lt", "le", "eq", "ne", "gt", "ge"))
_DUNDERS = {"true_divide": "__truediv__", "true_divide_": "__itruediv__"} | {m: d for d, m in _OPERATORS.values()}
_NAMED = frozenset(("sigmoid", "tanh"))
_FUNCTIONAL_CALLERS = {getattr(functional, name).__code__: name for name in _NAMED if isinstance(getattr(functional, name), FunctionType)}
_ASKED = frozenset(_DUNDERS) | {method for method, _ in _UNARY.values()} | _NAMED


_VF = frozenset(("lstm",))  # nn.LSTM calls torch._VF.lstm; the same object is torch.lstm


class ApiNames:
    """Names of torch callables, resolved once each."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[str, str] | None] = {}
        self._sites: dict[tuple[CodeType, int, str], tuple[str, str]] = {}

    def resolve(self, func: Callable[..., Any]) -> tuple[str, str] | None:
        """(prefix, api) of `func`, None for what is no operation on data."""
        try:
            return self._known[func]
        except KeyError:
            found = self._known[func] = self._search(func)
            return found
        except TypeError:  # unhashable callable
            return self._search(func)

    def find_call_name(self, prefix: str, api: str, caller: FrameType) -> tuple[str, str]:
        """(prefix, api) by how it was called: ``x * y`` is ``Tensor.__mul__``, ``x.mul(y)`` is ``Tensor.mul``; the functions of
        ``torch.nn.functional`` that only call a method are themselves; ``torch.conv1d`` is no ``functional.conv1d``, though both are
        one function."""
        if prefix == "Tensor" and api not in _ASKED:
            return prefix, api
        site = (caller.f_code, caller.f_lasti, api)
        try:
            return self._sites[site]
        except KeyError:
            found = self._sites[site] = _called_at(caller, api) if prefix == "Tensor" else (_space_at(caller, api), api)
            return found

    def _search(self, func: Callable[..., Any]) -> tuple[str, str] | None:
        name = getattr(func, "__name__", None) or type(func).__name__
        if name in NO_OPERATIONS or (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
            return None  # collectives are seen at their dispatch key, once, with their outputs
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            packet = func.overloadpacket if isinstance(func, torch._ops.OpOverload) else func
            space, _, op = packet._qualified_op_name.partition("::")
            if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler"):
                return None
            return OPERATOR_SPACES.get(space, space), op
        owner = getattr(func, "__objclass__", None)
        if owner is not None and issubclass(owner, torch._C.TensorBase):
            return "Tensor", name
        if func in _FUNCTIONAL:
            return "Functional", _FUNCTIONAL[func]
        if name in _VF:
            return "VF", name
        if getattr(torch.Tensor, name, None) is func:
            return "Tensor", name
        if func in _RENAMED:
            return "Tensor", _RENAMED[func]
        if getattr(torch, name, None) is func:
            return "Torch", name
        if getattr(torch._C._VariableFunctions, name, None) is func:  # also when something wraps torch.<name>
            return "Torch", name
        module = getattr(func, "__module__", None) or ""
        for space in ("linalg", "fft", "special"):
            if module in (f"torch._C._{space}", f"torch.{space}"):
                return "Torch", name.removeprefix(f"{space}_")
        if module.partition(".")[0] == "torch_npu":
            return "NPU", name
        if module.startswith("torch.nn.functional") or module == "torch._C._nn":
            return "Functional", name
        if module.startswith("torch"):
            return "Torch", name
        return module or "Unknown", name


def _called_at(frame: FrameType, api: str) -> tuple[str, str]:
    if api in _NAMED:
        function = _FUNCTIONAL_CALLERS.get(frame.f_code)
        return ("Tensor", api) if function is None else ("Functional", function)
    instruction = next((i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti), None)
    if instruction is None:
        return "Tensor", api
    dunder = _DUNDERS.get(api)
    symbol = _symbol(instruction)
    if symbol in _OPERATORS:
        name, method = _OPERATORS[symbol]
        if instruction.opname == "COMPARE_OP" and api in _COMPARED:  # `2 < x` asks x.__gt__(2)
            return "Tensor", dunder or api
        return "Tensor", name if method in (api, "div" + api.removeprefix("true_divide")) else api
    method, unary = _UNARY.get(instruction.opname, ("", ""))
    if method == api:
        return "Tensor", unary
    if dunder is not None and api not in frame.f_code.co_names:  # called by sum(), map(), operator.mul: there is no `.mul` here
        return "Tensor", dunder
    return "Tensor", api


def _space_at(frame: FrameType, api: str) -> str:
    loaded = {False: False, True: False}
    before = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.argval == api and instruction.opname.startswith("LOAD_"):
            loaded[instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and before == "torch"] = True
        before = instruction.argval
    return "Torch" if loaded[True] and not loaded[False] else "Functional"


def _symbol(instruction: dis.Instruction) -> str:
    if instruction.opname in ("BINARY_OP", "COMPARE_OP"):
        # 3.13 prints `bool(<)` for comparisons whose result is used as a condition
        return instruction.argrepr.removeprefix("bool(").removesuffix(")")
    if sys.version_info < (3, 11):
        kind, _, op = instruction.opname.partition("_")
        if kind in ("BINARY", "INPLACE") and op in _OPCODES_310:
            return _OPCODES_310[op] + ("=" if kind == "INPLACE" else "")
    return ""


_FUNCTIONAL: dict[Any, str] = {
    function: name
    for name, function in sorted(vars(functional).items(), key=lambda item: not item[0].startswith("_"))  # public names win
    if callable(function) and not isinstance(function, type)
}
_RENAMED = {f: name for name, f in vars(torch.Tensor).items() if isinstance(f, FunctionType) and f.__name__ != name}
TWICE = frozenset(name for function, name in _FUNCTIONAL.items() if getattr(torch, name, None) is function)
"""Functions that are one object in ``torch`` and in ``torch.nn.functional``."""
