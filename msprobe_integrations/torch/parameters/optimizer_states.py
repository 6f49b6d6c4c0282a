"""The numbers in the state of a torch optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from msprobe_engine.core.log import one_line, warn_once
from msprobe_integrations.requirements import optional


def numbers_of(optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """State tensors of a parameter, as the values that the optimizer computes with; the count of steps is none.

    Integers are left out, which is said once: they are codes of a quantised state or remainders of a master copy, and no values without
    what they are scaled by. A float16 state of Transformer Engine's `FusedAdam` is scaled as well; its ``get_unscaled_state`` has the
    values.
    """
    state: Mapping[str, Any] = optimizer.state.get(parameter) or {}
    unscaled = optional(optimizer, "get_unscaled_state", because="only Transformer Engine's optimizers scale their states")
    states: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or name == "step":
            continue
        if not (tensor.is_floating_point() or tensor.is_complex()):
            kind, owner = str(tensor.dtype).removeprefix("torch."), type(optimizer).__name__
            problem = f"state {one_line(str(name))} of {owner} holds {kind}: codes, not values"
            warn_once(f"codes of {owner}.{name}", f"parameter monitor: {problem}; it is left out, with the updates that need it")
            continue
        states[name] = unscaled(parameter, name) if unscaled is not None and tensor.dtype == torch.float16 else tensor
    return states


def updates_done(optimizers: Sequence[Any]) -> int:
    """Updates that the optimizers' own counters say were made (a checkpoint was loaded); 0 where there are none, or on a device."""
    counts = [0]
    for optimizer in optimizers:
        state = next(iter(optimizer.state.values()), None)
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, torch.Tensor) and count.device.type == "cpu" and count.numel() == 1:
            count = count.item()
        if isinstance(count, (int, float)):
            counts.append(int(count))
    return max(counts)
