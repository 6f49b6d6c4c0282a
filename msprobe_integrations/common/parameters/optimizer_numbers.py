"""Numbers that an update is made with, as an optimizer's parameter groups have them: what two runs of one configuration have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LEARNING_RATE = "learning_rate"
_KEYS = {"lr": (LEARNING_RATE,), "weight_decay": ("weight_decay",), "betas": ("beta1", "beta2"), "eps": ("eps",), "momentum": ("momentum",)}
"""Key of a group -> names of its numbers. None of them says anything of the update of another kind of optimizer."""

_MOST_GROUPS = 16
"""Of groups behind them a number is said that no group before has: some programs make one of each parameter."""


def update_numbers(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Learning rate, weight decay, betas, eps and momentum; nothing is read from a device.

    Args:
        groups: as ``param_groups`` of torch.

    Returns:
        name -> number of the first group; ``{name}_group_{k}`` is that of group k (counted from 0) where it is another one. A learning rate
        may be a tensor, as it is kept; other numbers that are tensors are left out.
    """
    numbers: dict[str, Any] = {}
    values: dict[str, set[float]] = {}
    for k, group in enumerate(groups):
        for key, names in _KEYS.items():
            value = group.get(key)
            for name, number in zip(names, value if isinstance(value, (tuple, list)) else (value,)):
                plain = isinstance(number, (int, float)) and not isinstance(number, bool)
                if not k and (plain or (name == LEARNING_RATE and number is not None)):
                    numbers[name] = float(number) if plain else number
                elif k and plain and number != numbers.get(name):
                    known = values.setdefault(name, set())
                    if k < _MOST_GROUPS or (number not in known and len(known) < _MOST_GROUPS):
                        numbers[f"{name}_group_{k}"] = float(number)
                    known.add(number)
    return numbers
