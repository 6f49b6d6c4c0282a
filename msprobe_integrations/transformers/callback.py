"""The probe as a callback of Hugging Face's Trainer, and of what is built on it (Seq2SeqTrainer, the Trainers of TRL)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.patching import replace
from msprobe_integrations.requirements import MissingNameError, need, optional
from msprobe_integrations.torch.training.trainer_callback import ProbeCallback
from msprobe_integrations.torch.training.trainer_loop import exclude_methods, isolated, number, one_pass, save_before_stop, scale_of
from msprobe_integrations.transformers import patches
from msprobe_integrations.transformers.reliance import NAME, PACKAGE, TABLE

EXCLUDED = ("evaluate", "predict", "_evaluate", "_save_checkpoint", "_load_best_model")
"""Methods of a Trainer inside of which nothing is seen."""


class MsprobeCallback(ProbeCallback, TrainerCallback):
    """``Trainer(..., callbacks=[MsprobeCallback("probe.yaml")])``. Steps are the Trainer's global steps, before the update: from 0.
    Arguments and errors: `ProbeCallback`.
    """

    def __init__(self, config: ProbeSettings | str | Path | None = None) -> None:
        super().__init__(config)
        self._trainer: Any = None
        if config is not None:
            patches.patch_trainer(self, follow_training)

    def close(self) -> None:
        super().close()
        patches.unpatch_trainer(self)

    @contextmanager
    def observe_training(self, trainer: Any) -> Iterator[None]:
        """Around ``trainer.train``."""
        observer = self.follow("transformers")
        if observer is None:
            yield
            return
        self._trainer = trainer
        observer.relies, observer.objects = (NAME, PACKAGE, TABLE), {"trainer": trainer}
        undo = exclude_methods(observer, trainer, *EXCLUDED)
        undo += [replace(trainer, "training_step", partial(one_pass, observer)), replace(trainer, "_maybe_log_save_evaluate", self._log)]
        try:
            yield
        except BaseException:
            observer.interrupted()
            raise
        finally:
            for each in reversed(undo):
                each()
            self._trainer = None
            observer.flush()

    @isolated
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Model and optimizer are there, wrapped."""
        if self.observer is not None and self._trainer is not None:
            model = optional(self._trainer, "model_wrapped", kwargs.get("model"), because="the bare model has the same modules")
            self.observer.setup(model, self._trainer.optimizer)
            self.observer.training_begins(state.global_step)

    @isolated
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Before the first micro batch of an update."""
        if self.observer is not None and self._trainer is not None:
            self.observer.begin(state.global_step)

    @isolated
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        """What the update is made with."""
        if self.observer is not None and optimizer is not None:
            found = update_numbers(optimizer.param_groups)
            with suppress(MissingNameError):
                scale = scale_of(self._of_accelerator("scaler", "scalar loss_scale"))
                found |= {} if scale is None else {"loss_scale": scale}
            self.observer.add_scalars(found)

    @isolated
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """The update is over, where the Trainer has no `_maybe_log_save_evaluate` that says it with the gradient norm."""
        if not hasattr(self._trainer, "_maybe_log_save_evaluate"):
            self._end_step(None)

    def _log(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The update is over, or the epoch; the Trainer logs, evaluates and saves if it is time to."""
        self._end_step(kwargs.get("grad_norm", args[1] if len(args) > 1 else None))
        return original(*args, **kwargs)

    @isolated
    def _end_step(self, grad_norm: Any) -> None:
        observer = self.observer
        if observer is not None and observer.has_updated(self._trainer.state.global_step):
            found = {"grad_norm": number(grad_norm)}
            with suppress(MissingNameError):
                found["skipped"] = float(self._of_accelerator("optimizer_step_was_skipped", "scalar skipped"))
            with save_before_stop("transformers", self._save):
                observer.end({name: value for name, value in found.items() if value is not None})

    def _of_accelerator(self, name: str, part: str) -> Any:
        return need(need(self._trainer, "accelerator", for_=part), name, for_=part)

    def _save(self) -> None:
        self._trainer._save_checkpoint(self._trainer.model, trial=None)


@contextmanager
def follow_training(trainer: Any) -> Iterator[None]:
    """Around ``trainer.train``: with the Trainer's own `MsprobeCallback`, or one that is there as long as this training."""
    handler = trainer.callback_handler
    callback = next((each for each in handler.callbacks if isinstance(each, MsprobeCallback)), None)
    added = callback is None
    if callback is None:
        callback = MsprobeCallback()
        handler.add_callback(callback)
    try:
        with callback.observe_training(trainer):
            yield
    finally:
        if added and callback in handler.callbacks:
            handler.remove_callback(callback)
