"""What an optimizer of MindSpore holds: its parameters, the states of each, and the numbers of its update.

One way for ``mindspore.nn``, ``mindspore.experimental.optim`` and ``mindspore.mint.optim``: each is a Cell with ``parameters``, gradients
are given to its call in the same order, and states are tuples of Parameters in that order with the name ``{state}.{parameter}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore

from msprobe_integrations.mindspore import environment
from msprobe_integrations.mindspore.tensors.memory import array_at
from msprobe_integrations.requirements import MissingNameError, make_missing_error, need

Parameter: Any = mindspore.Parameter
STATES: Mapping[str, Mapping[str, str]] = {
    "Adam": {"moment1": "exp_avg", "moment2": "exp_avg_sq", "vhat": "max_exp_avg_sq"},
    "AdamWeightDecay": {"moments1": "exp_avg", "moments2": "exp_avg_sq"},
    "AdamOffload": {"moment1": "exp_avg", "moment2": "exp_avg_sq"},
    "Lamb": {"moments1": "exp_avg", "moments2": "exp_avg_sq"},
    "LazyAdam": {"moment1": "exp_avg", "moment2": "exp_avg_sq"},
    "Momentum": {"moments": "momentum_buffer"},
    "SGD": {"accum": "momentum_buffer", "momentum_buf": "momentum_buffer"},
    "RMSProp": {
        "ms": "square_avg",
        "mean_square": "square_avg",
        "mg": "grad_avg",
        "mean_gradient": "grad_avg",
        "moment": "momentum_buffer",
    },
    "Adagrad": {"accum": "sum"},
}
"""States by class and by the name MindSpore has for them, in the words of PyTorch, which files have. Others keep their name."""
_ALGORITHMS = {
    "Adam": "adam", "AdamW": "adamw", "AdamWeightDecay": "adamw", "SGD": "sgd", "Momentum": "sgd", "Adagrad": "adagrad",
}  # fmt: skip
"""Those whose update is the one that `common.update_pairs` knows. Not RMSProp, which has its epsilon under the root, nor Lamb."""

_UPDATES = "the families update and ratio"


def is_optimizer(value: Any) -> bool:
    """Is this a Cell that updates parameters?"""
    return isinstance(value, mindspore.nn.Cell) and hasattr(value, "parameters") and not callable(value.parameters)


class OptimizerView:
    """One optimizer.

    Args:
        optimizer: a Cell with ``parameters``.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.name = _known_class(optimizer)
        self._states: dict[int, dict[str, Any]] | None = None
        self._groups: dict[int, int] = {}

    @property
    def parameters(self) -> tuple[Any, ...]:
        """In the order in which gradients are given."""
        return tuple(self.optimizer.parameters)

    def states(self, parameter: Any) -> Mapping[str, Any]:
        """State tensors of a parameter; empty for what has none."""
        if self._states is None:
            self._states = self._find_states()
        return self._states.get(id(parameter), {})

    def _find_states(self) -> dict[int, dict[str, Any]]:
        parameters = self.parameters
        words = STATES.get(self.name, {})
        without = {"max_exp_avg_sq"} if not self._read_setting("amsgrad", "use_amsgrad") else set()
        states: dict[int, dict[str, Any]] = {id(parameter): {} for parameter in parameters}
        for attribute, value in vars(self.optimizer).items():
            if attribute.startswith("_") or not isinstance(value, (tuple, list)) or len(value) != len(parameters):
                continue
            for parameter, state in zip(parameters, value):
                if isinstance(state, Parameter) and state is not parameter and state.name.endswith(f".{parameter.name}"):
                    name = words.get(attribute, attribute)
                    if name not in without:
                        states[id(parameter)][name] = state
        return states

    def hyper(self, parameter: Any) -> dict[str, Any]:
        """The parameter's own group, ``algorithm`` (``""``: unknown) and ``optimizer`` (name of the class)."""
        numbers: dict[str, Any] = {}
        groups = getattr(self.optimizer, "param_groups", None)
        if groups:
            if id(parameter) not in self._groups:
                self._groups = {id(member): i for i, group in enumerate(groups) for member in group["params"]}
            group = groups[self._groups[id(parameter)]] if id(parameter) in self._groups else {}
            numbers = {key: value for key, value in group.items() if key != "params"}
        numbers["algorithm"] = _ALGORITHMS.get(self.name, "")
        numbers["optimizer"] = type(self.optimizer).__name__
        try:
            if numbers.get("betas") is not None:
                if numbers["algorithm"]:
                    numbers["step"] = _number(need(self.optimizer, "state_step", for_=_UPDATES))
            elif isinstance(self.optimizer, mindspore.nn.Optimizer):  # settings are attributes
                self._of_nn(numbers)
        except MissingNameError:
            numbers["algorithm"] = ""
        return numbers

    def _of_nn(self, numbers: dict[str, Any]) -> None:
        optimizer = self.optimizer
        numbers["step"] = step = _number(need(optimizer, "global_step", for_=_UPDATES))
        if self.name == "AdamWeightDecay":
            numbers.update(bias_correction=False, eps=_number(optimizer.eps))
        elif self.name == "Adam":
            betas = _number(optimizer.beta1), _number(optimizer.beta2)
            # lr sqrt(1 - b2**t) / (1 - b1**t) m / (sqrt(v) + eps), which is Adam with another epsilon
            eps = _number(optimizer.eps) / max(1.0 - betas[1] ** max(step, 1.0), 1e-30) ** 0.5
            numbers.update(betas=betas, eps=eps, amsgrad=bool(need(optimizer, "use_amsgrad", for_=_UPDATES)))
            if need(optimizer, "use_nesterov", for_=_UPDATES):
                numbers["algorithm"] = ""
        elif self.name in ("SGD", "Momentum"):
            nesterov = bool(need(optimizer, "nesterov", "use_nesterov", for_=_UPDATES))
            numbers.update(momentum=_number(need(optimizer, "momentum", for_=_UPDATES)), nesterov=nesterov)
            if numbers["nesterov"] or (not numbers["momentum"] and self._changes_gradients()):
                numbers["algorithm"] = ""
        elif self.name == "Adagrad" and self._changes_gradients():
            numbers["algorithm"] = ""

    def _changes_gradients(self) -> bool:
        """Weight decay, centralization and loss scale of mindspore.nn are a part of the update: it is not made of the gradients that are
        given."""
        optimizer = self.optimizer
        grouped = need(optimizer, "is_group", for_=_UPDATES)  # else nothing is centralized, and there are no flags
        centralized = any(need(optimizer, "grad_centralization_flags", for_=_UPDATES)) if grouped else False
        return bool(centralized or need(optimizer, "exec_weight_decay", for_=_UPDATES) or need(optimizer, "need_scale", for_=_UPDATES))

    def learning_rate(self) -> Any:
        """Of the first group, a number or a Parameter; None where it would have to be worked out by the program's own code."""
        groups = getattr(self.optimizer, "param_groups", None)
        if groups:
            return groups[0].get("lr")
        rate = getattr(self.optimizer, "learning_rate", None)
        if rate is None and isinstance(self.optimizer, mindspore.nn.Optimizer):
            make_missing_error(f"{type(self.optimizer).__name__}.learning_rate", "scalar learning_rate")
        if isinstance(rate, (tuple, list, mindspore.nn.CellList)):  # one per group of parameters
            rate = rate[0] if len(rate) else None
        if isinstance(rate, mindspore.nn.Cell):  # a schedule: its value is made by a call of it
            with environment.no_grad():
                return rate(self.optimizer.global_step) if type(rate).__module__.startswith("mindspore.") else None
        return rate if isinstance(rate, (float, int, mindspore.Tensor)) else None

    def _read_setting(self, *names: str) -> Any:
        for name in names:
            if hasattr(self.optimizer, name):
                return getattr(self.optimizer, name)
            for group in getattr(self.optimizer, "param_groups", None) or ():
                if name in group:
                    return group[name]
        return None


def _known_class(optimizer: Any) -> str:
    """The nearest class of MindSpore that the optimizer is or comes from."""
    for cls in type(optimizer).__mro__:
        if cls.__module__.startswith("mindspore."):
            return str(cls.__name__)
    return type(optimizer).__name__


def _number(value: Any) -> float:
    return float(array_at(value).reshape(-1)[0]) if isinstance(value, mindspore.Tensor) else float(value)
