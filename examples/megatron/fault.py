"""A planted fault: at one step, on one rank, the output of one module becomes NaN or Inf by a real operation.

What is planted where follows from a seed, so that a tool that is asked to find it cannot know. The truth is written to a file
for checking afterwards, and nowhere else.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

KINDS = ("log_of_negative", "zero_over_zero", "exp_overflow", "sqrt_of_negative", "inf_minus_inf")


def damaged(output: torch.Tensor, kind: str, at: int) -> torch.Tensor:
    """The output with some elements replaced by the result of an operation out of its domain; the rest as it was."""
    flat = output.reshape(-1)
    hit = torch.zeros_like(flat, dtype=torch.bool)
    hit[at % flat.numel()] = True
    safe = flat.detach().abs() + 1.0
    if kind == "log_of_negative":
        bad = torch.log(torch.where(hit, -safe, safe))
    elif kind == "zero_over_zero":
        kept = torch.where(hit, torch.zeros_like(safe), safe)
        bad = kept / kept
    elif kind == "exp_overflow":
        bad = torch.exp(torch.where(hit, safe * 1e5, torch.zeros_like(safe)))
    elif kind == "sqrt_of_negative":
        bad = torch.sqrt(torch.where(hit, -safe, safe))
    else:
        large = torch.where(hit, safe, torch.zeros_like(safe)) * torch.finfo(safe.dtype).max * 10
        bad = large - large
    return torch.where(hit, bad, flat).reshape(output.shape)


def candidates(model: nn.Module) -> list[str]:
    """Modules of this rank's part that the fault may hit: leaves of transformer layers whose output is not written in place by
    what follows."""
    found = []
    for name, module in model.named_modules():
        if "layers." in name and not list(module.children()) and list(module.parameters()):
            found.append(name)
    return found


def plant(
    model: nn.Module, seed: int, *, rank: int, world_size: int, steps: int, step: Callable[[], int], truth: Path | None
) -> dict[str, Any]:
    """Choose and plant the fault. Every rank calls this with the same seed.

    Args:
        model: this rank's model (unwrapped).
        step: current training step.
        truth: file that rank 0 of the fault writes the answer to.

    Returns:
        the answer: rank, step, module, kind.
    """
    choice = random.Random(seed)
    victim = choice.randrange(world_size)
    when = choice.randrange(2, max(3, steps - 2))
    kind = choice.choice(KINDS)
    at = choice.randrange(1 << 20)
    pick = choice.random()
    if rank != victim:
        return {}
    names = candidates(model)
    name = names[int(pick * len(names))]
    module = model.get_submodule(name)
    forward = module.forward

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if step() != when or not torch.is_grad_enabled():
            return result
        if isinstance(result, tuple):
            return (damaged(result[0], kind, at), *result[1:])
        return damaged(result, kind, at)

    module.forward = faulty  # type: ignore[method-assign]
    answer = {"rank": victim, "step": when, "module": name, "kind": kind}
    if truth is not None:
        truth.parent.mkdir(parents=True, exist_ok=True)
        truth.write_text(json.dumps(answer))
    return answer
