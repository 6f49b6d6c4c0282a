"""Functions replaced by wrappers, as `torch.jit.script` allows it."""

from __future__ import annotations

from types import FunctionType
from typing import Any, get_type_hints

from torch.jit import _builtins as _script

from msprobe_integrations.patching import Patches


class Rebinding(Patches):
    """Wrappers in place of functions of torch, numpy and random, which scripts that are compiled may call."""

    def __init__(self) -> None:
        super().__init__("torch", "torch_npu", "numpy", "random", "builtins")
        self._scripted: list[int] = []

    def undo(self) -> None:
        super().undo()
        for key in self._scripted:
            _script._get_builtin_table().pop(key, None)
        self._scripted.clear()

    def handle_replacement(self, original: Any, wrapper: Any) -> None:
        """``torch.jit.script`` knows functions by identity; a wrapper that takes any argument could not be compiled."""
        operator = _script._find_builtin(original)
        if operator is not None:
            _script._register_builtin(wrapper, operator)
            self._scripted.append(id(wrapper))
        elif "__original_fn" not in vars(wrapper):
            compiled_as(wrapper, original)


def compiled_as(wrapper: Any, function: Any) -> Any:
    """Let ``torch.jit.script`` compile `function` where it meets `wrapper`; returns `wrapper`. A function whose annotations name what is
    imported for type checkers alone cannot be compiled, with or without a wrapper."""
    if function.__name__ != wrapper.__name__:  # the compiler wants one name for both
        try:
            hints, code = get_type_hints(function), function.__code__
        except (NameError, AttributeError, TypeError, SyntaxError):
            return wrapper
        function = FunctionType(code, function.__globals__, wrapper.__name__, function.__defaults__, function.__closure__)
        function.__annotations__ = hints
    vars(wrapper).update({"__script_if_tracing_wrapper": True, "__original_fn": function})
    return wrapper
