"""The observer of the FSDP2 loops of MindSpeed-LLM and MindSpeed-MM. Apart from `fsdp2`, which must not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msprobe_integrations.common.parameters.optimizer_numbers import LEARNING_RATE, update_numbers
from msprobe_integrations.mindspeed import reliance
from msprobe_integrations.patching import replace
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.training.trainer_loop import TrainerObserver


class Fsdp2Observer(TrainerObserver):
    """Ends a step when the Trainer's optimizer has made its."""

    relies = (reliance.NAME, reliance.PACKAGE, reliance.FSDP2)
    trainer: Any = None

    @staticmethod
    def count_updates(trainer: Any) -> int:
        """Updates that a Trainer of MindSpeed-LLM, or an engine of MindSpeed-MM, has made."""
        return int(trainer.iteration if hasattr(trainer, "train_step") else trainer.global_step)

    def follow_trainer(self, trainer: Any) -> None:
        """The next steps are those of `trainer`; nothing happens when the last ones were."""
        if self.trainer is not trainer:
            self.trainer = trainer
            several = getattr(trainer.optimizer, "optimizers_dict", None)  # with expert parallelism: one per kind of parameter
            self.setup([trainer.model], list(several.values()) if several else trainer.optimizer)

    def attach(self, probe: TorchProbe) -> None:
        """The Trainer's model and optimizer."""
        self.objects = {"engine" if hasattr(self.trainer, "train_step") else "trainer": self.trainer}
        super().attach(probe)
        self.undo(replace(self.trainer.optimizer, "step", self._step))

    def _step(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = original(*args, **kwargs)
        if self.in_step:
            self.end()
        return result

    def numbers(self) -> dict[str, Any]:
        """Loss, and learning rate and the like."""
        logged = super().numbers()
        first = self.optimizer[0] if isinstance(self.optimizer, list) else self.optimizer
        numbers = update_numbers(getattr(first, "param_groups", None) or ())
        return {**logged, **numbers} if isinstance(numbers.get(LEARNING_RATE), float) else logged
