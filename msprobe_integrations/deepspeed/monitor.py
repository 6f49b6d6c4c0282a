"""DeepSpeed's monitor (TensorBoard, W&B, CSV, Comet as the user's ds_config has them), both ways: what it writes are scalars of the step,
and with ``sinks.deepspeed`` our scalars and alerts are written by it.

Its writers are made for the training thread, on rank 0, with the number of samples as the axis. So the sink only keeps what the writer
thread brings, a bounded amount, and the training thread hands it over after an update.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame
from msprobe_engine.probe.sinks.base import Sink

_log = get_logger()
PREFIX = "msprobe/"
PER_STEP = 64
"""Events of one step at most; alerts come first."""
STEPS = 256
"""Steps that wait for the training thread at most, the latest ones."""
_NAMES = {"lr": "learning_rate", "train_loss": "loss"}
_NOT_OURS = ("eval_loss",)
Event = tuple[str, float, int]


class MonitorSink(Sink):
    """Events for DeepSpeed's monitor."""

    name = "deepspeed"

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, list[tuple[str, float]]]] = deque(maxlen=STEPS)
        self._samples: dict[int, int] = {}
        self._engine: Any = None

    def attach(self, engine: Any) -> None:
        """Events go to this engine's monitor. Says so when it has no writer."""
        self._engine = engine
        if not getattr(getattr(engine, "monitor", None), "enabled", False):
            _log.warning("sinks.deepspeed is on, but the DeepSpeed configuration has no monitor: switch one on there, like csv_monitor")

    def write(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """On the writer thread: keep the step's numbers, and how many alerts every rule has raised."""
        counts = Counter(alert.rule for alert in alerts)
        values = [(f"{PREFIX}alerts/{rule}", float(count)) for rule, count in sorted(counts.items())]
        values += [(f"{PREFIX}{name}", value) for name, value in frame.scalars.items() if math.isfinite(value)]
        if values:
            self._waiting.append((frame.step, values[:PER_STEP]))

    def hand_over(self, write: Callable[[list[Event]], None]) -> None:
        """On the training thread, after an update: what has come in since goes to the user's writers.

        A writer that wants its axis to grow (W&B) gets the number of samples of now, the others that of the step.
        """
        engine = self._engine
        if engine is None:
            return
        now = int(getattr(engine, "global_samples", 0))
        self._samples[int(getattr(engine, "global_steps", 0)) - 1] = now
        growing = getattr(getattr(engine, "monitor", None), "wandb_monitor", None) is not None
        events: list[Event] = []
        while self._waiting:
            step, values = self._waiting.popleft()
            samples = now if growing else self._samples.get(step, now)
            events += [(name, value, samples) for name, value in values]
        for step in sorted(self._samples)[:-STEPS]:
            del self._samples[step]
        if events and getattr(engine.monitor, "enabled", False):
            write(events)


class Events:
    """Listens to what DeepSpeed writes, and writes.

    Args:
        engine: whose ``monitor.write_events`` is wrapped.
        note: takes scalars of the step in progress.
        safely: guard of the observer.
    """

    def __init__(self, engine: Any, note: Callable[[dict[str, Any]], None], safely: Callable[[str], AbstractContextManager[None]]) -> None:
        self._monitor = getattr(engine, "monitor", None)
        self._note = note
        self._safely = safely
        self._original: Callable[..., Any] | None = getattr(self._monitor, "write_events", None)
        self._mine: Callable[..., Any] | None = None

    def put_on(self) -> None:
        original = self._original
        if original is None:
            return

        @functools.wraps(original)
        def write_events(*args: Any, **kwargs: Any) -> Any:
            with self._safely("events of DeepSpeed's monitor"):
                self._note(scalars_of(args[0] if args else kwargs.get("event_list")))
            return original(*args, **kwargs)

        self._mine = write_events
        self._monitor.write_events = write_events  # type: ignore[union-attr]

    def take_off(self) -> None:
        """Its own method again."""
        if self._monitor is not None and vars(self._monitor).get("write_events") is self._mine and self._mine is not None:
            del self._monitor.write_events

    def write(self, events: list[Event]) -> None:
        """To the user's writers, past the listener."""
        if self._original is not None:
            self._original(events)


def scalars_of(events: Any) -> dict[str, float]:
    """Numbers of DeepSpeed's own events ``("Train/Samples/lr", 0.1, 64)`` under the probe's names."""
    scalars: dict[str, float] = {}
    for event in events if isinstance(events, (list, tuple)) else ():
        if not isinstance(event, (list, tuple)) or len(event) < 2 or not isinstance(event[0], str):
            continue
        tag, value = event[0], event[1]
        name = tag.rpartition("/")[2]
        if tag.startswith("Train/Samples/") and name not in _NOT_OURS and isinstance(value, (int, float)):
            scalars[_NAMES.get(name, name)] = float(value)
    return scalars
