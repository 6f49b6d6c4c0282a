"""Where finished frames go: the base of every sink."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import MonitorSettings
from msprobe_engine.formats.monitor.losses import LossFile


class Sink(ABC):
    """Receives every finished frame, in step order, on the writer thread (never on the training thread).

    A sink raises `SinkError` (or any exception: the writer treats both alike) when it cannot write; the writer then counts the
    loss, says so once, and goes on with the other sinks. `write` must leave earlier steps readable whatever happens in it.

    Attributes:
        name: as in the settings and in messages.
        tensors: False: other ranks write the samples (``sinks.rank``); it gets frames without.
        losses: beside files that somebody reads afterwards: the writer puts there what could not be written.
    """

    name: str
    tensors: bool = True
    losses: LossFile | None = None

    @property
    def size(self) -> int | None:
        """Bytes that its files take; None: it has none that ``sinks.max_gb`` limits."""
        return None

    @property
    def home(self) -> Path | None:
        """The file or directory that everything goes to; None: there is none. Where it is gone, `make_again` is called."""
        return None

    def make_again(self) -> None:
        """`home` is gone: make it again and go on there. What was open stays open when that cannot be done.

        Raises:
            SinkError: it cannot be done.
        """

    @property
    def port(self) -> int | None:
        """Where it answers requests; None: nowhere."""
        return None

    def prepare(self) -> None:
        """On the training thread, before a frame is queued for `write`: for what only this thread can see. Takes microseconds."""

    @abstractmethod
    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None: ...

    def drain(self) -> None:
        """Wait for what takes minutes (files of tensors), as long as anything moves at all. Called before `flush`."""

    def flush(self) -> None:
        """Everything written so far is on disk (or visible to a scraper) when this returns."""

    def close(self) -> None:
        """Called once, also after an error; must not raise."""

    def follow(self, monitor: MonitorSettings) -> None:
        """The monitor's settings are others from the next frame on."""

    # What the probe knows about itself: mappings that their owners go on changing.
    def watch_info(self, info: Mapping[str, Any]) -> None:
        """Facts about the rank (tp, pp, dp, ...)."""

    def watch_remark(self, key: str, facts: Mapping[str, Any]) -> None:
        """What the run says about itself under a key."""

    def watch_losses(self, losses: Mapping[str, int]) -> None:
        """Frames lost, by name of the sink or queue."""

    def watch_cost(self, cost: Mapping[str, float]) -> None:
        """``cost["seconds"]``: time spent at step boundaries."""


class SinkInFront(Sink):
    """A sink that looks at frames before another one gets them."""

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self._sink = sink

    def drain(self) -> None:
        self._sink.drain()

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self._sink.close()
