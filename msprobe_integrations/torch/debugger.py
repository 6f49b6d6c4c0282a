"""`PrecisionDebugger`: dumps under the names users already type.

debugger = PrecisionDebugger("config.json")
for batch in data:
    debugger.start(model)
    loss = train(batch)
    debugger.stop()
    debugger.step()
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from msprobe_engine.errors import UsageError
from msprobe_engine.guard import Faults
from msprobe_engine.log import get_logger
from msprobe_engine.pipeline import Pipeline
from msprobe_engine.settings.load import load_settings
from msprobe_engine.settings.schema import DumpSettings
from msprobe_engine.writer import Writer
from msprobe_integrations.torch.capture import Capture
from msprobe_integrations.torch.dump_run import DumpRun

_log = get_logger()


class PrecisionDebugger:
    """One per process: a second construction returns the first object. All methods but the constructor are class methods, so any
    file of a program may call ``PrecisionDebugger.start()``.

    Args:
        config_path: ``config.json`` (or ``probe.yaml`` with a ``dump`` section).
        task, dump_path, level, step, rank: override the file.

    Raises:
        SettingsError: the configuration is wrong; the message names every wrong key.
    """

    _instance: ClassVar[PrecisionDebugger | None] = None
    _built = False

    def __new__(cls, *_: Any, **__: Any) -> PrecisionDebugger:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __init__(
        self,
        config_path: str | Path | None = None,
        task: str | None = None,
        dump_path: str | None = None,
        level: str | None = None,
        model: nn.Module | Sequence[nn.Module] | None = None,
        step: Sequence[int | str] | None = None,
        rank: Sequence[int | str] | None = None,
    ) -> None:
        if self._built:
            if any(v is not None for v in (config_path, task, dump_path, level, step, rank)):
                _log.warning("PrecisionDebugger exists already: the arguments of this second construction are not used")
            return
        arguments = {"task": task, "dump_path": dump_path, "level": level, "step": step, "rank": rank}
        overrides: dict[str, Any] = {k: v for k, v in arguments.items() if v is not None}
        try:
            source: Any = config_path if config_path is not None else {"dump": {}}
            settings = load_settings(source, **overrides)
            if settings.dump is None:
                raise UsageError(f"{config_path} has no 'dump' section: PrecisionDebugger has nothing to do")
            self.run = DumpRun(settings, settings.dump, model)
        except BaseException:
            type(self)._instance = None
            raise
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forked)
        self._built = True

    @property
    def dump(self) -> DumpSettings:
        """The settings in use."""
        return self.run.dump

    @property
    def capture(self) -> Capture:
        """What sees the calls of a step."""
        return self.run.capture

    @property
    def pipeline(self) -> Pipeline:
        """What a step has shown so far."""
        return self.run.pipeline

    @property
    def writer(self) -> Writer:
        """The background thread that writes finished steps."""
        return self.run.writer

    @property
    def faults(self) -> Faults:
        """What failed inside the probe."""
        return self.run.faults

    @classmethod
    def start(
        cls,
        model: nn.Module | Sequence[nn.Module] | None = None,
        token_range: Sequence[int] | None = None,
        rank_id: int | None = None,
        scheduled_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Begin (or go on with) the dump of the current step, when it is wanted.

        Args:
            model: the model, or a list of models; needed once for levels L0 and mix.
            token_range: not available yet.
            rank_id: rank to use in file names when there is no process group.
            scheduled_tokens: not available yet.

        Raises:
            UsageError: no model at level L0 or mix, or something that is no module.
        """
        cls._get().run.start(model, token_range, rank_id, scheduled_tokens)

    @classmethod
    def stop(cls) -> None:
        """End collection; gradients of calls that were seen still come until `step`."""
        cls._get().run.stop()

    @classmethod
    def step(cls) -> None:
        """The training step is over: write it, count on."""
        cls._get().run.step()

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Set the step counter; call it before the loop.

        Raises:
            UsageError: `step` is no int or negative.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise UsageError(f"set_init_step: step is {step!r}; allowed: an int >= 0")
        cls._get().run.step_number = step

    @classmethod
    def _get(cls) -> PrecisionDebugger:
        if cls._instance is None or not cls._instance._built:
            raise UsageError("PrecisionDebugger instance is not created: construct it first, PrecisionDebugger('config.json')")
        return cls._instance

    def _at_exit(self) -> None:
        self.run.at_exit()

    def _forked(self) -> None:
        self.run.forked()
        atexit.unregister(self._at_exit)
