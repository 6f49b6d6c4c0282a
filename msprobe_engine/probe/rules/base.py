"""The rule protocol: what looks at finished frames and raises alerts."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame


@runtime_checkable
class Rule(Protocol):
    """Looks at one finished frame at a time, in step order; keeps what history it needs. Called on the training thread at a
    step boundary: work on the frame's columns with numpy and touch single records only when something fired."""

    name: str

    def check(self, frame: Frame) -> list[Alert]: ...
