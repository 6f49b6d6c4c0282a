"""The probed ``construct``: code that MindSpore's compiler reads. Everything in here but `add_probes` is written for it, not for Python.

The compiler takes functions apart from their source, resolves names when it gets to them and unrolls what is constant. So there is no
recursion (nested containers have one function per level), no ``try``, and no annotations; closures over operators and numbers are fine.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,assignment,var-annotated"
# ruff: noqa: RUF005

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, ops
from mindspore.ops.functional import isconstant

from msprobe_integrations.mindspore.graph import notes
from msprobe_integrations.mindspore.graph.probes import BEGIN, END, PARAMETER, SEE, TAP

way, has_gradient, place = notes.way, notes.has_gradient, notes.place
tensor, constant, sequence, mapping, watched = notes.tensor, notes.constant, notes.sequence, notes.note_mapping, notes.note_gradient
INPUT, OUTPUT, OWN = notes.INPUT, notes.OUTPUT, notes.PARAMETER


def _note_leaf(value):
    if isinstance(value, Tensor):
        return tensor(value.dtype, value.shape)
    if isconstant(value):
        return constant(value)
    return 0


def _make_noting_level(inner):
    """One level of containers more than `inner` looks into."""

    def note_members(value):
        if isinstance(value, (tuple, list)):
            members = ()
            for member in value:
                members = members + (inner(member),)
            return sequence(members)
        if isinstance(value, dict):
            members = ()
            keys = ()
            for key in value:
                keys = keys + (key,)
                members = members + (inner(value[key]),)
            return mapping(keys, members)
        return _note_leaf(value)

    return note_members


def _see_leaf(value, part, path, token):
    if isinstance(value, Tensor):
        how = way(value.dtype, value.shape)
        if how == 1:
            SEE(ops.stop_gradient(value), place(part, path, value.dtype, value.ndim == 0), token)
        elif how == 2:
            SEE(ops.cast(ops.stop_gradient(value), mindspore.float32), place(part, path, value.dtype, value.ndim == 0), token)
    return value


def _tap_leaf(value, part, path, token):
    if not isinstance(value, Tensor) or isinstance(value, Parameter):
        return _see_leaf(value, part, path, token)
    if way(value.dtype, value.shape) == 0 or not has_gradient(value.dtype):
        return _see_leaf(value, part, path, token)
    tap_place = place(part, path, value.dtype, value.ndim == 0)
    if value.dtype == mindspore.bfloat16:
        wide = ops.cast(value, mindspore.float32)
        if value.ndim == 0:
            return ops.cast(TAP(wide.reshape((1,)), tap_place, token).reshape(()), mindspore.bfloat16)
        return ops.cast(TAP(wide, tap_place, token), mindspore.bfloat16)
    if value.ndim == 0:
        return TAP(value.reshape((1,)), tap_place, token).reshape(())
    return TAP(value, tap_place, token)


def _make_reporting_level(inner):
    """Hand the tensors inside `value` to Python."""

    def report_members(value, part, path, token):
        if isinstance(value, (tuple, list)):
            index = 0
            for member in value:
                inner(member, part, path + (index,), token)
                index = index + 1
        elif isinstance(value, dict):
            for key in value:
                inner(value[key], part, path + (key,), token)
        else:
            _see_leaf(value, part, path, token)
        return value

    return report_members


def _make_tapping_level(inner, seen, own):
    """The same, and their gradients; gives `value` with its tensors sent through taps. Tuples are built anew, which nobody can tell. Lists
    and dicts may be changed by who gave them: they are built anew when they are the call's `own` ones, else they stay what they are, and
    gradients of what they hold are not seen."""

    def tap(value, part, path, token):
        if isinstance(value, tuple):
            made = ()
            index = 0
            for member in value:
                made = made + (inner(member, part, path + (index,), token),)
                index = index + 1
            return made
        if isinstance(value, (list, dict)) and not own:
            return seen(value, part, path, token)
        if isinstance(value, list):
            listed = []
            index = 0
            for member in value:
                listed = listed + [inner(member, part, path + (index,), token)]
                index = index + 1
            return listed
        if isinstance(value, dict):
            named = {}
            for key in value:
                named[key] = inner(value[key], part, path + (key,), token)
            return named
        return _tap_leaf(value, part, path, token)

    return tap


# arguments are a container themselves, so there are three levels of the program's own
_note_4 = _make_noting_level(_make_noting_level(_make_noting_level(_make_noting_level(_note_leaf))))
_see_2 = _make_reporting_level(_make_reporting_level(_see_leaf))
_see_4 = _make_reporting_level(_make_reporting_level(_see_2))
_tap_2 = _make_tapping_level(_make_tapping_level(_tap_leaf, _see_leaf, False), _make_reporting_level(_see_leaf), False)
_tap_4 = _make_tapping_level(_make_tapping_level(_tap_2, _see_2, False), _make_reporting_level(_see_2), False)
_tap_own_2 = _make_tapping_level(_make_tapping_level(_tap_leaf, _see_leaf, True), _see_leaf, True)
_tap_own_4 = _make_tapping_level(_make_tapping_level(_tap_own_2, _see_leaf, True), _see_leaf, True)


def _arguments(args, kwargs):
    return sequence((_note_4(args), _note_4(kwargs)))


def add_probes(original: Callable[..., Any], cell: int, parameters: Mapping[str, Any], *, backward: bool) -> Callable[..., Any]:
    """A ``construct`` that does what `original` does. Python runs it as it is; the compiler reads another one in its place (it looks
    through ``__wrapped__``), which tells the listener of `probes` what happens.

    Args:
        original: bound ``construct`` of a Cell.
        cell: number that the listener gets.
        parameters: of the Cell itself, by name.
        backward: gradients are told too.

    Returns:
        A function with the argument ``self``, to be bound to the Cell.
    """

    names = tuple(parameters)
    values = tuple(parameters.values())

    def forward_only(self, *args, **kwargs):  # noqa: ARG001
        token = BEGIN(cell, _arguments(args, kwargs))
        _see_4(args, INPUT, (0,), token)
        _see_4(kwargs, INPUT, (1,), token)
        result = original(*args, **kwargs)
        _see_4(result, OUTPUT, (), token)
        for name, value in zip(names, values):  # behind the call, as in the dynamic graph: a normalization moves its averages in it
            _see_leaf(value, OWN, (name,), token)
        END(token, _note_4(result))
        return result

    def both(self, *args, **kwargs):  # noqa: ARG001
        token = BEGIN(cell, _arguments(args, kwargs))
        given = _tap_4(args, INPUT, (0,), token)
        named = {}
        for key in kwargs:
            named[key] = _tap_4(kwargs[key], INPUT, (1, key), token)
        result = _tap_own_4(original(*given, **named), OUTPUT, (), token)
        for name, value in zip(names, values):  # behind the call, as in the dynamic graph: a normalization moves its averages in it
            _see_leaf(value, OWN, (name,), token)
        END(token, _note_4(result))
        return result

    def construct(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        return original(*args, **kwargs)

    construct.__wrapped__ = both if backward else forward_only  # type: ignore[attr-defined]
    construct.__signature__ = inspect.signature(getattr(original, "__func__", original))  # type: ignore[attr-defined]
    return construct


def gradient_hook(parameter: int, dtype: str) -> Callable[..., Any]:
    """A hook for ``Parameter.register_hook`` that tells the listener of the gradient.

    Args:
        parameter: number that the listener gets.
        dtype: of the parameter, as its tensors print it.
    """

    def report_as_float32(grad):
        PARAMETER(ops.cast(grad, mindspore.float32), watched(parameter))
        return grad

    def plain(grad):
        PARAMETER(grad, watched(parameter))
        return grad

    return report_as_float32 if dtype == "BFloat16" else plain
