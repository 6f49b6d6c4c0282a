"""What a run was started with, written by the probe itself when the training begins: ``<output_dir>/config_check_pack.zip``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from msprobe_engine.config.collect import system
from msprobe_engine.config.environment.variables import Environment, collect
from msprobe_engine.config.pack.background import BackgroundWriter
from msprobe_engine.config.pack.writer import PackWriter
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import debug, one_line, warn_once
from msprobe_engine.core.process.user_key import read_key
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.formats.pack import entries
from msprobe_engine.probe.output_claims import writes_files

NAME = "config_check_pack.zip"
LONGEST = 5.0
"""Seconds that the end of a process waits for the pack."""


class RunConfig:
    """Of one probe: takes the pack at the first step, once. The training waits for what has to be read at this moment (settings, switches,
    digests of weights); the rest is done and written by a thread.

    Attributes:
        doubtful: parameters to what is doubtful about them at this moment, in words.

    Args:
        program: is filled with what the run says of itself (`system.in_short`), once the pack's thread has collected it.
    """

    def __init__(self, settings: ProbeSettings, program: dict[str, Any] | None = None) -> None:
        self._settings = settings.config_check
        self._path = Path(self._settings.path or Path(settings.output_dir) / NAME)
        self._wanted = self._settings.enabled and (bool(self._settings.path) or writes_files(settings))
        self._background: BackgroundWriter | None = None
        self._taken: Callable[[], dict[str, Any]] | None = None
        self._program = {} if program is None else program
        self.doubtful: dict[str, str] = {}

    def begin_step(self, models: list[Any], optimizers: Any, step: int, frame: FrameType | None, *, hold: bool = False) -> None:
        """A step begins.

        Args:
            frame: of the caller; Trainers and engines are found in the calls around it.
            hold: what is taken is not written before `write` says where.

        Raises:
            SinkError: the pack cannot be begun.
        """
        if not self._wanted:
            return
        self._wanted = False
        try:
            self._collect_config(models, optimizers, step, frame)
        finally:  # settings are worth having without weights
            if not hold:
                self.write(self._path)

    def _collect_config(self, models: list[Any], optimizers: Any, step: int, frame: FrameType | None) -> None:
        rank = self._rank()
        rest = self._start(rank, models, optimizers, frame)
        made: dict[str, Any] = {}

        def collect_all() -> dict[str, Any]:  # one turn at the pack for all
            found = rest()
            self._program.update(system.in_short(found.get(entries.of_rank("system", rank), {})))
            return {**found, **made}

        self._taken = collect_all
        if self._settings.weights and models:
            made[entries.of_step("weights", step, rank)] = self._weights(models)

    def write(self, path: Path) -> None:
        """Write to `path` what was taken and not written yet, in a thread. Raises `SinkError`: the pack cannot be begun."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._background = BackgroundWriter(self._writer(path))
            self._background.submit(taken)

    def _environment(self) -> Environment:
        return collected_environment(self._settings.environment, self._settings.key_file)

    def _writer(self, path: Path) -> PackWriter:
        """A writer for this rank. Raises `SinkError`: the pack cannot be begun."""
        raise NotImplementedError

    def _rank(self) -> int:
        raise NotImplementedError

    def _start(self, rank: int, models: list[Any], optimizers: Any, frame: FrameType | None) -> Callable[[], dict[str, Any]]:
        """Takes what has to be read at this moment; returns what gives all entries, on another thread."""
        raise NotImplementedError

    def _weights(self, models: list[Any]) -> dict[str, Any]:
        raise NotImplementedError

    def close(self, left: float) -> None:
        """Finish the pack, within `left` seconds."""
        if self._background is not None:
            self._background.close(min(left, LONGEST))


def usable_key(key_file: str | Path | None) -> bytes:
    """The user's key. One that cannot be read costs the digests, which is said, and not the training."""
    try:
        return read_key(key_file)
    except UsageError as error:
        warn_once(f"config check {error}", f"config check: {one_line(str(error))}; no digests of them are in the pack")
        return b""


def collected_environment(added: Sequence[str], key_file: str | Path | None) -> Environment:
    """Variables of this process as they may be written."""
    found = collect(added=added, key=usable_key(key_file))
    for note in found.notes():
        debug(f"config check: {one_line(note)}")
    return found
