"""Parameters where torch's names stand for MindSpore (MSAdapter): what an optimizer with ``param_groups``, ``state`` and ``step`` updates.

Gradients are those that the parameters have (``grad``) when ``step`` is called: whatever the program has done to them before is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore

from msprobe_integrations.common.parameters.algorithms import algorithm_of
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler
from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.parameters.optimizers import OptimizerView
from msprobe_integrations.mindspore.parameters.source import CellSource
from msprobe_integrations.mindspore.tensors.memory import numel_of
from msprobe_integrations.patching import FunctionPatches


def is_adapter_optimizer(value: Any) -> bool:
    """Is this an optimizer of torch's kind, in a program whose torch is MindSpore?"""
    return isinstance(getattr(value, "param_groups", None), list) and callable(getattr(value, "step", None)) and environment.adapter()


class AdapterView(OptimizerView):
    """One optimizer of torch's kind.

    Args:
        optimizer: with ``param_groups``, ``state`` and ``step``.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__

    @property
    def parameters(self) -> tuple[Any, ...]:
        """In the order of the groups."""
        return tuple(parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def states(self, parameter: Any) -> Mapping[str, Any]:
        """State tensors of a parameter, each with as many elements; empty for what has none."""
        found = {name: state for name, state in self._of(parameter).items() if name != "step" and isinstance(state, mindspore.Tensor)}
        return {name: state for name, state in found.items() if numel_of(state) == numel_of(parameter)}

    def hyper(self, parameter: Any) -> dict[str, Any]:
        group: Mapping[str, Any] = next((g for g in self.optimizer.param_groups if any(member is parameter for member in g["params"])), {})
        numbers = {name: value for name, value in group.items() if name != "params"}
        step = self._of(parameter).get("step", numbers.get("step"))
        numbers["algorithm"], numbers["optimizer"] = algorithm_of(self.optimizer, group), self.name
        return numbers if step is None else {**numbers, "step": step}

    def learning_rate(self) -> Any:
        """Of the first group."""
        return self.optimizer.param_groups[0].get("lr")

    def _of(self, parameter: Any) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.state.get(parameter) or {}
        return found


class AdapterSource(CellSource):
    """Implements `ParameterSource`."""

    _patches: FunctionPatches

    @staticmethod
    def view_of(optimizer: Any) -> AdapterView:
        return AdapterView(optimizer)

    def connect(self, watch: ParameterSampler) -> None:
        """Follow the calls of ``step``."""
        self._watch = watch
        watch.in_place = False
        optimizer = self._view.optimizer
        self._patches = FunctionPatches()
        self._patches.add(next(c for c in type(optimizer).__mro__ if "step" in vars(c)), "step", self._watch_step)

    def close(self) -> None:
        super().close()
        self._patches.close()

    def _watch_step(self, following: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not self._view.optimizer:
            return following(optimizer, *args, **kwargs)
        self._before(optimizer, args, kwargs)
        result = following(optimizer, *args, **kwargs)
        self._after()
        return result

    def read_gradients(self, _args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> dict[int, Any]:
        """What the parameters have as their gradients."""
        found = ((id(parameter), getattr(parameter, "grad", None)) for parameter in self._view.parameters)
        return {key: gradient for key, gradient in found if isinstance(gradient, mindspore.Tensor)}
