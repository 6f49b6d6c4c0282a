"""Optimizers that get a closure (LBFGS, every optimizer under Lightning's Trainer): gradients are there only after it was called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


def after_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, then: Callable[[], None]) -> Any:
    """For a pre hook of ``Optimizer.step`` to return: its arguments with a closure that calls `then` after the user's, each time.

    Args:
        args: as hooks get them, the optimizer first.
        then: guards itself.

    Returns:
        None where there is no closure, and the gradients are there already.
    """

    def around(closure: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(closure)
        def call() -> Any:
            result = closure()
            then()
            return result

        return call

    if len(args) > 1 and callable(args[1]):
        return (args[0], around(args[1]), *args[2:]), dict(kwargs or {})
    if kwargs and callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": around(kwargs["closure"])}
    return None
