"""Optimizers that get a closure (LBFGS, every optimizer under Lightning's Trainer) have the passes made inside of their ``step``: what
is seen there belongs to the training, and gradients are there only after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


def around_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, around: Callable[[Callable[[], Any]], Any]) -> Any:
    """For a pre hook of ``Optimizer.step`` to return: its arguments with a closure that calls ``around(closure)``.

    Args:
        args: as hooks get them, the optimizer first.
        around: guards itself; calls the user's closure once, and returns what that returns.

    Returns:
        None where there is no closure.
    """

    def wrap_closure(closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def call() -> Any:
            return around(closure)

        return call

    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap_closure(args[1]), *args[2:]), dict(kwargs or {})
    if kwargs and callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap_closure(kwargs["closure"])}
    return None


def after_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, then: Callable[[], None]) -> Any:
    """The same with `then`, which guards itself, after each call of the closure."""

    def around(closure: Callable[[], Any]) -> Any:
        result = closure()
        then()
        return result

    return around_closure(args, kwargs, around)
