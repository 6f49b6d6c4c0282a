"""The settings file that is followed while the training runs."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings
from msprobe_engine.probe.hot_settings import HotMonitor
from msprobe_integrations.common.monitor.parts import ProbeBase


def hot_monitor(probe: ProbeBase, path: Path, kind: str | None, first: ProbeSettings | None = None) -> HotMonitor:
    """Follows `path`; ranks of an initialised process group change together.

    Args:
        probe: what holds now.
        kind: as for `load_settings`.
        first: settings that are to hold from the first step boundary on.
    """
    rank, world = probe.backend.rank() or 0, probe.backend.world_size()
    notifier = probe.make_notifier("hot") if world > 1 else None
    return HotMonitor(path, probe.settings, kind=kind, rank=rank, world_size=world, notifier=notifier, first=first)


class FollowedFile:
    """The settings file of a probe, looked at after every step (``monitor.hot``)."""

    def __init__(self, probe: ProbeBase, path: str | Path) -> None:
        self._probe, self._path = probe, Path(path)
        self._monitor: HotMonitor | None = None

    def end_step(self, step: int) -> MonitorSettings | None:
        """A step is over: the monitor section that holds from now on, None: it has not changed. The ranks are known by the first one."""
        if self._monitor is None:
            self._monitor = hot_monitor(self._probe, self._path, None)
        changed = self._monitor.end_step(step)
        return None if changed is None else changed.monitor

    def close(self) -> None:
        """Nobody looks at the file any more."""
        if self._monitor is not None:
            self._monitor.close()
