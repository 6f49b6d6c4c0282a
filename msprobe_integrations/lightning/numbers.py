"""Numbers that Lightning's Trainer has of a step."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.requirements import MissingNameError, need, optional
from msprobe_integrations.torch.training.trainer_loop import TrainerObserver, number, scale_of

STEPS = "steps of Lightning's Trainer"
LOGGED = "what the module logs at every step"


def stepped(trainer: Any) -> int:
    """Batches that ended in an update so far.

    Raises:
        MissingNameError: this version does not say; numbers of steps would be others than the loggers'.
    """
    return int(need(need(trainer.fit_loop, "epoch_loop", for_=STEPS), "_batches_that_stepped", for_=STEPS))


def accumulates(trainer: Any) -> bool:
    """Does the update come after a later batch?

    Raises:
        MissingNameError: this version does not say; every batch would be a step.
    """
    return bool(need(trainer.fit_loop, "_should_accumulate", for_=STEPS)())


def scalars(trainer: Any, observer: TrainerObserver) -> dict[str, Any]:
    """The step's numbers: loss, what the module logs at every step, as it is there already. Nothing is read."""
    found: dict[str, Any] = {}
    with suppress(MissingNameError):
        for item in (need(trainer, "_results", for_=LOGGED) or {}).values():
            cached = need(item, "_forward_cache", for_=LOGGED)
            if isinstance(cached, torch.Tensor) and cached.numel() == 1 and item.meta.on_step:
                found[item.meta.name] = number(cached)
    if observer.loss is not None:
        found["loss"] = observer.loss  # divided by the number of accumulated batches already
    return found


def update(trainer: Any, optimizer: Any) -> dict[str, Any]:
    """What the update is made with, before schedulers and the scaler go on to their next."""
    found: dict[str, Any] = {}
    with suppress(MissingNameError):
        precision = need(trainer, "precision_plugin", for_="scalar loss_scale")
        scale = scale_of(optional(precision, "scaler", because="only that of mixed precision has one"))
        found |= {} if scale is None else {"loss_scale": scale}
    first = optimizer if len(trainer.optimizers) < 2 else trainer.optimizers[0]
    return {**found, **{name: number(value) for name, value in update_numbers(first.param_groups).items()}}
