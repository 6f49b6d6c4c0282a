"""Megatron's optimizers: which of them holds a parameter, its fp32 copy (or shard), its gradient and moments.

Holds for FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer and ChainedOptimizer of megatron-core 0.9 to 0.19.
"""

from __future__ import annotations

from typing import Any

import torch


def is_megatron(optimizer: Any) -> bool:
    """True for an optimizer with Megatron's prepare / step protocol."""
    return hasattr(optimizer, "prepare_grads") and hasattr(optimizer, "step_with_ready_grads")


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers in a chain, or the one there is."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [leaf for part in chained for leaf in leaves(part)] if chained is not None else [optimizer]


class MainParameters:
    """The optimizer's own view of the model's parameters: fp32 copies, shards of them, or the parameters themselves."""

    def __init__(self, optimizer: Any) -> None:
        self._leaves = [leaf for leaf in leaves(optimizer) if not getattr(leaf, "is_stub_optimizer", False)]
        self._owner: dict[int, Any] = {}
        for leaf in self._leaves:
            inner = getattr(leaf, "optimizer", leaf)
            for group in getattr(inner, "param_groups", ()):
                for parameter in group["params"]:
                    self._owner[id(parameter)] = inner

    def main(self, parameter: torch.Tensor) -> tuple[Any, torch.Tensor] | None:
        """(inner optimizer, its parameter) for a parameter of the model; None when this rank holds nothing of it."""
        for leaf in self._leaves:
            index = getattr(leaf, "model_param_group_index_map", None)
            if index is not None and parameter in index:
                group, order = index[parameter]
                return leaf.optimizer, leaf.optimizer.param_groups[group]["params"][order]
        for candidate in (getattr(parameter, "main_param", None), parameter):
            if isinstance(candidate, torch.Tensor) and id(candidate) in self._owner:
                return self._owner[id(candidate)], candidate
        return None

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient the optimizer is about to use: after `prepare_grads` it exists and is unscaled, after clipping it is clipped."""
        found = self.main(parameter)
        if found is None:
            return None
        gradient = getattr(found[1], "decoupled_grad", None)
        return found[1].grad if gradient is None else gradient

    def state(self, parameter: torch.Tensor, key: str) -> torch.Tensor | None:
        """A state tensor such as ``exp_avg``."""
        found = self.main(parameter)
        value = found[0].state.get(found[1], {}).get(key) if found is not None else None
        return value if isinstance(value, torch.Tensor) else None


def learning_rate(optimizer: Any) -> float | None:
    """Learning rate of the first parameter group that has one."""
    for group in getattr(optimizer, "param_groups", ()):
        if isinstance(group.get("lr"), (int, float)):
            return float(group["lr"])
    return None


def loss_scale(optimizer: Any) -> torch.Tensor | None:
    """The loss scale, as the tensor it is kept in; None when losses are not scaled."""
    for leaf in leaves(optimizer):
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler is not None:
            scale = scaler.scale
            return scale if isinstance(scale, torch.Tensor) else torch.tensor(float(scale))
    return None


def clips(optimizer: Any) -> bool:
    """True when some part of the optimizer clips gradients."""
    return any(float(getattr(getattr(leaf, "config", None), "clip_grad", 0.0) or 0.0) > 0 for leaf in leaves(optimizer))
