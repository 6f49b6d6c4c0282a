"""Optimizers that people write themselves: Muon, Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """Orthogonal updates of matrices inside layers; AdamW of the rest."""

    rounds, nesterov, stacked = 5, True, False

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "momentum": 0.9, "matrix": False, "betas": (0.9, 0.95)})

    def orthogonal(self, g: Tensor) -> Tensor:
        x = g.bfloat16()
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        tall = x.shape[-2] > x.shape[-1]
        x = x.mT if tall else x
        for _ in range(self.rounds):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        return x.mT if tall else x

    def scale(self, p: Tensor) -> float:
        return max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None]
            for p in ready:
                state = self.state[p]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                if group["matrix"]:
                    momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    state["direction"] = p.grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum.clone()
                else:
                    state["step"] = state.get("step", 0) + 1
                    first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 1 - group["betas"][0])
                    second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 1 - group["betas"][1])
                    unbiased = [1 - beta ** state["step"] for beta in group["betas"]]
                    p.sub_(group["lr"] * (first / unbiased[0]) / ((second / unbiased[1]).sqrt() + 1e-8))
            if group["matrix"]:
                self.move(ready, group["lr"])

    def move(self, ready: list[Any], lr: float) -> None:
        if not self.stacked:
            for p in ready:
                p.sub_((lr * self.scale(p) * self.orthogonal(self.state[p].pop("direction"))).to(p.dtype))
            return
        for shape in {p.shape for p in ready}:
            alike = [p for p in ready if p.shape == shape]
            moves = self.orthogonal(torch.stack([self.state[p].pop("direction") for p in alike]))
            for p, move in zip(alike, moves):
                p.sub_((lr * self.scale(p) * move).to(p.dtype))


class Lion(torch.optim.Optimizer):
    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = momentum.lerp(p.grad, 1 - group["betas"][0]).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                momentum.lerp_(p.grad, 1 - group["betas"][1])
