"""A module in float64, and what becomes of its results when everything it is given is changed by one unit of round-off."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from msprobe_integrations.torch.op_tools.accuracy.types import nudge_tensor
from msprobe_integrations.torch.op_tools.compile_check.runs import Call, Outcome, run

_CHANGES = (1, 2)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float64 or complex128; integers as they are."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.dtype.is_floating_point else tensor


def build_nudge(unit: torch.dtype | None, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes tensors wide and moves each value one unit of round-off up or down."""
    generator = torch.Generator().manual_seed(seed)

    def signs(shape: torch.Size) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=generator) * 2 - 1

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if unit is None or not tensor.dtype.is_floating_point:
            return wide(tensor)
        return nudge_tensor(tensor, unit, lambda shape: signs(shape).to(tensor.device))

    return change


@contextmanager
def changed_parameters(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Parameters are changed inside."""
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(change(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), before):
                parameter.copy_(value)


def copy_in_float64(module: nn.Module) -> nn.Module:
    """A copy in float64, without gradients and hooks of its parameters.

    Raises:
        Exception: the module cannot be copied.
    """
    made = copy.deepcopy(module, {id(p.grad): None for p in module.parameters() if p.grad is not None})
    for part in made.modules():
        part._compiled_call_impl = None
    return made.double()


def exact(module: nn.Module, call: Call, gradients: Sequence[torch.Tensor | None] | None) -> tuple[Outcome, list[Outcome]]:
    """The call in float64, and with changed inputs, parameters and gradients.

    Raises:
        Exception: it does not run in float64, or the module cannot be copied.
    """
    made = copy_in_float64(module)
    unit = call.unit(list(module.parameters()))
    truth = run(made, made, call, gradients, wide, exact=True)
    changed = []
    for n in _CHANGES:
        change = build_nudge(unit, n)
        with changed_parameters(made, change):
            changed.append(run(made, made, call, gradients, change, exact=True))
    return truth, changed
