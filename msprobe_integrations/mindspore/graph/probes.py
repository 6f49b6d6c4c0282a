"""Operators that hand values of a running graph to Python: ``ops.Custom`` of type ``pyfunc``, which MindSpore has for CPU.

Four things happen in a probed call: it begins (and gets a number, the *token*, that its other events carry along, also into the backward
pass), tensors are seen, it ends, gradients are seen. The operators have the attribute ``side_effect_io``, as ``ops.Print`` has it: so the
compiler keeps them although nobody uses their results, leaves equal ones apart, and runs those of the forward pass in the order of the
program. Values that can have a gradient go through an identity (`TAP`), others are looked at from beside; so the numbers of the training
are the same.
"""

from __future__ import annotations

from typing import Any, Protocol

import mindspore
import numpy as np
from mindspore import ops

NO_TOKEN = 0
"""Token of a call that nobody records."""


class Listener(Protocol):
    """What is told of a running graph. Methods are called on threads of MindSpore's runtime, one at a time, and never raise."""

    def begin_call(self, cell: int, arguments: int) -> int:
        """A call of the probed Cell number `cell` begins; `arguments`: note (see `notes`) of its (args, kwargs). Returns the token."""
        ...

    def add_tensor(self, token: int, place: int, value: Any) -> None:
        """A tensor of the call at this place: an array that is only there during this call, or a number for a tensor without dimensions."""
        ...

    def end_call(self, token: int, result: int) -> None:
        """The call is over; `result`: note of what it returned."""
        ...

    def parameter_gradient(self, parameter: int, value: Any) -> None:
        """The gradient of the watched parameter with this number."""
        ...


_listener: Listener | None = None
_NOTHING = np.zeros((1,), np.int32)


def set_listener(listener: Listener | None) -> None:
    """Tell `listener` from now on, nobody when it is None. Probes stay in compiled graphs, so there is one listener per process."""
    global _listener
    _listener = listener


def get_listener() -> Listener | None:
    return _listener


def _report_begin(cell: int, arguments: int) -> Any:
    return np.array([NO_TOKEN if _listener is None else _listener.begin_call(int(cell), int(arguments))], np.int32)


def _report_tensor(value: Any, place: int, token: Any) -> Any:
    if _listener is not None and token[0]:
        _listener.add_tensor(int(token[0]), int(place), value)
    return _NOTHING


def _report_end(token: Any, result: int) -> Any:
    if _listener is not None and token[0]:
        _listener.end_call(int(token[0]), int(result))
    return _NOTHING


def _parameter(value: Any, parameter: int) -> Any:
    if _listener is not None:
        _listener.parameter_gradient(int(parameter), value)
    return _NOTHING


def _one(*_: Any) -> tuple[int]:
    return (1,)


def _int32(*_: Any) -> Any:
    return mindspore.int32


def operator(function: Any) -> Any:
    """An operator that runs `function` whenever a graph gets to it; tensors are numpy arrays there, the result one int32."""
    made = ops.Custom(function, _one, _int32, "pyfunc")
    made.add_prim_attr("side_effect_io", True)
    return made


BEGIN = operator(_report_begin)
SEE = operator(_report_tensor)
END = operator(_report_end)
PARAMETER = operator(_parameter)


def _back(value, place, token, out, dout):  # type: ignore[no-untyped-def]  # noqa: ARG001  # compiled
    SEE(dout, place + 1, token)
    return dout, 0, ops.zeros_like(token)


def _pass(value: Any, place: int, token: Any) -> Any:
    _report_tensor(value, place, token)
    return value


def _same(value: Any, *_: Any) -> Any:
    return value


TAP = ops.Custom(_pass, _same, _same, "pyfunc", bprop=_back)
"""The identity: `SEE` of what goes through it, and of what flows back, at the place with the next number. (It is an operator because a
Cell with a ``bprop`` that is given more than constants makes wrong gradients in MindSpore 2.10, when a ``jit`` function is differentiated
in PyNative mode.) Takes no bfloat16 and no tensors without dimensions."""
TAP.add_prim_attr("side_effect_io", True)
