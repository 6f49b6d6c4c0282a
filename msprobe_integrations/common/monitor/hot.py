"""The settings file that is followed while the training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.probe.hot_settings import HotMonitor

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.probe import Probe


def hot_monitor(probe: Probe, path: Path, kind: str | None, first: ProbeSettings | None = None) -> HotMonitor:
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

    def __init__(self, probe: Probe, path: str | Path) -> None:
        self._probe, self._path = probe, Path(path)
        self._monitor: HotMonitor | None = None

    def end_step(self, step: int) -> None:
        """A step is over; what has changed in the monitor section holds from now on. The ranks are known by the first one."""
        if self._monitor is None:
            self._monitor = hot_monitor(self._probe, self._path, None)
        changed = self._monitor.end_step(step)
        if changed is not None and changed.monitor is not None:
            self._probe.follow(changed.monitor)

    def close(self) -> None:
        """Nobody looks at the file any more."""
        if self._monitor is not None:
            self._monitor.close()
