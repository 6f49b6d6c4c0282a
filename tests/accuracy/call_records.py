"""Records of calls as dump.json has them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from msprobe_engine.accuracy.results import CallResult
from msprobe_integrations.torch.op_tools.accuracy.checker import Checker
from msprobe_integrations.torch.op_tools.accuracy.references import find
from msprobe_integrations.torch.op_tools.accuracy.references.formula import with_known_arguments


def normal(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


class Memory:
    """Saved tensors of a dump that is not on a disk."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, name: str, backend: Any) -> Any:
        """The tensor of this ``data_name``."""
        del backend
        return self.tensors[name]

    def same(self, name: str) -> object:
        """Equal for names of one saved tensor."""
        return name

    def item(self, value: Any) -> Any:
        """A value as a record has it; tensors are kept."""
        if isinstance(value, torch.Tensor):
            name = f"{len(self.tensors)}.pt"
            self.tensors[name] = value.detach().clone()
            return tensor(value) | {"data_name": name}
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return [self.item(child) for child in value]
        if isinstance(value, slice):
            return {"type": "slice", "value": [value.start, value.stop, value.step]}
        if value is ...:
            return {"type": "ellipsis", "value": "Ellipsis"}
        if isinstance(value, (torch.dtype, torch.device)):
            return {"type": f"torch.{type(value).__name__}", "value": str(value)}
        return None if value is None else {"type": type(value).__name__, "value": value}

    def record(self, args: Any, kwargs: Mapping[str, Any], output: Any = None) -> dict[str, Any]:
        """A forward record."""
        results = output if isinstance(output, (list, tuple)) else [output]
        named = {key: self.item(value) for key, value in kwargs.items()}
        return {"input_args": [self.item(a) for a in args], "input_kwargs": named, "output": [self.item(r) for r in results]}

    def backward(self, *gradients: torch.Tensor | None, output: Any = ()) -> dict[str, Any]:
        """A backward record."""
        return {"input": [self.item(g) for g in gradients], "output": [self.item(g) for g in output]}


def tensor(value: torch.Tensor) -> dict[str, Any]:
    """A tensor with its statistics."""
    found: dict[str, Any] = {"type": "torch.Tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
    found["requires_grad"] = value.requires_grad
    data = value.detach().float() if value.dtype.itemsize == 1 and value.dtype.is_floating_point else value.detach()
    if not data.numel() or data.dtype is torch.bool:
        extremes = [bool(data.any()), bool(data.all())] if data.numel() else [None, None]
        return found | {"Max": extremes[0], "Min": extremes[1], "Mean": None, "Norm": None}
    data = data.abs().double() if data.is_complex() else data.double()
    return found | {"Max": data.max().item(), "Min": data.min().item(), "Mean": data.mean().item(), "Norm": data.norm().item()}


def check(name: str, *args: Any, grad: Any = None, checker: Checker | None = None, saved: bool = True, **kwargs: Any) -> CallResult:
    """Check a call of `name` with these arguments.

    Args:
        grad: what comes into the backward, a tensor or a list; None: forward only.
        checker: None: one with the CPU on both sides.
        saved: the dump has the tensors, else statistics alone.
    """
    memory = Memory()
    out = kwargs.pop("recorded_output", ())
    record = memory.record(args, kwargs, out)
    backward = None if grad is None else memory.backward(*(grad if isinstance(grad, list) else [grad]))
    checker = checker or Checker(memory if saved else None)
    if saved:
        checker._arguments._files = memory
    return checker.check(name, record, backward).result


def names(result: CallResult) -> list[str]:
    """What was compared, without the name of the call."""
    return [t.name.removeprefix(f"{result.name}.") for t in result.tensors]


def wide(*shape: int) -> torch.Tensor:
    """Random numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


def run_formula(name: str, *args: Any, **kwargs: Any) -> Any:
    """What the formula of a recorded name gives, called as the pre-check calls it."""
    formula = find(name)
    assert formula is not None
    return with_known_arguments(name.rpartition(".")[2], formula)(*args, **kwargs)
