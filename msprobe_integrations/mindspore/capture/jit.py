"""Compiled functions (``@mindspore.jit``) in the dynamic graph: one record ``Jit.{function or Cell class}.{N}`` per call.

What runs inside is compiled and called by nobody; what a function in the mode ``bytecode`` still does in Python belongs to its call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mindspore import nn

from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.capture.api import ApiCapture, Note
from msprobe_integrations.patching import FunctionPatches

_PLACES = ("mindspore.graph._utils.pijit_context", "mindspore.common._pijit_context")
"""Where the mode ``bytecode`` is; the first that exists, from 2.9 on the second is only an alias."""


def _module() -> Any:
    for place in _PLACES:
        try:
            return importlib.import_module(place)
        except ImportError:
            continue
    return None


_bytecode: Any = _module()


class JitCapture:
    """Sees calls of compiled functions while it is installed."""

    def __init__(self, api: ApiCapture) -> None:
        self._api = api
        self._patches = FunctionPatches()
        self._given: tuple[Any, Any] = ((), {})
        self._open: list[Note | None] = []

    def install(self) -> None:
        """Start seeing calls; nothing happens when it has begun."""
        if self._patches:
            return
        executor = getattr(environment.api_module(), "_JitExecutor", None)
        if executor is not None:
            self._patches.add(executor, "__call__", self._called)
        if _bytecode is not None:
            self._patches.add(_bytecode, "PreJit", self._arguments)
            self._patches.add(_bytecode.PIJitCaptureContext, "__enter__", self._enter)
            self._patches.add(_bytecode.PIJitCaptureContext, "__exit__", self._exit)

    def remove(self) -> None:
        self._patches.close()
        self._open.clear()

    def _called(self, following: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
        api = self._api
        if not api.sees():
            return following(executor, *args, **kwargs)
        owner = executor.obj
        skip = 1 if owner is None or not args or args[0] is not owner else 2
        return api.around("Jit", _name(executor.fn, owner), following, (executor, *args), kwargs, skip=skip)

    # mode bytecode: PreJit(args, kwargs), __enter__, the function, __exit__

    def _arguments(self, following: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._given = (args, kwargs)
        return following(args, kwargs)

    def _enter(self, following: Callable[..., Any], context: Any) -> Any:
        (args, kwargs), self._given = self._given, ((), {})
        note = None
        if self._api.sees():
            owner = args[0] if args and isinstance(args[0], nn.Cell) else None
            note = self._api.begin("Jit", _name(context.fn, owner), args[1:] if owner is not None else args, kwargs)
        self._open.append(note)
        return following(context)

    def _exit(self, following: Callable[..., Any], context: Any, kind: Any, error: Any, trace: Any) -> Any:
        result = following(context, kind, error, trace)
        note = self._open.pop() if self._open else None
        if note is not None:
            self._api.end(note, None if kind is not None else context.ret, failed=kind is not None)
        return result


def _name(function: Any, owner: Any) -> str:
    return type(owner).__name__ if isinstance(owner, nn.Cell) else str(getattr(function, "__name__", "function"))
