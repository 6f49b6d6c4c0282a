"""What a dumped run was started with, so that a difference of settings can be named where two dumps part.

Below a ``dump_path`` the existing tool takes every name for a step or a rank, so the pack lies in the directory of a rank, where it reads
the files that it knows: of the first step that is written, on the first rank that dumps. In a run directory it lies where a run has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.formats.pack.kind import NAME
from msprobe_integrations.common.config.run import LONGEST, RunConfig


class SettingsPack:
    """Of one debugger.

    Args:
        make: what takes the pack in this framework.
    """

    def __init__(self, make: Callable[[ProbeSettings], RunConfig]) -> None:
        self._make = make
        self._config: RunConfig | None = None

    def begin(self, settings: ProbeSettings, rank: int | None, model: Any, step: int, frame: FrameType | None) -> None:
        """A step is dumped; only the first one is of interest.

        Args:
            frame: where the calls in progress begin: what is a local of theirs and moves weights belongs to the training.

        Raises:
            SinkError: the pack cannot be begun.
        """
        if self._config is not None:
            return
        dump, pack = settings.dump, settings.config_check
        beside = dump is not None and bool(dump.dump_path) and not pack.path
        if dump is not None and beside:
            first = (rank or 0) == min(dump.rank, default=0)
            pack = replace(pack, weights=False, enabled=pack.enabled and first)  # a dump has the weights
        self._config = self._make(replace(settings, config_check=pack))
        self._config.begin_step([] if model is None else [model], None, step, frame, hold=beside)

    def wrote(self, directory: Path) -> None:
        """A step is written, of which `directory` holds the files: a step that is not kept has no directory in which a pack could lie.

        Raises:
            SinkError: the pack cannot be begun.
        """
        if self._config is not None:
            self._config.write(directory / NAME)

    def close(self, left: float = LONGEST) -> None:
        """The process ends, or the directory gets another name: the pack is written within `left` seconds."""
        if self._config is not None:
            self._config.close(left)
