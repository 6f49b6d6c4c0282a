"""The hot switch: a configuration file that is read again while the training runs (``dump_enable`` true or false)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from msprobe_engine.core import log
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import read_settings
from msprobe_engine.core.settings.schema import ProbeSettings

SECONDS_ON, SECONDS_OFF = 0.5, 3.0
"""How often the file is looked at while the dump is on and off. A look is one ``stat``."""

Check = Callable[[ProbeSettings], None]


def file_state(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written: time (ns) and size; None when there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class HotSwitch:
    """Looks whether the file has changed and reads it again.

    The state of a file is its time of change and size. A file that is gone counts as unchanged: editors write a new one in its
    place. A file that cannot be used switches the dump off, which is said once; a usable one switches it on again if it says so.

    Args:
        overrides: as given to `load_settings`; they hold for every reading.
        settings: what was read first; its ``dump.dump_enable`` is true or false.
        check: raises `SettingsError` for settings that cannot be used here, besides what is wrong in itself.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        path: str | Path,
        overrides: Mapping[str, Any],
        settings: ProbeSettings,
        check: Check = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self._overrides = dict(overrides)
        self._settings = settings
        self._check = check
        self._clock = clock
        self._looked = float("-inf")
        self._seen = file_state(self.path)

    @property
    def on(self) -> bool:
        """What ``dump_enable`` was in the last reading."""
        return self._settings.dump is not None and bool(self._settings.dump.dump_enable)

    def poll(self) -> ProbeSettings | None:
        """The settings to use from now on, None when they are the same as before."""
        now = self._clock()
        if now - self._looked < (SECONDS_ON if self.on else SECONDS_OFF):
            return None
        self._looked = now
        state = file_state(self.path)
        if state is None or state == self._seen:
            return None
        self._seen = state
        read = self._reread_settings()
        if read == self._settings:
            return None
        self._settings = read
        return read

    def _reread_settings(self) -> ProbeSettings:
        before = self._settings.dump
        assert before is not None
        try:
            settings, warnings = read_settings(self.path, **self._overrides)
            if settings.dump is None:
                raise SettingsError(f"{self.path}: has no 'dump' section")
            self._check(settings)
        except SettingsError as error:
            log.warning(f"the dump is switched off: the configuration was changed and cannot be used; correct the file\n{error}")
            return replace(self._settings, dump=replace(before, dump_enable=False))
        for line in warnings:
            log.warn_once(f"settings: {line}", line)
        if settings.dump.dump_enable is None:  # the key was removed: on stays on, off stays off
            settings = replace(settings, dump=replace(settings.dump, dump_enable=before.dump_enable))
        return settings
