"""What a dumped run was started with, so that a difference of settings can be named where two dumps part.

Below a ``dump_path`` the existing tool takes every name for a step or a rank, so the pack lies in the directory of a rank, where it reads
the files that it knows: of the first step that is dumped, on the first rank that dumps. In a run directory it lies where a run has it.
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


class StartedWith:
    """Of one debugger.

    Args:
        make: what takes the pack in this framework.
    """

    def __init__(self, make: Callable[[ProbeSettings], RunConfig]) -> None:
        self._make = make
        self._config: RunConfig | None = None

    def begin(self, settings: ProbeSettings, directory: Path, rank: int | None, model: Any, step: int, frame: FrameType | None) -> None:
        """A step is dumped; only the first one is of interest.

        Args:
            directory: of this step and rank.
            frame: where the calls in progress begin: what is a local of theirs and moves weights belongs to the training.

        Raises:
            SinkError: the pack cannot be begun.
        """
        if self._config is not None or not directory.is_dir():  # what cannot be written has been said of the dump
            return
        dump, pack = settings.dump, settings.config_check
        if dump is not None and dump.dump_path and not pack.path:
            first = (rank or 0) == min(dump.rank, default=0)
            pack = replace(pack, path=str(directory / NAME), weights=False, enabled=pack.enabled and first)  # a dump has the weights
        self._config = self._make(replace(settings, config_check=pack))
        self._config.begin([] if model is None else [model], None, step, frame)

    def flush(self) -> None:
        """What was taken is written now: the directory gets another name."""
        self.close(LONGEST)

    def close(self, left: float) -> None:
        """The process ends, or something waits: the pack is written within `left` seconds."""
        if self._config is not None:
            self._config.close(left)
