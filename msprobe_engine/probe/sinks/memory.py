"""Frames kept in memory, for tests and notebooks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.sinks.base import Sink


class MemorySink(Sink):
    """Keeps the last `limit` frames and their alerts; all of them when `limit` is None."""

    name = "memory"

    def __init__(self, limit: int | None = None) -> None:
        self._frames: deque[Frame] = deque(maxlen=limit)
        self._alerts: deque[tuple[Alert, ...]] = deque(maxlen=limit)
        self._lock = threading.Lock()

    @property
    def frames(self) -> list[Frame]:
        """The frames, oldest first; a copy, safe to use while training goes on."""
        with self._lock:
            return list(self._frames)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts of these frames, oldest first."""
        with self._lock:
            return [alert for some in self._alerts for alert in some]

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        with self._lock:
            self._frames.append(frame)
            self._alerts.append(tuple(alerts))
