"""Which gradients a backward record has a place for.

As in the existing format a place belongs to a tensor, not to an argument: numbers, strings and index tensors have none. The order is
that of the arguments, containers opened, then that of keyword tensors that need a gradient (which the existing tool does not have).

| record | places of ``output`` (gradients of inputs) | places of ``input`` (gradients of outputs) |
| --- | --- | --- |
| API | floating-point and complex tensors; null where no gradient is needed | results that have a gradient |
| module | tensors that need a gradient | results that have a gradient |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from msprobe_integrations.torch.backward import Edge, edge
from msprobe_integrations.torch.containers import tensors_in

Tensor = torch.Tensor
_VALUES = (int, float, bool, str, type(None))


def edges_of(args: Sequence[Any], kwargs: Mapping[str, Any], every: bool) -> list[Edge | None]:
    """The edges of the inputs of a call, taken before it; one per place.

    Args:
        every: also places for tensors that could have a gradient and need none (APIs).
    """
    found: list[Edge | None] = []
    for value in args:
        if isinstance(value, Tensor):
            if value.requires_grad:
                found.append(edge(value))
            elif every and (value.dtype.is_floating_point or value.dtype.is_complex):
                found.append(None)
        elif type(value) not in _VALUES:
            for tensor in _flat(value):
                if tensor.requires_grad:
                    found.append(edge(tensor))
                elif every and (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
                    found.append(None)
    for value in kwargs.values():
        if isinstance(value, Tensor):
            if value.requires_grad:
                found.append(edge(value))
        elif type(value) not in _VALUES:
            found.extend(edge(tensor) for tensor in _flat(value) if tensor.requires_grad)
    return found


def differentiable(result: Any) -> list[Tensor | None]:
    """The tensors of a result that have a gradient."""
    return [tensor for tensor in _flat(result) if tensor.requires_grad]


def _flat(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tensors_in(value, found)
    return found
