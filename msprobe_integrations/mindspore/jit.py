"""Compiled functions (``@mindspore.jit``) in the dynamic graph: one record ``Jit.{function or Cell class}.{N}`` per call.

What runs inside is compiled and called by nobody. In the mode ``bytecode`` the function runs in Python where it cannot be compiled, and
what it calls there is seen as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import nn

from msprobe_integrations.common.doors import Doors
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.api import ApiCapture


class JitCapture:
    """Sees calls of compiled functions while it is installed.

    Args:
        api: makes the records.
    """

    def __init__(self, api: ApiCapture) -> None:
        self._api = api
        self._doors = Doors()

    def install(self) -> None:
        """Start seeing calls; nothing happens when it has begun."""
        executor = getattr(environment.api_module(), "_JitExecutor", None)
        if executor is not None and not self._doors:
            self._doors.add(executor, "__call__", self._called)

    def remove(self) -> None:
        """Stop seeing calls."""
        self._doors.close()

    def _called(self, following: Callable[..., Any], executor: Any, *args: Any, **kwargs: Any) -> Any:
        api = self._api
        if not api.sees():
            return following(executor, *args, **kwargs)
        owner = executor.obj
        name = type(owner).__name__ if isinstance(owner, nn.Cell) else getattr(executor.fn, "__name__", "function")
        skip = 1 if owner is None or not args or args[0] is not owner else 2
        return api.around("Jit", name, following, (executor, *args), kwargs, skip=skip)
