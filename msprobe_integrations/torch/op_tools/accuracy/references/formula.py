"""What formulas share: how they are called, what they say of arguments they do not know, and how a backward is made of a forward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msprobe_engine.accuracy.results import NOT_CHECKED
from msprobe_integrations.common.op_tools.accuracy.arguments import CannotRun

Formula = Callable[..., Any]
_X = ("self", "input")
"""Names that torch_npu takes for what a formula calls ``x``."""


class NotChecked(CannotRun):
    """A call has arguments, or values of them, for which the formula is not made."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{NOT_CHECKED}{reason}")


def require(holds: bool, reason: str) -> None:
    """Raise `NotChecked` where a call asks for what a formula does not have."""
    if not holds:
        raise NotChecked(reason)


def with_known_arguments(api: str, formula: Formula) -> Formula:
    """`formula`, which raises `NotChecked` when a call has an argument that it does not know, and takes ``x`` by the names of the operator
    too."""

    @functools.wraps(formula)
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = bind(api, formula, args, kwargs)
        return formula(*args, **kwargs)

    return run


def bind(api: str, formula: Formula, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that `formula` takes.

    Raises:
        NotChecked: one is not known to it, or one that it needs is not there; which.
    """
    args, kwargs = tuple(args), dict(kwargs)
    try:
        signature = inspect.signature(formula)
    except (TypeError, ValueError):  # a function of C
        return args, kwargs
    known = signature.parameters
    kinds = {parameter.kind for parameter in known.values()}
    for name in _X:
        if name in kwargs and name not in known and "x" in known and "x" not in kwargs:
            kwargs["x"] = kwargs.pop(name)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in known and inspect.Parameter.VAR_KEYWORD not in kinds]
        places = sum(parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in known.values())
        if unknown:
            raise NotChecked(f"argument {unknown[0]} is not known to the formula of {api}") from None
        if len(args) > places and inspect.Parameter.VAR_POSITIONAL not in kinds:
            raise NotChecked(f"positional argument {places + 1} is not known to the formula of {api}") from None
        raise NotChecked(f"the formula of {api} does not take these arguments: {error}") from None
    return args, kwargs


def gradient_of(formula: Formula, count: int, name: str = "grad") -> Formula:
    """The operator whose arguments are the gradient of the (first) result of `formula`, called `name`, and the arguments of `formula`. It
    gives the gradients of the first `count` of these."""
    forward = inspect.signature(formula)
    names = list(forward.parameters)[:count]

    def backward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        grad = values.pop(name)
        with torch.enable_grad():
            inputs = [values[each].detach().requires_grad_() for each in names]
            values.update(zip(names, inputs))
            result = formula(**values)
            gradients = torch.autograd.grad(result[0] if isinstance(result, tuple) else result, inputs, grad)
        return gradients[0] if count == 1 else gradients

    grad = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([grad, *forward.parameters.values()])
    backward.__signature__ = signature  # type: ignore[attr-defined]
    return backward


def is_given(values: Sequence[Tensor] | Tensor | None) -> bool:
    """Is an optional tensor, or list of tensors, there? Dumps may have an empty list for none."""
    return values is not None and (isinstance(values, Tensor) or len(values) > 0)


def ends_of(lengths: Sequence[int] | Tensor) -> list[int]:
    """Ends of packed sequences, as numbers."""
    return [int(end) for end in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
