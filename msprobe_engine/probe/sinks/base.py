"""The sink protocol: where finished frames go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame


@runtime_checkable
class Sink(Protocol):
    """Receives every finished frame, in step order, on the writer thread (never on the training thread).

    A sink raises `SinkError` (or any exception: the writer treats both alike) when it cannot write; the writer then counts the
    loss, says so once, and goes on with the other sinks. `write` must leave earlier steps readable whatever happens in it.
    A sink whose files somebody reads afterwards has `losses`, a `msprobe_engine.formats.monitor.losses.LossFile` beside them: the writer
    puts there what could not be written.
    """

    name: str

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None: ...

    def flush(self) -> None:
        """Everything written so far is on disk (or visible to a scraper) when this returns."""
        ...

    def close(self) -> None:
        """Called once, also after an error; must not raise."""
        ...
