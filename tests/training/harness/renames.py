"""Another version of a framework, made in the process: an attribute gets another name in all of its code, classes and modules.

Instructions name attributes in ``co_names``, so a function is renamed by replacing that table in its code; what is looked up by a text
(``hasattr(x, "name")``) by replacing the constant. Functions inside of decorators are found through closures.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from typing import Any

KEYS = {"optimizer", "monitor", "gradient_clipping", "module", "loss_scale", "step", "overflow"}
"""Names that are keys of configurations or checkpoints, too: their texts stay."""


def rename(old: str, new: str, package: str = "deepspeed") -> None:
    """Call `old` by the name `new` everywhere in a package."""
    texts = old not in KEYS
    users = _users(package)
    users[new] = users.get(old, [])
    for function in users[new]:
        code = _code(function.__code__, old, new, texts)
        if code is not function.__code__:
            function.__code__ = code
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for thing in [*vars(module).values(), module]:
                own = thing is module or (isinstance(thing, type) and str(thing.__module__).startswith(package))
                if own and old in vars(thing):
                    setattr(thing, new, vars(thing)[old])
                    delattr(thing, old)


@functools.cache
def functions(package: str) -> list[types.FunctionType]:
    """All of a package, also those inside of decorators. Who forks calls it before."""
    gc.unfreeze()  # other tests have put what was imported out of sight
    everything = [thing for thing in gc.get_objects() if type(thing) is types.FunctionType]  # a dead weakref.proxy has no class
    return [function for function in everything if str(function.__module__).startswith(package)]


@functools.cache
def _users(package: str) -> dict[str, list[types.FunctionType]]:
    """Name -> functions of a package in whose code it is."""
    found: dict[str, list[types.FunctionType]] = {}
    for function in functions(package):
        for name in _names(function.__code__):
            found.setdefault(name, []).append(function)
    return found


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    return {*code.co_names, *(value for value in code.co_consts if isinstance(value, str))}.union(*inner)


def _code(code: types.CodeType, old: str, new: str, texts: bool) -> types.CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _code(value, old, new, texts)
        return new if texts and isinstance(value, str) and value == old else value

    names = tuple(new if name == old else name for name in code.co_names)
    constants = tuple(constant(value) for value in code.co_consts)
    same = names == code.co_names and all(a is b for a, b in zip(constants, code.co_consts))
    return code if same else code.replace(co_names=names, co_consts=constants)
