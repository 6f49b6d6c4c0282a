"""Gradients of Cells where MindSpore does not show its backward graph (before 2.10): identity operators around a call.

`CellBackwardHook` is an identity over a flat tuple of tensors; its callback has all their gradients together, each the contribution of
what comes behind the operator. That is what MindSpore's own Cell hooks are built on; here nested and keyword tensors go through it too.
Sums of gradients are made in the same order as without it (run on 2.7 and 2.10: fan-out, residual sums, shared weights).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import mindspore
from mindspore.ops.operations import _inner_ops

from msprobe_integrations.common.hooks.gradient_watch import Action, GradientWatch
from msprobe_integrations.mindspore import environment
from msprobe_integrations.patching import FunctionPatches

Tensor: Any = mindspore.Tensor


class Passes:
    """Counts backward passes; `current` is the number of the one in progress, -1 outside of one."""

    def __init__(self) -> None:
        self.current = -1
        self._count = 0
        self._then: dict[int, list[Callable[[], None]]] = {}
        self._patches = FunctionPatches()

    def install(self) -> None:
        """Begin to count; nothing happens when it has begun."""
        if not self._patches:
            kind = type(environment.api_module()._pynative_executor)
            for name in ("grad", "grad_aux"):
                if name in vars(kind):
                    self._patches.add(kind, name, self._grad)

    def remove(self) -> None:
        """Count no more."""
        self._patches.close()

    def at_end(self, number: int, action: Callable[[], None]) -> None:
        """Call `action` when the pass ends."""
        self._then.setdefault(number, []).append(action)

    def _grad(self, following: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._count = self.current, self._count + 1
        self.current = number = self._count
        try:
            return following(*args, **kwargs)
        finally:
            self.current = before
            for action in self._then.pop(number, ()):
                action()


PASSES = Passes()
"""Those of this process."""


class TapWatch(GradientWatch):
    """The watch of a call with operators around it."""

    __slots__ = ("keep", "reached")

    keep: list[Any]
    """MindSpore refers weakly to what its operator calls."""
    reached: Callable[[TapWatch], None]
    """Told when a backward pass reaches the call."""

    def begin_pass(self) -> None:
        super().begin_pass()
        self.reached(self)

    @staticmethod
    def graph_task() -> int:
        """Number of the backward pass in progress."""
        return PASSES.current

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keep = []

    def tap(self, value: Any, tensors: list[Any], is_output: bool) -> Any:
        """`value` with these tensors in it sent through an operator; the gradients have the slots in their order."""
        if not tensors:
            return value
        if is_output:
            self._outputs = [None] * len(tensors)
        todo: tuple[Action, ...] = tuple((is_output, i, i) for i in range(len(tensors)))

        def came(_cell: Any, gradients: Any) -> None:
            if self.active:
                try:
                    self.receive_gradients(todo, gradients, gradients)
                except Exception as error:
                    self.stop(error)

        hooks = OrderedDict({0: came})
        operator = _inner_ops.CellBackwardHook("msprobe", self, hooks)
        operator.register_backward_pre_hook()
        self.keep.append((operator, hooks))
        made = operator(tuple(tensors))
        self._expected += 1
        self._missing += 1
        replaced = {id(old): new for old, new in zip(tensors, made)}
        return rebuilt(value, replaced)


def rebuilt(value: Any, replaced: dict[int, Any]) -> Any:
    """A nested list, tuple or dict with other tensors in it; any other object stays as it is."""
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, tuple):
        members: Iterator[Any] = (rebuilt(member, replaced) for member in value)
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if isinstance(value, list):
        return [rebuilt(member, replaced) for member in value]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, rebuilt(member, replaced)) for key, member in value.items())
    return value
