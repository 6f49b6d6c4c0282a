"""The gradient probe (section ``grad_probe``) of a training that an integration follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.torch.gradient_probe.probe import GradientProbe
from msprobe_integrations.torch.monitor.targets import unwrapped
from msprobe_integrations.torch.parameters.find import OURS


class LoopGradients:
    """Watches the optimizers of a loop; hooks come and go only at the borders of steps, never inside of an update.

    Args:
        settings: with a section ``grad_probe``.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self.probe = GradientProbe(settings, at_once=False)

    def follow(self, models: Sequence[Any], optimizer: Any) -> None:
        """These are trained from now on, no longer what was before."""
        probe = self.probe
        with probe.guard():
            probe.forget()
            modules = [model for model in models if isinstance(model, nn.Module)]
            optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
            inner = [one if isinstance(one, Optimizer) or _of_a_framework(one) else getattr(one, "optimizer", one) for one in optimizers]
            if optimizers and all(isinstance(one, Optimizer) for one in inner):
                modules = [unwrapped(module) for module in modules]  # names without wrappers; others need what wraps them
                optimizers = inner
            if modules:
                probe.monitor(modules if len(modules) > 1 else modules[0], optimizers or None)

    def settle(self) -> None:
        """A step begins or ends: take off what is over."""
        self.probe.settle()

    def close(self) -> None:
        self.probe.close()


def _of_a_framework(optimizer: Any) -> bool:
    """Is this an optimizer of Megatron or DeepSpeed, whose gradients are found by its own tables? What it wraps has other tensors."""
    return any(cls.__module__.partition(".")[0] in OURS for cls in type(optimizer).__mro__)
