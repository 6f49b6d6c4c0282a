"""Which function of `torch.distributed` a collective came through, and with what arguments.

A kernel of the dispatcher gets tensors and numbers, not what the user wrote. But it runs below the user's call, and torch wraps its
public functions in loggers (``torch/distributed/c10d_logger.py``) whose frames hold the arguments just as they were passed. So the
call is read from the frames below: nothing is patched, and names imported before the probe was built do not escape. ``isend``,
``irecv`` and ``batch_isend_irecv`` have no such wrapper; their own frames hold the values, and the instruction of the caller says
which were given by position.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from msprobe_integrations.torch.capture.call_form import form_of

_NOTHING, _WITHIN, _WRAPPER, _PLAIN = range(4)
_C10D = ("torch/distributed/distributed_c10d.py", "torch_npu/distributed/distributed_c10d.py")
"""torch's functions, and those that torch_npu puts in their place."""
_WRAPPERS = ("torch/distributed/c10d_logger.py", "typing_extensions.py", "/warnings.py", "/_py_warnings.py")
_BETWEEN = (*_WRAPPERS, *_C10D, "torch/overrides.py")
_ENGINE = ("torch/autograd/graph.py", "torch/autograd/__init__.py")
_OWN = "msprobe_integrations/"
_PLUMBING = (
    *_BETWEEN, "torch/distributed/_functional_collectives.py", "torch/distributed/_functional_collectives_impl.py",
    "torch/_ops.py", "torch/_library/autograd.py", "torch/autograd/function.py", "torch/_tensor.py", *_ENGINE, "/contextlib.py",
)  # fmt: skip
_REPLACED = ("group", "group_src", "group_dst")
"""Parameters that these functions set themselves when they were not given."""
_UNWRAPPED = ("isend", "irecv", "batch_isend_irecv", "_batch_isend_irecv")
OF_OBJECTS = frozenset(
    (
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "send_object_list",
        "recv_object_list",
    )
)
"""Functions that send pickled objects as tensors of bytes."""


class DistributedCall(NamedTuple):
    """One call of a public function.

    Attributes:
        name: of the function the user called, ``all_reduce``.
        args, kwargs: as the user passed them.
        inner: name of the function that this one called for the communication at hand; `name` when it did it itself.
        caller: the frame of the call.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inner: str
    caller: FrameType | None


_kinds: dict[CodeType, int] = {}
_plumbing: dict[CodeType, bool] = {}


def distributed_call(frame: FrameType | None) -> DistributedCall | None:
    """The outermost public function of `torch.distributed` in whose frames `frame` is; None when there is none."""
    outermost: FrameType | None = None
    inner = ""
    while frame is not None:
        code = frame.f_code
        kind = _kinds.get(code)
        if kind is None:
            kind = _kinds[code] = _kind(code)
        if kind == _NOTHING:
            break
        if kind != _WITHIN:
            inner = _name(outermost) if outermost is not None else ""
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return None
    name = _name(outermost)
    caller = visible(outermost.f_back)
    if _kinds[outermost.f_code] == _WRAPPER:
        values = outermost.f_locals
        return DistributedCall(name, values["args"], values["kwargs"], inner or name, caller)
    return DistributedCall(name, *_arguments(outermost), inner or name, caller)


def visible(frame: FrameType | None) -> FrameType | None:
    """The first frame from `frame` outward that is not torch's or this package's plumbing."""
    while frame is not None:
        code = frame.f_code
        hidden = _plumbing.get(code)
        if hidden is None:
            path = _path(code)
            hidden = _plumbing[code] = path.endswith(_PLUMBING) or _OWN in path
        if not hidden:
            return frame
        frame = frame.f_back
    return None


def from_engine(frame: FrameType | None) -> str:
    """Who called the code at `frame`, which is this package's: ``thread`` when nothing of Python is below it (a thread of the autograd
    engine), ``engine`` when that is a backward pass on this thread, ``""`` when it is other Python code."""
    while frame is not None and _OWN in _path(frame.f_code):
        frame = frame.f_back
    if frame is None:
        return "thread"
    return "engine" if _path(frame.f_code).endswith(_ENGINE) else ""


def _path(code: CodeType) -> str:
    return code.co_filename.replace("\\", "/")


def _kind(code: CodeType) -> int:
    path = _path(code)
    if path.endswith(_WRAPPERS) and code.co_name == "wrapper":
        return _WRAPPER
    if path.endswith(_C10D) and code.co_name in _UNWRAPPED:
        return _PLAIN
    if path.endswith(_BETWEEN) or _OWN in path or code.co_name == "__torch_function__":
        return _WITHIN
    return _NOTHING


def _name(frame: FrameType) -> str:
    if _kinds[frame.f_code] == _PLAIN:
        return frame.f_code.co_name.lstrip("_")
    values = frame.f_locals
    return str(getattr(values.get("func", values.get("arg")), "__name__", ""))


def _arguments(frame: FrameType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a function from its own frame."""
    code, values = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount]
    defaults = getattr(getattr(dist, code.co_name, None), "__defaults__", None) or ()
    first = max(len(names) - len(defaults), 1)
    given = [n for n, default in zip(names[first:], defaults[len(defaults) - len(names) + first :]) if values[n] is not default]
    form = form_of(frame.f_back) if frame.f_back is not None else None
    if form is not None:
        recorded = {*names[: form[0]], *form[1]}
        if not {*names[:first], *given} - set(_REPLACED) <= recorded <= set(names) or form[0] > len(names):
            form = None
    if form is None:  # called by C code, with * or **, or through a partial: what has no default is taken as positional
        form = first, tuple(given)
    return tuple(values[n] for n in names[: form[0]]), {n: values[n] for n in form[1]}
