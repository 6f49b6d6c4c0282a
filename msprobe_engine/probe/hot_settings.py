"""The monitor follows its settings file while the training runs (``monitor.hot``, ``DYNAMIC_MONITOR`` for a ``monitor_config.json``).

Rank 0 alone looks at the file, at step boundaries, and sends what it read to the other ranks with the step from which it holds, so
that all ranks change together. As with incidents (`msprobe_engine.probe.incident.notify`), what is announced at the end of step k is seen
by every rank before it begins step k + 2 (in a large job k + 3). A single process changes with the next step.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from msprobe_engine.core import log
from msprobe_engine.core.errors import ProbeError, SettingsError
from msprobe_engine.core.io.output_files import WholeFile
from msprobe_engine.core.settings import text
from msprobe_engine.core.settings.hot import file_state
from msprobe_engine.core.settings.load import read_settings, recognise
from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings
from msprobe_engine.core.window import Window, of_monitor
from msprobe_engine.probe.incident.notify import MAX_BYTES, Notifier

KIND = "settings"
CHEAP_SECONDS = 0.0002
"""A look at the file that takes no longer is made at every step."""
COST = 100
"""On a slower file system the next look is no earlier than so many times as long as a look takes (the shortest of the last few)."""
_LONGEST = MAX_BYTES - 1024
_SWITCH = re.compile(r"""(["']?\b(?:dynamic_on|enabled)["']?\s*:\s*)(true|True|TRUE|yes|Yes|on|On)\b""")


_NEXT = -1


class Change(NamedTuple):
    """New settings and the first step they hold for, `_NEXT` for whichever comes next."""

    step: int
    settings: ProbeSettings


class HotMonitor:
    """Looks at the file, tells the other ranks, says when what was read begins to hold.

    Args:
        settings: what holds now.
        kind: as for `load_settings`.
        rank, world_size: place of this process.
        notifier: carries the text between ranks; not used by a single process.
        first: settings that are to hold from the first step boundary on.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        path: str | Path,
        settings: ProbeSettings,
        *,
        kind: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        notifier: Notifier | None = None,
        first: ProbeSettings | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.path = Path(path)
        self._kind, self._rank, self._world, self._notifier, self._clock = kind, rank, world_size, notifier, clock
        self._settings, self._first = settings, first
        self._wanted: deque[Change] = deque([Change(_NEXT, first)] if first is not None else ())
        self._seen: tuple[int, int] | None = file_state(self.path)
        self._not_before = float("-inf")
        self._looks: deque[float] = deque(maxlen=8)
        self._window = _window(settings)

    def end_step(self, step: int) -> ProbeSettings | None:
        """The step is over: the settings that hold from the next one on, None when they stay."""
        if self._notifier is not None and self._world > 1:
            for event in self._notifier.poll():
                if event.get("kind") == KIND and self._rank != 0:
                    self._receive(event)
        monitor = self._settings.monitor
        over = False
        if monitor is not None and monitor.enabled and self._window.is_wanted(step, None):
            self._window.count_step()
            over = self._window.over(step + 1)
        change = self._due(step + 1)
        if change is None and over:
            return self._over()
        if self._rank == 0:
            self._check_file(step)
            change = self._due(step + 1) or change
        if change is None:
            return None
        self._settings = change.settings
        self._window = _window(change.settings)
        on = change.settings.monitor is not None and change.settings.monitor.enabled
        if self._rank == 0:
            changed = "" if change.settings is self._first else " has changed"
            log.info(f"{self.path}{changed}: the monitor is {'on' if on else 'off'} from step {step + 1} on")
        return change.settings

    def _due(self, step: int) -> Change | None:
        """The last of the changes that hold from this step on. Every one of them holds, if only for a step, or the ranks would differ."""
        change = None
        while self._wanted and self._wanted[0].step <= step:
            change = self._wanted.popleft()
        if change is not None and step > change.step != _NEXT and self._world > 1:
            log.warning(f"the changed settings hold from step {step} here, not from {change.step}: their announcement came late")
        return change

    def close(self) -> None:
        """End the thread of the notifier."""
        if self._notifier is not None:
            self._notifier.close()

    def _check_file(self, step: int) -> None:
        begin = self._clock()
        if begin < self._not_before:
            return
        state = file_state(self.path)
        self._looks.append(self._clock() - begin)
        if len(self._looks) == self._looks.maxlen and (shortest := min(self._looks)) > CHEAP_SECONDS:
            self._not_before = begin + COST * shortest
        if state is None or state == self._seen:  # editors put a new file in place of the old one: for a moment there is none
            return
        self._seen = state
        try:
            raw = text.read_raw(self.path)
            settings, remarks = self._parse(raw)
            if self._world > 1 and len(raw) > _LONGEST:
                raise SettingsError(f"{self.path}: longer than {_LONGEST} bytes; that much cannot be sent to the other ranks")
        except ProbeError as error:
            log.warning(f"the settings were changed and cannot be used, those before stay: correct the file\n{error}")
            return
        for line in remarks:
            log.warn_once(f"settings: {line}", line)
        if settings == (self._wanted[-1].settings if self._wanted else self._settings):
            return
        several = self._world > 1 and self._notifier is not None
        change = Change(step + (self._notifier.lead_steps if several and self._notifier is not None else 1), settings)
        self._wanted.append(change)
        if several and self._notifier is not None:
            self._notifier.announce({"kind": KIND, "step": change.step, "text": raw.decode("utf-8", "replace")})

    def _receive(self, event: Mapping[str, Any]) -> None:
        try:
            settings, _ = self._parse(str(event["text"]).encode())
            self._wanted.append(Change(int(event["step"]), settings))
        except (ProbeError, KeyError, ValueError, TypeError, OverflowError) as error:
            log.warning(f"settings that rank 0 sent cannot be used here, those before stay: {error}")

    def _parse(self, raw: bytes) -> tuple[ProbeSettings, list[str]]:
        node = text.parse(raw, self.path)
        if not isinstance(node, Mapping):
            raise SettingsError(f"{self.path}: holds no mapping")
        settings, remarks = read_settings(node, kind=self._kind)
        if settings.monitor is None:  # the section was taken out: that switches off as well
            settings = replace(settings, monitor=MonitorSettings(enabled=False, hot=True))
        return settings, remarks

    def _over(self) -> ProbeSettings:
        """``collect_times`` steps were taken: off, here and in the file."""
        monitor = self._settings.monitor
        assert monitor is not None
        self._settings = replace(self._settings, monitor=replace(monitor, enabled=False))
        if self._rank == 0:
            self._write_off(monitor.collect_times)
        return self._settings

    def _write_off(self, times: int) -> None:
        said = f"the monitor has taken {times} steps and is off"
        try:
            raw = text.read_raw(self.path)
            if file_state(self.path) != self._seen:
                return  # somebody has changed it meanwhile: that is the next settings
            after = switched_off(raw, self.path)
            if after is None:
                log.info(f"{said}; to start it again change {self.path}")
                return
            target = Path(os.path.realpath(self.path))
            with WholeFile(target) as whole:
                os.fchmod(whole.file.fileno(), stat.S_IMODE(os.stat(target).st_mode))  # as its owner has it
                whole.file.write(after)
            self._seen = file_state(self.path)
            log.info(f"{said}; {self.path} says so, switch it on there to start again")
        except (OSError, ProbeError) as error:
            log.warning(f"{said}, but {self.path} could not be changed to say so: {error}")


def switched_off(raw: bytes, path: Path) -> bytes | None:
    """The same file with ``dynamic_on`` or ``monitor.enabled`` false and not one other byte changed; None when the switch is not in it."""
    node = text.parse(raw, path)
    if not isinstance(node, Mapping):
        return None
    wanted = dict(node)
    if recognise(node) == "monitor":
        if node.get("dynamic_on") is not True:
            return None
        wanted["dynamic_on"] = False
    else:
        section = node.get("monitor")
        if not isinstance(section, Mapping) or section.get("enabled") is not True:
            return None
        wanted["monitor"] = {**section, "enabled": False}
    content = raw.decode("utf-8", "surrogateescape")
    for match in _SWITCH.finditer(content):
        after = (content[: match.start(2)] + "false" + content[match.end(2) :]).encode("utf-8", "surrogateescape")
        if text.parse(after, path) == wanted:
            return after
    return None


def _window(settings: ProbeSettings) -> Window:
    """The steps that some rank monitors: the end of the collection does not depend on which."""
    return of_monitor(settings.monitor or MonitorSettings(enabled=False))
