"""Takes what calls of modules get and give, with the gradients that come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from msprobe_integrations.torch.op_tools.compile_check.graphs import disable_compile

Key = tuple[str, str]
"""Name of a call, and ``fwd_input``, ``fwd_output``, ``grad_input`` or ``grad_output``."""


class Taker:
    """Takes what calls get and give."""

    def __init__(self, names: dict[nn.Module, str]) -> None:
        self.values: dict[Key, list[Any]] = {}
        self._names = names
        self._numbers: dict[str, int] = {}

    def record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> str:
        """A call begins; returns its name."""
        name = self._names[module]
        n = self._numbers[name] = self._numbers.get(name, -1) + 1
        name = name if n == 0 else f"{name}#{n}"
        self._record_tensors(name, "fwd_input", "grad_input", pytree.tree_leaves((args, kwargs)))
        return name

    def record_outputs(self, name: str, result: Any) -> None:
        self._record_tensors(name, "fwd_output", "grad_output", pytree.tree_leaves(result))

    def _record_tensors(self, name: str, forward: str, backward: str, leaves: Sequence[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.values[name, forward] = [tensor.detach().clone() for tensor in tensors]
        slots: list[Any] = [None] * len(tensors)
        self.values[name, backward] = slots
        for n, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(_taker(slots, n))


def _taker(slots: list[Any], n: int) -> Callable[[torch.Tensor | None], None]:
    def store_gradient(gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # it is for an output that the loss does not use
            slots[n] = gradient.detach().clone()

    return disable_compile(store_gradient)
