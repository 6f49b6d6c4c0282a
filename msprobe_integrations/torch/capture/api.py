"""API level (L1): every torch call of the training thread, by a `TorchFunctionMode`.

A mode sees calls below the Python names, so there is no list of functions and ``from torch import matmul`` before the probe was
built does not escape. Nested calls of a composite function are its own business, as in the existing format: only the outermost is an
entry. Calls of custom ``autograd.Function`` classes are no torch functions; they are seen through `_SingleLevelFunction`, the class
below ``Function`` in the method resolution order, so bound methods taken earlier (``f = MyFunction.apply``) are seen too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import function as autograd_function
from torch.overrides import TorchFunctionMode

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.records import NODE_ONLY, Entry
from msprobe_integrations.common.capture.calls import ALWAYS, Call
from msprobe_integrations.common.capture.custom_api import record_call
from msprobe_integrations.common.capture.recorder import ALL_READ
from msprobe_integrations.common.hooks import recursion_room
from msprobe_integrations.patching import FunctionPatch
from msprobe_integrations.torch.capture import mode_stack as modestack
from msprobe_integrations.torch.capture import operator_libraries
from msprobe_integrations.torch.capture.api_names import COMPOSED, TWICE, ApiNames
from msprobe_integrations.torch.capture.call_form import as_called
from msprobe_integrations.torch.capture.optimizer_calls import OptimizerCalls
from msprobe_integrations.torch.capture.recorder import Recorder
from msprobe_integrations.torch.capture.triton_launches import TritonLaunches, tensors_given
from msprobe_integrations.torch.hooks.frames import PLAIN, called_internally, kinds
from msprobe_integrations.torch.tensors.containers import tensors_in
from msprobe_integrations.torch.tensors.host_copies import CALLS as COPIES
from msprobe_integrations.torch.tensors.uninitialized_memory import ignored_argument, raw_results
from msprobe_integrations.torch.tensors.unversioned_mutations import NAMES, OPERATORS, written_arguments, written_silently

_DEPTH = 3  # recorder.begin_call, begin_call, handler
_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_autograd: Any = torch.autograd  # its engine function is not exported
_compiling = torch.compiler.is_compiling
_PLUMBING = (
    "torch.nn.modules._functions",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.distributed.fsdp",
    "torch._functorch",
    "torch._library",
)
_REFLECTED = {"__radd__": "add", "__rmul__": "mul", "__ror__": "bitwise_or", "__rxor__": "bitwise_xor"}
"""``2 * x`` and ``x * 2`` are one function below their names: which it was is only known here."""


_AS_IT_IS, _ALIAS, _COMPOSED, _UNRECORDED = range(4)
"""What becomes of a call: nothing is noted of it; it gives another name for the memory of a tensor; it is seen by what it calls; it runs
between `begin_call` and `end_call`, or without a record of its own."""


class ApiCapture(TorchFunctionMode):
    """The mode; `install` and `remove` put it on this thread's stack and take it off.

    Args:
        is_on: one cheap call that says whether the current moment is inside the capture window.
        origins: finds calls of optimizers and of gradient clipping; None when nobody asks for parents (level L1).
    """

    _caller = 1
    """Frames between `__torch_function__` and who calls it; a class that overrides it has one more."""

    def __init__(self, recorder: Recorder, is_on: Callable[[], bool], origins: OptimizerCalls | None = None) -> None:
        super().__init__()
        self._origins = origins
        self._reflected: dict[str, Any] = {}
        self._operator = ""
        self._recorder = recorder
        self._on = is_on
        self._names = ApiNames()
        self.installed = False
        self._aside = threading.local()
        self._too_deep: RecursionError | None = None
        self._launches = TritonLaunches(self._run_launch)

    def install(self, at: int | None = None) -> None:
        """Start seeing calls; `at`: as if it had been done when so many modes were on this thread's stack."""
        if not self.installed:
            self.installed = True  # first: what an interrupt leaves half done is taken off by `remove`
            recursion_room.raise_recursion_limit(self)
            modestack.take_out(self)  # it may have been left here by a `remove` on another thread
            modestack.insert(self, at)
            _APPLY.add(self._apply)
            _ENGINE.add(self._run_backward)
            self._launches.install()
            operator_libraries.add(self._of_library)
            self._put_on_operators()

    def _put_on_operators(self) -> None:
        for name in _REFLECTED:
            if name not in vars(torch.Tensor):
                self._reflected[name] = _wrap_operator(self, name)
                setattr(torch.Tensor, name, self._reflected[name])

    def remove(self) -> None:
        """Stop seeing calls; other modes that were entered meanwhile stay."""
        if not self.installed:
            return
        operator_libraries.discard(self._of_library)
        self._launches.remove()
        _ENGINE.discard(self._run_backward)
        _APPLY.discard(self._apply)
        for name, ours in self._reflected.items():
            if vars(torch.Tensor).get(name) is ours:
                delattr(torch.Tensor, name)
        self._reflected.clear()
        modestack.take_out(self)
        recursion_room.narrow(self)
        self.installed = False
        if self._too_deep is not None:
            self._fail(self._too_deep)

    def sees(self) -> bool:
        """Is a call made now to be recorded?"""
        return self.installed and not _compiling() and self._on() and not self._away()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See nothing of what this thread calls meanwhile."""
        away, self._aside.on = self._away(), True
        try:
            with modestack.aside(self):
                yield
        finally:
            self._aside.on = away

    def away(self, away: bool) -> None:
        """This thread's calls are not to be seen (the mode itself was taken off), or are again."""
        self._aside.on = away

    def _away(self) -> bool:
        return getattr(self._aside, "on", False)

    def _run_backward(self, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """The autograd engine, with this mode on: torch takes a mode off the stack while it handles ``backward()``, and what runs inside
        (recomputation, custom backward code) would not be seen."""
        try:
            inside = not self._on() or self in torch.overrides._get_current_function_mode_stack()
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            inside = True
        if inside:
            return engine(*args, **kwargs)
        with self:
            return engine(*args, **kwargs)

    def _apply(self, apply: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """``apply`` of a custom ``autograd.Function``."""
        call = None
        try:
            if self.sees() and not cls.__module__.startswith(_PLUMBING) and not called_internally(sys._getframe(2)):
                call = self.begin_call("Autograd", cls.__name__, args, kwargs)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
        try:
            result = apply(cls, *args, **kwargs)
        except BaseException:
            self.end_call(call, None, failed=True)
            raise
        if call is not None:  # its code may hand pointers to kernels: versions prove nothing
            self.forget_written((args, kwargs, result))
        self.end_call(call, result)
        return result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        how, api, call = _AS_IT_IS, "", None
        try:
            if not (_compiling() or not self._on()):  # torch.compile would trace the probe, and compile it again for every new stack
                named = self._names.resolve(func)
                if named is None:
                    how = _ALIAS if func == _DATA else _AS_IT_IS
                else:
                    prefix, api = named
                    caller = sys._getframe(self._caller)
                    if kinds.get(caller.f_code) != PLAIN and called_internally(caller):
                        how = _UNRECORDED
                    elif prefix == "Tensor" and func in COMPOSED and all(kind is torch.Tensor for kind in types):
                        how = _COMPOSED
                    else:
                        if prefix == "Tensor":
                            operator, self._operator = self._operator, ""
                            if operator and _REFLECTED[operator] == api:
                                api = operator
                            else:
                                prefix, api = self._names.find_call_name(prefix, api, caller)
                        elif api in TWICE and prefix == "Functional":
                            prefix, api = self._names.find_call_name(prefix, api, caller)
                        how = _UNRECORDED
                        if self._recorder.kept is None or not self._passes(prefix, api):
                            form = as_called(func, args, kwargs or {}, caller)
                            call = self.begin_call(prefix, api, *form, ignored_argument(api, args, kwargs or {}))
        except RecursionError as error:
            self._on, self._too_deep, how = _never, error, _AS_IT_IS  # no call is left to tell of it here
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            how = _AS_IT_IS
        if how == _AS_IT_IS:
            return func(*args, **kwargs) if kwargs else func(*args)
        if how == _COMPOSED:
            with self:  # seen by what it calls
                return func.__wrapped__(*args, **(kwargs or {}))
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        except BaseException:
            self.end_call(call, None, failed=True)
            raise
        given = result
        try:
            if how == _ALIAS:  # writes through .data leave the version counter as it is
                self._recorder.pipeline.backend.forget(args[0])
                self._recorder.raw.alias(result)
            else:
                for made in raw_results(api, result):
                    self._recorder.raw.add(made, sys._getframe(self._caller))
                if api in COPIES:
                    self._recorder.copies.add(api, args, kwargs or {}, result)
                if kwargs and "out" in kwargs:
                    self._forget_output(kwargs["out"])
                elif how == _UNRECORDED and api == "copy_":  # FSDP2 on one rank fills its weights so, and keeps their versions
                    self._forget_output(args[0])
                if type(func) in OPERATORS or api.startswith(NAMES):
                    for tensor in written_silently(func, api, args, kwargs or {}):
                        self._recorder.pipeline.backend.forget(tensor, views=tensor is None)
                    if type(func) in OPERATORS and (written := written_arguments(func, args, kwargs or {})):
                        self._recorder.forget_written(written)
                        if result is None and call is not None:  # what it has written is what it gives
                            call.watch, given = False, written
        except RecursionError as error:
            self._on, self._too_deep = _never, error
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
        self.end_call(call, given)
        return result

    def _of_library(self, prefix: str, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function of a library that calls a C++ extension."""
        return record_call(self, function, prefix, name, args, kwargs) if self.sees() else function(*args, **kwargs)

    def forget_written(self, tensors: Any) -> None:
        """A function that was not looked into, or a kernel, had these tensors: it may have written to any of them."""
        try:
            self._recorder.forget_written(tensors)
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def _run_launch(self, name: str, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """The launch of a Triton kernel; its results are the arguments as it leaves them."""
        if not self._on():
            return run()
        call = self.begin_call("Triton", name, args, kwargs, ALL_READ) if self.sees() else None
        if call is not None:
            call.watch = False  # autograd knows nothing of kernels
        try:
            result = run()
        except BaseException:
            self.end_call(call, None, failed=True)
            raise
        self.forget_written(tensors_given(args, kwargs))
        self.end_call(call, [*args, *(value for value in kwargs.values() if isinstance(value, torch.Tensor))])
        return result

    def _forget_output(self, out: Any) -> None:
        """``out=`` was written. Sharded training does so without raising versions."""
        tensors: list[torch.Tensor] = []
        tensors_in(out, tensors)
        for tensor in tensors:
            self._recorder.raw.forget(tensor)
        self._recorder.pipeline.backend.forget()

    def _passes(self, prefix: str, api: str) -> bool:
        """Is a call only counted, because no record of it can be kept?"""
        recorder = self._recorder
        kept = recorder.kept
        base = f"{prefix}.{api}"
        if kept is None or kept.range is not None or kept.api(base).possible:
            return False
        calls = recorder.stack.calls
        if calls and calls[-1].inside:
            return False
        n = recorder.numbers.take_number(base)
        if kept.nodes:
            parent = calls[-1].name if calls else self._origin()
            recorder.pipeline.entries.append(Entry(f"{base}.{n}.forward", {}, parent, -1, recorder.micro_step, NODE_ONLY))
        return True

    def _origin(self) -> str | None:
        return self._origins.of(sys._getframe(_DEPTH)) if self._origins is not None else None

    def begin_call(self, prefix: str, api: str, args: Any, kwargs: dict[str, Any], ignored: int = -1) -> Call | None:
        """A call begins; the caller's caller is the user. Returns what `end_call` wants, None when the capture broke."""
        recorder = self._recorder
        try:
            base = f"{prefix}.{api}"
            n = recorder.numbers.take_number(base)
            calls = recorder.stack.calls
            kept = recorder.kept
            kind = ALWAYS if kept is None else kept.api(base)
            call = Call(f"{base}.{n}.forward", f"{base}.{n}.backward", self, calls[-1] if calls else None, kind)
            if call.parent is None:
                call.parent_name = self._origin()
            recorder.begin_call(call, args, kwargs, _DEPTH, ignored)
            return call
        except RecursionError as error:
            self._on, self._too_deep = _never, error
            return None
        except Exception as error:
            raise_of_training(error)
            self._fail(error)
            return None

    def end_call(self, call: Call | None, result: Any, failed: bool = False) -> None:
        """The call has given `result`, or has raised."""
        if call is None:
            return
        try:
            calls = self._recorder.stack.calls
            if call in calls:
                del calls[calls.index(call) :]
            self._recorder.end_call(call, result, None, failed=failed)
        except RecursionError as error:
            self._on, self._too_deep = _never, error
        except Exception as error:
            raise_of_training(error)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._too_deep = None
        self._recorder.pipeline.faults.fail("API capture", error)
        self._on = _never


def _never() -> bool:
    return False


def _wrap_operator(capture: ApiCapture, name: str) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def operator(self: torch.Tensor, other: Any) -> Any:
        if modestack.depth():  # not on another thread
            capture._operator = name
        return original(self, other)

    return operator


def _inherited_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    return super(autograd_function._SingleLevelFunction, cls).apply(*args, **kwargs)


_ENGINE = FunctionPatch(_autograd, "_engine_run_backward")
_APPLY = FunctionPatch(autograd_function._SingleLevelFunction, "apply", classmethod, _inherited_apply)
