"""Modules and functions whose inside no Python hook sees: `torch.compile`, TorchScript.

A compiled module is recorded at its boundary: hooks stand on what the user calls, none inside. A function mode on the stack is one of
the things compiled code is guarded by: it would be compiled again when the window opens. Hooks that are there while a module is
compiled become a part of the code: it would be compiled again when the window closes. `CompiledCode` therefore takes the mode off while
compiled code runs, and all hooks while code is compiled, also for what has no boundary that we know (compiled functions, a compiled
model of which only the inside was given to us).
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_integrations.patching import FunctionPatch, shared_patch
from msprobe_integrations.torch.capture import mode_stack as modestack
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.hooks.graphed import is_graphed, say_silent

_log = get_logger()
_is_compiling = torch.compiler.is_compiling
ORIGINAL = "_orig_mod"
"""Name under which `torch.compile(module)` keeps the module."""
_ENTRY = "_maybe_set_eval_frame"
_COMPILED_NODE = "CompiledFunctionBackward"
_NOTHING = object()
_APPLY = ("apply", "apply_boxed")


def is_wrapper(module: nn.Module) -> bool:
    """Is it what ``torch.compile(module)`` returns?"""
    return ORIGINAL in module._modules and hasattr(module, "_torchdynamo_orig_callable")


def has_call_boundary(module: nn.Module) -> bool:
    """Is it a module whose hooks would be compiled (``module.compile()``), or one that takes none (TorchScript, CUDA graphs)?"""
    if is_graphed(module):
        return True
    call = getattr(module, "_compiled_call_impl", None)
    return isinstance(module, torch.jit.ScriptModule) or getattr(call, "inside", call) is not None  # `Entry` stands there, too


def class_name(module: nn.Module) -> str:
    """The class of a module in record names; for TorchScript that of what was scripted."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(getattr(module, "original_name", type(module).__name__))
    return type(module).__name__


def shown_path(path: str) -> str:
    """A module path as it is without compilation."""
    return ".".join(part for part in path.split(".") if part != ORIGINAL) if ORIGINAL in path else path


class CallBoundary:
    """Calls `before` and `after` around the call of a module that takes no hooks (TorchScript, CUDA graphs), or has its hooks compiled
    (``module.compile()``), until `remove`."""

    def __init__(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        if is_graphed(module):
            say_silent([module])
        self._module = module
        self._before = module.__dict__.get("_compiled_call_impl", _NOTHING)
        compiled: Any = module._call_impl if self._before in (None, _NOTHING) else self._before

        def call(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling():
                return compiled(*args, **kwargs)
            before(module, args, kwargs)
            try:
                result = compiled(*args, **kwargs)
            except BaseException:
                after(module, args, kwargs, None)
                raise
            after(module, args, kwargs, result)
            return result

        earlier = getattr(self._before, "around", None)

        def around(run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before(module, args, kwargs)
            try:
                result = run() if earlier is None else earlier(run, args, kwargs)
            except BaseException:
                after(module, args, kwargs, None)
                raise
            after(module, args, kwargs, result)
            return result

        call.around = around  # type: ignore[attr-defined]  # for who calls a replay in place of the module
        self._call = call
        module.__dict__["_compiled_call_impl"] = call

    def remove(self) -> None:
        """Leave the module as it was, unless somebody has put something else there."""
        if self._module.__dict__.get("_compiled_call_impl") is not self._call:
            return
        if self._before is _NOTHING:
            del self._module.__dict__["_compiled_call_impl"]
        else:
            self._module.__dict__["_compiled_call_impl"] = self._before


class Hooks(Protocol):
    """What `CompiledCode` needs of the module capture."""

    def hide(self) -> None: ...

    def show(self) -> None: ...

    def seal(self, module: nn.Module) -> None: ...

    def hook_codes(self) -> list[CodeType]: ...


class CompiledCode:
    """Knows when compiled code runs on a thread, and keeps the capture out of it.

    Args:
        api: the capture of the level, None at L0.
        modules: the hooks of the level, None at L1.
        fail: told about a fault in here.

    Attributes:
        seen: compiled code ran while the window was open.
    """

    def __init__(self, api: ApiCapture | None, modules: Hooks | None, fail: Callable[[Exception], None]) -> None:
        self._api = api
        self._modules = modules
        self._fail = fail
        self._compiling = 0
        self._local = threading.local()
        self._frame: Any = None
        self._patches: list[tuple[FunctionPatch, Any]] = []
        self._callbacks: Any = None
        self.seen = False
        self._running = 0

    @property
    def inside(self) -> bool:
        """Does this thread run compiled code?"""
        return self._running > 0 and getattr(self._local, "at", None) is not None

    def install(self) -> None:
        """Watch the entry to compiled code. Without a compiler in the process there is none."""
        frame = sys.modules.get("torch._dynamo.eval_frame")
        if self._frame is not None or frame is None or not hasattr(frame, _ENTRY):
            return
        self._frame = frame
        self._patches = [(shared_patch(frame, _ENTRY), self._set_callback)]
        if self._api is not None:
            self._patches += [
                (shared_patch(BackwardCFunction, name), self._apply_outside) for name in _APPLY if name in vars(BackwardCFunction)
            ]
        for patch, handler in self._patches:
            patch.add(handler)
        if self._modules is not None and hasattr(frame, "skip_code"):
            for code in self._modules.hook_codes():
                frame.skip_code(code)
        self._callbacks = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if self._callbacks is not None:
            self._callbacks.register_start_callback(self._compilation_begins)
            self._callbacks.register_end_callback(self._compilation_ends)

    def remove(self) -> None:
        """Leave the entry as it was."""
        for patch, handler in self._patches:
            patch.discard(handler)
        if self._callbacks is not None:
            for registered, ours in (
                (self._callbacks.remove_start_callback, self._compilation_begins),
                (self._callbacks.remove_end_callback, self._compilation_ends),
            ):
                with contextlib.suppress(ValueError):  # the compiler was reset meanwhile
                    registered(ours)
        self._frame = self._callbacks = None
        self._patches = []

    def _compilation_begins(self, _: Any = None) -> None:
        self._compiling += 1
        if self._compiling == 1 and self._modules is not None:
            self._modules.hide()

    def _compilation_ends(self, _: Any = None) -> None:
        self._compiling -= 1
        if self._compiling == 0 and self._modules is not None:
            self._modules.show()

    def _set_callback(self, original: Any, callback: Any) -> Any:
        """Torch calls this with the compiler before compiled code runs on this thread, and with what was before afterwards, both times
        in the frame of the call. Code that is not compiled inside of compiled code switches it off and on, too."""
        caller, inside = None, self.inside
        try:
            caller = _beyond(sys._getframe(1))
            if callable(callback) and not inside:
                self._enter(caller)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
        result = original(callback)  # from here on a function of ours would be compiled
        if inside and self._local.caller == id(caller):
            try:
                self._leave()
            except Exception as error:
                raise_of_training(error)
                self._fail(error)
        return result

    def _apply_outside(self, original: Any, node: Any, *args: Any) -> Any:
        """``apply`` of a node: that of compiled code runs unseen."""
        if self._api is None or type(node).__name__ != _COMPILED_NODE:
            return original(node, *args)
        with self._api.aside():
            return original(node, *args)

    def _enter(self, caller: FrameType) -> None:
        self._running += 1
        self._local.at = -1
        self._local.caller = id(caller)
        if self._modules is not None:
            module = _target(caller.f_locals.get("fn"))
            if module is not None:
                self._modules.seal(module)
        if self._api is not None and self._api.installed:
            self._local.at = modestack.take_out(self._api)
            self._api.away(True)
        if not self.seen:
            self.seen = True
            _log.warning(
                "torch.compile: compiled code runs while it is dumped. Records end at its boundary (modules that were compiled, calls "
                "around compiled functions); what happens inside is not seen. Run without torch.compile to see it"
            )

    def _leave(self) -> None:
        self._running -= 1
        at, self._local.at = self._local.at, None
        if self._api is not None:
            self._api.away(False)
            if at >= 0 and self._api.installed:
                modestack.insert(self._api, at)


def _target(function: Any) -> nn.Module | None:
    """The module whose call was compiled; None for a function."""
    for found in (getattr(function, "__self__", None), getattr(function, "__wrapped__", None)):
        if isinstance(found, nn.Module):
            return found
    return None


_BETWEEN = (FunctionPatch.add.__code__.co_filename, is_wrapper.__code__.co_filename)


def _beyond(frame: FrameType) -> FrameType:
    """The frame of the call itself, outside of the patch and of other captures behind it."""
    while frame.f_back is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame
