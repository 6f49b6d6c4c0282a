"""Optimizers of the sixth set: one that needs no schedule, and Adam whose moments have eight bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WithoutSchedule(torch.optim.Optimizer):
    """Schedule-free AdamW: while it trains, parameters lie between the last iterate and the mean of all."""

    between = 0.9
    lists = False

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            held = [p for p in group["params"] if p.grad is not None]
            for p in held:
                if not self.state[p]:
                    self.state[p].update(z=p.detach().float().clone(), x=p.detach().float().clone(), exp_avg_sq=torch.zeros_like(p).float())
            self._lists(group, held) if self.lists else [self._one(group, p) for p in held]

    def _one(self, group: dict[str, Any], p: Tensor) -> None:
        state, k, grad = self.state[p], group["k"], p.grad.float()  # type: ignore[union-attr]
        state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        size = (state["exp_avg_sq"] / (1 - 0.99**k)).sqrt().add_(1e-8)
        state["z"].sub_(grad / size + group["weight_decay"] * p.float(), alpha=group["lr"])
        state["x"].lerp_(state["z"], 1 / k)
        p.copy_(state["z"].lerp(state["x"], self.between))

    def _lists(self, group: dict[str, Any], held: list[Tensor]) -> None:
        k, grads = group["k"], [p.grad.float() for p in held]  # type: ignore[union-attr]
        z, x, squares = ([self.state[p][name] for p in held] for name in ("z", "x", "exp_avg_sq"))
        torch._foreach_mul_(squares, 0.99)
        torch._foreach_addcmul_(squares, grads, grads, 0.01)
        sizes = torch._foreach_sqrt(torch._foreach_div(squares, 1 - 0.99**k))
        torch._foreach_add_(sizes, 1e-8)
        moved = torch._foreach_div(grads, sizes)
        torch._foreach_add_(moved, [p.float() for p in held], alpha=group["weight_decay"])
        torch._foreach_sub_(z, moved, alpha=group["lr"])
        torch._foreach_lerp_(x, z, 1 / k)
        torch._foreach_copy_(held, torch._foreach_lerp(z, x, self.between))


class InBlocks(torch.optim.Optimizer):
    """Adam whose moments are numbers of eight bits, with a largest one for each block."""

    size = 128

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    def largest(self, blocks: Tensor) -> Tensor:
        return blocks.abs().amax(1, keepdim=True).clamp(min=1e-20)

    def rounded(self, x: Tensor, codes: int) -> Tensor:
        flat = x.flatten()
        whole = torch.nn.functional.pad(flat, (0, -len(flat) % self.size)).view(-1, self.size)
        stored = (whole / self.largest_of(whole, True) * codes).round()
        return (stored / codes * self.largest_of(whole, False)).flatten()[: len(flat)].view_as(x)

    def largest_of(self, blocks: Tensor, _written: bool) -> Tensor:
        return self.largest(blocks)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad.float()
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
                state["step"] += 1
                mean = state["exp_avg"].mul(0.9).add(grad, alpha=0.1)
                square = state["exp_avg_sq"].mul(0.95).addcmul(grad, grad, value=0.05)
                size = (square / (1 - 0.95 ** state["step"])).sqrt() + 1e-6
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.copy_(p.float() - group["lr"] / (1 - 0.9 ** state["step"]) * mean / size)
                state["exp_avg"].copy_(self.rounded(mean, 127))
                state["exp_avg_sq"].copy_(self.rounded(square.sqrt(), 255).square())
