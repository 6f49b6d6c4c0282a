"""A Trainer with the loop of MindSpeed-LLM's FSDP2 backend, written from what it does: micro batches through `training_step`, which is
where the backward pass runs, clipping by a function of the module, then the optimizer, and losses that are read for logging. And an
engine with that of MindSpeed-MM's: all micro batches in `train_step`, which says the mean of the ranks' losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def clip_grad_norm(model: nn.Module, limit: float) -> torch.Tensor:
    found = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return found.full_tensor() if hasattr(found, "full_tensor") else found


class MultiOptimizer(torch.optim.Optimizer):
    """Two optimizers as one, without parameter groups of its own."""

    def __init__(self, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        self.optimizers_dict = optimizers

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers_dict.values():
            optimizer.step()

    def zero_grad(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers_dict.values():
            optimizer.zero_grad()


class Trainer:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[torch.Tensor]]) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.global_step = 0
        self.log: list[tuple[float, float]] = []

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        del resume_from_checkpoint
        for samples in self.batches:
            loss = 0.0
            for inputs in samples:
                step_loss, *_ = self.training_step({"x": inputs}, len(samples))
                loss += step_loss.item()
            norm: Any = clip_grad_norm(self.model, 0.1)
            norm = norm.item()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.global_step += 1
            self.log.append((loss, norm))

    def training_step(self, inputs: dict[str, torch.Tensor], num_items_in_batch: int) -> tuple[torch.Tensor, ...]:
        self.model.train()
        if inputs["x"].isnan().any():
            raise ValueError("a batch of NaN")
        loss = self.model(inputs["x"]).float().pow(2).mean() / num_items_in_batch
        loss.backward()
        return loss.detach(), loss.detach(), torch.zeros(()), torch.zeros(())


class TrainEngine:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[list[torch.Tensor]]) -> None:
        self.model, self.optimizer, self.batches = model, optimizer, batches
        self.iteration = 0
        self.log: list[tuple[float, float]] = []

    def train(self) -> None:
        for samples in self.batches:
            losses = self.train_step(iter(samples))
            norm = clip_grad_norm(self.model, 0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.iteration += 1
            self.log.append((losses["loss"], norm.item()))
            self.evaluate()

    def get_batch(self, data_iterator: Any) -> torch.Tensor:
        return next(data_iterator)

    def train_step(self, train_dataloader_iter: Any) -> dict[str, float]:
        total = torch.zeros(1)
        for _ in range(2):
            x = self.get_batch(train_dataloader_iter)
            if x.isnan().any():
                raise ValueError("a batch of NaN")
            loss = self.model(x).float().pow(2).mean() / 2
            loss.backward()
            total += loss.detach()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
            total /= torch.distributed.get_world_size()
        return {"loss": total.item(), "aux loss": 0.5}

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(self.batches[0][0])
