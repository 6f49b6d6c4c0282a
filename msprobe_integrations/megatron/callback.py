"""For people who own their training loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.megatron.observer import TrainingObserver
from msprobe_integrations.megatron.patches import current, observe
from msprobe_integrations.torch.training import owner


class MegatronCallback:
    """A probe for a loop on megatron-core.

        probe = MegatronCallback("probe.yaml")
        probe.on_setup(model_chunks, optimizer)
        for step in range(n):
            probe.on_step_begin(step)
            losses = forward_backward(...); optimizer.step()
            probe.on_step_end({"loss": loss})
        probe.close()

    Args:
        config: settings, or the path of a settings file.

    Raises:
        SettingsError: the settings are wrong. Nothing else ever raises into the training, unless the settings say ``strict``.
    """

    def __init__(self, config: ProbeSettings | str | Path) -> None:
        self.observer = TrainingObserver.of(config)
        owner.own("user", self.observer)
        observe(lambda: self.observer, whole_loop=False)
        current()
        self._step: Any = None

    def on_setup(self, models: Any, optimizer: Any = None) -> None:
        """After model chunks and optimizer are built. A collective call under the distributed optimizer: all ranks make it."""
        self.observer.setup(models, optimizer)

    def on_step_begin(self, step: int) -> None:
        """Before the step's first micro batch."""
        self.on_step_end()
        self._step = self.observer.driven(step)
        self._scalars = self._step.__enter__()

    def on_step_end(self, scalars: Mapping[str, Any] | None = None) -> None:
        """After `optimizer.step`. Scalars may be tensors; they are not read here."""
        if self._step is None:
            return
        step, self._step = self._step, None
        self._scalars.update(scalars or {})
        step.__exit__(None, None, None)

    def on_evaluation_begin(self) -> None:
        """Nothing is seen until `on_evaluation_end`."""
        if self.observer.probe is not None:
            self.observer.probe.pause()

    def on_evaluation_end(self) -> None:
        """Training again."""
        if self.observer.probe is not None:
            self.observer.probe.resume()

    def close(self) -> None:
        """After the last step."""
        self.on_step_end()
        self.observer.close()
        with self.observer.safely("closing"):
            owner.release(self.observer)
