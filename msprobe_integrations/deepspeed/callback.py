"""For people who own their training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.deepspeed import key, patches
from msprobe_integrations.deepspeed.engine import EngineObserver
from msprobe_integrations.torch.training import owner


class DeepSpeedCallback:
    """A probe for a loop around a DeepSpeed engine.

        probe = DeepSpeedCallback("probe.yaml")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds_config.json")
        probe.on_setup(engine)
        for batch in data:
            engine.backward(engine(batch)); engine.step()
        probe.close()

    Steps, micro batches, evaluation and checkpoints are seen by themselves.

    Args:
        config: settings, or the path of a settings file.

    Raises:
        SettingsError: the settings are wrong. Nothing else ever raises into the training, unless the settings say ``strict``.
    """

    def __init__(self, config: ProbeSettings | str | Path) -> None:
        self.observer = EngineObserver.of(config)

    def on_setup(self, engine: Any) -> None:
        """After `deepspeed.initialize`: this engine is followed. A collective call under ZeRO: all ranks make it."""
        with self.observer.safely("setting up"):
            owner.own("user", self.observer)
            patches.observe(lambda: None)
            key.choose(engine)
        self.observer.setup([engine], getattr(engine, "optimizer", None))

    def close(self) -> None:
        """After the last step: DeepSpeed's classes and this engine are as they were."""
        self.observer.close()
        with self.observer.safely("closing"):
            owner.release(self.observer)
        with self.observer.safely("closing"):
            patches.restore()
