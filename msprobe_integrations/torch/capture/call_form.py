"""How a call was written: which arguments stand at a position and which by keyword.

Functions that torch has in Python (``torch.nn.functional``, ``Tensor.norm``) hand their arguments on under their names, defaults included
(``handle_torch_function(layer_norm, (input, weight, bias), input, normalized_shape, weight=weight, bias=bias, eps=eps)``). What the
caller wrote is told by the instruction that it is at; each place in the code is looked at once.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

Form = tuple[int, tuple[str, ...]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Plan = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, Any], ...]]

_forms: dict[tuple[CodeType, int], Form | None] = {}
_plans: dict[tuple[Any, CodeType, int], Plan | None] = {}
_parameters: dict[Any, tuple[str, ...]] = {}
_DISPATCH = "torch/_jit_internal.py"
_HANDING_ON = torch.overrides.handle_torch_function.__code__
_FILLING = ("CACHE", "EXTENDED_ARG", "PUSH_NULL")
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def form_of(caller: FrameType) -> Form | None:
    """(number of positional arguments, names of keywords) of the call that `caller` is at; None when its instruction does not say:
    called by C code, with ``*`` or ``**``."""
    site = (caller.f_code, caller.f_lasti)
    if site not in _forms:
        _forms[site] = _form_at(*site)
    return _forms[site]


def _form_at(code: CodeType, offset: int) -> Form | None:
    # the offset may be that of a cache entry behind the instruction
    before = [instruction for instruction in dis.get_instructions(code) if instruction.offset <= offset]
    if not before:
        return None
    instruction = before.pop()
    count = instruction.arg or 0
    names: tuple[str, ...] = ()
    if instruction.opname in ("CALL_KW", "CALL_FUNCTION_KW"):  # 3.13 and later; 3.10
        names = before[-1].argval
    elif instruction.opname == "CALL":
        for earlier in before[-2:]:
            if earlier.opname == "KW_NAMES":  # 3.11 and 3.12
                names = code.co_consts[earlier.arg or 0]
    elif instruction.opname not in ("CALL_FUNCTION", "CALL_METHOD"):  # 3.10
        return None
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        return None
    return count - len(names), names


def as_called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType) -> Arguments:
    """Arguments as user code gives them, of a function that torch has in Python; those of other functions come so.

    Args:
        func, args, kwargs: as ``__torch_function__`` gets them.
        caller: the frame that called ``__torch_function__``.
    """
    if not kwargs:
        return args, kwargs
    own = caller.f_back if caller.f_code is _HANDING_ON else caller
    user = own.f_back if own is not None else None
    if own is None or user is None:
        return args, kwargs
    # ``torch._jit_internal.boolean_dispatch``, through which ``max_pool2d`` and others go
    if user.f_code.co_name == "fn" and user.f_code.co_filename.replace("\\", "/").endswith(_DISPATCH):
        values = user.f_locals  # of fn(*args, **kwargs)
        return values["args"], values["kwargs"]
    if own is caller or not isinstance(func, FunctionType):
        return args, kwargs
    if own.f_code is func.__code__:
        site = (func, user.f_code, user.f_lasti)
        try:
            plan = _plans[site]
        except KeyError:
            plan = _plans[site] = _plan(func, user)
        if plan is not None:
            given = dict(zip(_names(func), args))
            given.update(kwargs)
            positional, named, left = plan
            try:
                if all(given[name] is default or _same(given[name], default) for name, default in left):
                    return tuple([given[name] for name in positional]), {name: given[name] for name in named}
            except KeyError:  # not handed on
                pass
    return _in_order(func, args, kwargs) if func.__module__ == "torch.nn.functional" else (args, kwargs)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, torch.Tensor) and bool(value == default)


def _plan(func: Any, user: FrameType) -> Plan | None:
    """What of the call at `user` is positional, what named, and what must have its default; None when that is not known."""
    form, names = form_of(user), _names(func)
    if form is None:
        return None
    count = form[0]
    if names[0] == "self":
        bound = _is_called_on_object(user, func.__name__)
        if bound is None:
            return None
        count += bound  # x.norm(2): the instruction does not count x; torch.Tensor.norm(x, 2) does
    told = {*names[:count], *form[1]}
    if count > len(names) or not told <= set(names) or len(told) < count + len(form[1]):
        return None
    left = [p for p in inspect.signature(func).parameters.values() if p.name not in told and p.kind not in _STARS]
    if any(p.default is p.empty for p in left):  # called by C code in between, functools.partial for example
        return None
    return names[:count], form[1], tuple((p.name, p.default) for p in left)


def _is_called_on_object(user: FrameType, name: str) -> bool | None:
    """Is the method `name` called at `user` one of an object (True) or of ``Tensor`` (False)? None: its name stands nowhere before."""
    before = [i for i in dis.get_instructions(user.f_code) if i.offset <= user.f_lasti and not i.opname.startswith(_FILLING)]
    for at in range(len(before) - 1, -1, -1):
        if before[at].argval == name and before[at].opname.startswith("LOAD_"):
            return at == 0 or before[at - 1].argval != "Tensor"
    return None


def _names(func: Any) -> tuple[str, ...]:
    names = _parameters.get(func)
    if names is None:
        names = _parameters[func] = tuple(inspect.signature(func).parameters)
    return names


def _in_order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Where the call does not say how it was written: keywords that follow the positional arguments, up to the last tensor, are taken
    as positional; so the places of gradients are those of the tensors."""
    following: list[str] = []
    for name in _names(func)[len(args) :]:
        if name not in kwargs or not (kwargs[name] is None or isinstance(kwargs[name], torch.Tensor)):
            break
        following.append(name)
    while following and kwargs[following[-1]] is None:
        following.pop()
    if not following:
        return args, kwargs
    return (*args, *(kwargs[n] for n in following)), {k: v for k, v in kwargs.items() if k not in following}
