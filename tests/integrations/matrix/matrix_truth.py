"""The reference: the same training in one process and in float64, all tensors whole; and how the parts of the ranks are held against it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import matrix_layouts as ml
import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, Any]
TOLERANCE = 2e-5


class Part(NamedTuple):
    """Statistics of what one rank had of a tensor."""

    count: int
    norm: float
    min: float
    max: float
    mean: float | None = None


class Truth(NamedTuple):
    """One step of the reference; keys are ``first.up``, ``first.up.weight``."""

    outputs: dict[str, Array]
    output_gradients: dict[str, Array]
    gradients: dict[str, Array]
    before: dict[str, Array]
    after: dict[str, Array]
    exp_avg: dict[str, Array]
    exp_avg_sq: dict[str, Array]


def _copy(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().numpy())


@cache
def truth() -> tuple[Truth, ...]:
    """All steps; taken with hooks of torch alone."""
    model = ml.net().double()
    optimizer = ml.optimizer_of(model)
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            output.retain_grad()
            outputs[name] = output

        return hook

    for name, module in model.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(keep(name))
    steps = []
    for number in range(ml.STEPS):
        ml.loss_of(model(ml.batch(number).double())).backward()
        named = dict(model.named_parameters())
        gradients = {n: _copy(p.grad) for n, p in named.items()}
        before = {n: _copy(p) for n, p in named.items()}
        optimizer.step()
        state = {n: optimizer.state[p] for n, p in named.items()}
        steps.append(
            Truth(
                {n: _copy(t) for n, t in outputs.items()},
                {n: _copy(t.grad) for n, t in outputs.items()},
                gradients,
                before,
                {n: _copy(p) for n, p in named.items()},
                {n: _copy(s["exp_avg"]) for n, s in state.items()},
                {n: _copy(s["exp_avg_sq"]) for n, s in state.items()},
            )
        )
        optimizer.zero_grad()
    return tuple(steps)


def assert_parts(parts: Iterable[Part], whole: Array, where: Any, factor: float = 1.0) -> None:
    """The parts of all ranks (and micro batches) make up `whole` times `factor`, each element equally often."""
    found = list(parts)
    count = sum(p.count for p in found)
    assert found, where
    assert count % whole.size == 0, (where, count, whole.shape)
    times = count // whole.size
    expected = {
        "norm": np.sqrt(times * (whole**2).sum()) * factor,
        "min": whole.min() * factor,
        "max": whole.max() * factor,
    }
    got = {
        "norm": np.sqrt(sum(p.norm**2 for p in found)),
        "min": min(p.min for p in found),
        "max": max(p.max for p in found),
    }
    means = [p.mean * p.count for p in found if p.mean is not None]
    if len(means) == len(found):
        expected["mean"], got["mean"] = whole.mean() * factor, sum(means) / count
    for op, value in expected.items():
        assert abs(got[op] - value) <= TOLERANCE * max(1.0, abs(value)), (where, op, got[op], value, times)
