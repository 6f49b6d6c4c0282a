"""The probe as a callback of Lightning's Trainer (``lightning.pytorch`` and ``pytorch_lightning``, which have classes of their own)."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.lightning.reliance import NAME, PACKAGE, TABLE
from msprobe_integrations.requirements import MissingNameError, need, optional
from msprobe_integrations.torch.training.trainer_callback import ProbeCallback
from msprobe_integrations.torch.training.trainer_loop import TrainerObserver, exclude_methods, isolated, number, save_before_stop, scale_of

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> Any:
    """`Callback` of the package that the program uses. The two are alike, and either Trainer takes the other's."""
    loaded = [name for name in _PACKAGES if name in sys.modules]
    packages = loaded or [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    return importlib.import_module((packages or list(_PACKAGES))[0]).Callback


def _save(trainer: Any) -> None:
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "on_alert_stop.ckpt")


class MsprobeCallback(ProbeCallback, _base()):  # type: ignore[misc]  # known when it runs
    """``Trainer(..., callbacks=[MsprobeCallback("probe.yaml")])``. Steps are counted as Lightning's loggers count them: one per batch
    that ends in an update, from 0; with manual optimization one per batch. Arguments and errors: `ProbeCallback`.
    """

    @isolated
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizers are there, wrapped; the sanity check is over."""
        try:
            count_updates(trainer), accumulates(trainer)
        except MissingNameError:  # said: nothing tells the steps, and the training is not followed
            return
        if (observer := self.follow("lightning")) is not None:
            observer.relies, observer.objects = (NAME, PACKAGE, TABLE), {"trainer": trainer}
            observer.setup(getattr(trainer.strategy, "model", None) or pl_module, list(trainer.optimizers))
            observer.training_begins(count_updates(trainer))
            for undo in exclude_methods(observer, trainer, "save_checkpoint"):
                observer.undo(undo)

    @isolated
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """A micro batch, the first of a step or a later one."""
        if (observer := self.observer) is not None:
            if not observer.in_step:
                observer.begin(count_updates(trainer))
            observer.pass_begins()

    @isolated
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:  # noqa: ARG002
        """After the backward pass."""
        if self.observer is not None:
            self.observer.add_scalars(update(trainer, optimizer))

    @isolated
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """After the update, if this batch has one."""
        if (observer := self.observer) is not None and observer.in_step:
            observer.pass_ends(outputs.get("loss") if isinstance(outputs, dict) else outputs)
            if not accumulates(trainer):
                with save_before_stop("lightning", partial(_save, trainer)):
                    observer.end(scalars(trainer, observer))

    @isolated
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Nothing is seen until it ends."""
        if self.observer is not None:
            self.observer.pause()

    @isolated
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Training again."""
        if self.observer is not None:
            self.observer.resume()

    @isolated
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """What was seen of the step may say why."""
        if self.observer is not None:
            self.observer.interrupted()

    @isolated
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """What was seen is written."""
        if self.observer is not None:
            self.observer.flush()


STEPS = "steps of Lightning's Trainer"
LOGGED = "what the module logs at every step"


def count_updates(trainer: Any) -> int:
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
    numbers: dict[str, Any] = {}
    with suppress(MissingNameError):
        for item in (need(trainer, "_results", for_=LOGGED) or {}).values():
            cached = need(item, "_forward_cache", for_=LOGGED)
            if isinstance(cached, torch.Tensor) and cached.numel() == 1 and item.meta.on_step:
                numbers[item.meta.name] = number(cached)
    if observer.loss is not None:
        numbers["loss"] = observer.loss  # divided by the number of accumulated batches already
    return numbers


def update(trainer: Any, optimizer: Any) -> dict[str, Any]:
    """What the update is made with, before schedulers and the scaler go on to their next."""
    numbers: dict[str, Any] = {}
    with suppress(MissingNameError):
        precision = need(trainer, "precision_plugin", for_="scalar loss_scale")
        scale = scale_of(optional(precision, "scaler", because="only that of mixed precision has one"))
        numbers |= {} if scale is None else {"loss_scale": scale}
    first = optimizer if len(trainer.optimizers) < 2 else trainer.optimizers[0]
    return {**numbers, **{name: number(value) for name, value in update_numbers(first.param_groups).items()}}
