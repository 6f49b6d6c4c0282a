"""What the callbacks of all Trainers have in common: whose settings count, and how the probe is let go of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.autoload import request
from msprobe_integrations.torch.training import owner
from msprobe_integrations.torch.training.trainer_loop import TrainerObserver


class ProbeCallback:
    """For a callback class of a framework to inherit from. Its hooks call, in this order:

    - ``follow(name)`` when the training begins, then on the observer that it returns, if any: ``setup(model, optimizer)`` and
      ``training_begins(updates so far)``;
    - in each step ``begin(updates so far)``; for each micro batch ``pass_begins()`` and ``pass_ends(loss)``; after the update
      ``end(other numbers)``;
    - ``pause()`` and ``resume()`` around evaluation, ``flush()`` when the training is over.

    `isolated` (of `trainer_loop`) around each hook keeps faults of the probe from the Trainer; `lightning/callback.py` is an example.

    Args:
        config: settings, or the path of a settings file. None: what the environment or the launch line asks for, if it does.

    Raises:
        SettingsError: the settings are wrong. Nothing else ever raises into the training, unless the settings say ``strict``.
    """

    def __init__(self, config: ProbeSettings | str | Path | None = None) -> None:
        self.config = request.of_script(config) if isinstance(config, (str, Path)) else config
        self.observer: TrainerObserver | None = None
        self._file = config if isinstance(config, (str, Path)) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "observer": None}  # ranks that are spawned have their own

    def follow(self, name: str) -> TrainerObserver | None:
        """A training begins: who follows it. A callback with settings of its own follows whatever else is asked for.

        Args:
            name: of the integration, a row of `FRAMEWORKS` in `autoload/`. A callback outside of msprobe gives `config`, and any name.
        """
        if self.config is None:
            self.observer = owner.claim(name, lambda settings, file: TrainerObserver(settings, file=file))
        else:
            self.observer = self.observer or TrainerObserver(self.config, file=self._file)
            if owner.current() is not self.observer:
                owner.own("user", self.observer)
        return self.observer

    def close(self) -> None:
        """Take everything off and finish the files; else done at the end of the process."""
        if self.observer is not None:
            self.observer.close()
            with self.observer.safely("closing"):
                owner.release(self.observer)
