"""Numbers that Lightning's Trainer has of a step."""

from __future__ import annotations

from typing import Any

import torch

from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.torch.training.trainer_loop import TrainerObserver, number, scale_of


def stepped(trainer: Any) -> int:
    """Batches that ended in an update so far."""
    found = getattr(getattr(trainer.fit_loop, "epoch_loop", None), "_batches_that_stepped", None)
    return int(trainer.global_step if found is None else found)


def accumulates(trainer: Any) -> bool:
    """Does the update come after a later batch? Where this version does not say so, every batch is a step."""
    ask = getattr(trainer.fit_loop, "_should_accumulate", None)
    return ask is not None and bool(ask())


def scalars(trainer: Any, observer: TrainerObserver) -> dict[str, Any]:
    """The step's numbers: loss, what the module logs at every step, as it is there already. Nothing is read."""
    found: dict[str, Any] = {}
    results = getattr(trainer, "_results", None) or {}
    for item in results.values():
        cached = getattr(item, "_forward_cache", None)
        if isinstance(cached, torch.Tensor) and cached.numel() == 1 and item.meta.on_step:
            found[item.meta.name] = number(cached)
    if observer.loss is not None:
        found["loss"] = observer.loss  # divided by the number of accumulated batches already
    return found


def update(trainer: Any, optimizer: Any) -> dict[str, Any]:
    """What the update is made with, before schedulers and the scaler go on to their next."""
    scale = scale_of(getattr(getattr(trainer, "precision_plugin", None), "scaler", None))
    found = {} if scale is None else {"loss_scale": scale}
    first = optimizer if len(trainer.optimizers) < 2 else trainer.optimizers[0]
    return {**found, **{name: number(value) for name, value in update_numbers(first.param_groups).items()}}
