"""What a run says of itself: when it began, on which hosts, how long its steps took, by which settings it was monitored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_HOSTS, _SETTINGS, _LONGEST = 64, 100, 300
"""Hosts and settings that a page names, and characters of a text."""


@dataclass(frozen=True)
class Facts:
    """Of all ranks of a run together; what its files do not say is empty.

    Attributes:
        started: when the first of its ranks began, as run.json has it.
        seconds: sum of the time of its steps, of the rank with most; None: not written.
        hosts: names, ascending, at most `_HOSTS`; `host_count` says of how many.
        world: number of ranks that the run had.
        version: of this tool.
        settings: of the monitor, as JSON by name, of the lowest rank.
    """

    started: str = ""
    seconds: float | None = None
    hosts: tuple[str, ...] = ()
    host_count: int = 0
    world: int = 0
    version: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, infos: Iterable[Mapping[str, Any]], seconds: Iterable[float]) -> Facts:
        """Of what each rank says (``run.json``), the lowest first, and how long its steps took."""
        known = [info for info in infos if info]
        if not known:
            return cls(seconds=max(seconds, default=None))
        began = [(_number(info.get("started_unix")), _shorten_text(str(info.get("started") or ""))) for info in known]
        hosts = sorted({_shorten_text(host) for info in known if isinstance(host := info.get("host"), str) and host})
        monitor = known[0].get("monitor")
        settings = {**(monitor if isinstance(monitor, Mapping) else {})}
        if known[0].get("rules") is not None:
            settings["rules"] = known[0]["rules"]
        return cls(
            started=min(began)[1],
            seconds=max(seconds, default=None),
            hosts=tuple(hosts[:_HOSTS]),
            host_count=len(hosts),
            world=int(max(_number(info.get("world_size"), 0.0) for info in known)),
            version=_shorten_text(str(known[0].get("version") or "")),
            settings={
                _shorten_text(str(key)): _shorten_text(json.dumps(value, default=str)) for key, value in list(settings.items())[:_SETTINGS]
            },
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "started": self.started,
            "seconds": self.seconds,
            "hosts": list(self.hosts),
            "hostCount": self.host_count,
            "world": self.world,
            "version": self.version,
            "settings": list(self.settings.items()),
        }


def _number(value: Any, otherwise: float = math.inf) -> float:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if usable else otherwise


def _shorten_text(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
