"""Sends every API call of the wanted steps to a benchmark host, in place of a dump: `OnlineCalls` follows the debugger's calls."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from msprobe_engine.accuracy.online import messages
from msprobe_engine.accuracy.online.connect import check, connect, finish
from msprobe_engine.accuracy.online.events import DROPPING, RECOVERED, Event
from msprobe_engine.accuracy.online.options import BLOCK
from msprobe_engine.accuracy.online.sender import CallStore, SentStep, Transport
from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import DumpSettings, OnlineSettings
from msprobe_engine.core.settings.selection import selection
from msprobe_engine.core.window import Window
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.writing.step_text import StepText
from msprobe_engine.formats.dump.writing.template import Options
from msprobe_engine.probe.pipeline import Pipeline
from msprobe_engine.probe.sinks.base import Sink
from msprobe_engine.probe.writer import Writer
from msprobe_integrations.common.capture.filters import record_filter
from msprobe_integrations.common.capture.stacks import Stacks
from msprobe_integrations.common.dump.dump_plugins import DumpPlugin
from msprobe_integrations.common.ranks.shutdown_deadline import has_raised
from msprobe_integrations.common.shutdown import signal_shutdown
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.capture.api import ApiCapture
from msprobe_integrations.torch.capture.level import Capture
from msprobe_integrations.torch.dump.tensor_saver import TensorSaver
from msprobe_integrations.torch.hooks.graph_tasks import current_graph_task

PART = "online pre-check"
_SUFFIX = ".pt"
_log = get_logger()


class OnlineCalls(DumpPlugin):
    """See `msprobe_integrations.common.dump.dump_plugins.Extra`.

    Args:
        dump: with a section ``online``.

    Raises:
        SettingsError: nothing can be sent with these settings.
    """

    def __init__(self, dump: DumpSettings, faults: Faults) -> None:
        self._online = dump.online or OnlineSettings()
        check(self._online)
        self._dump = dump
        self._faults = faults
        self._window = Window(dump.rank, dump.step)
        self._backend = TorchBackend()
        self._writer = Writer([], faults)
        self._pipeline = Pipeline(self._backend, [], self._writer, faults, [self._count_lost])
        budget = dump.memory_budget_mb << 20
        self._budget, self._queue_bytes = budget, max(1, budget // 2)
        self._text = StepText(
            Options((), lambda _: True, _SUFFIX, dump.summary_mode),
            level=dump.level,
            task=dump.task,
            framework=self._backend.framework,
            extra_info=dump.extra_info,
            selection=selection(dump),
        )
        self._transport: Transport | None = None
        self._rank = 0
        self._store: CallStore | None = None
        self._sink: CallSink | None = None
        self._keeper: TensorSaver | None = None
        self._capture: Capture | None = None
        self._step: int | None = None
        self._seeing = self._over = self._left_out = False
        self._lost: dict[str, int] = {}
        self._texts: Stacks | None = None
        self._told_kinds: set[str] = set()
        self._ending: threading.Thread | None = None

    @property
    def api(self) -> ApiCapture | None:
        """What sees calls of APIs now: functions that the user registered call it."""
        return None if self._capture is None else self._capture.api

    # ---- calls of the debugger ----

    def begin(self, model: Any, step: int, rank: int | None) -> None:
        """``start()``."""
        self._left_out = bool(self._dump.rank) and (rank or 0) not in self._dump.rank
        if self._over or not self._window.is_wanted(step, rank) or not self._faults.is_enabled(PART):
            return
        with self._faults.guard(PART):
            self._connect(rank or 0)
            assert self._store is not None
            assert self._keeper is not None
            assert self._capture is not None
            if self._step is None:
                self._store.begin_step(step, "")
                self._keeper.begin_step(step)
                self._step = step
            if model is not None:
                self._capture.attach(model)
            self._capture.open()
            self._seeing = True

    def pause(self) -> None:
        self._seeing = False
        if self._capture is not None:
            self._capture.pause()

    def end_step(self, next_step: int) -> None:
        self._finish_step(complete=True)
        if self._window.over(next_step):
            self._over = True
            self._disconnect(wait=False)
        elif self._capture is not None and not self._window.is_wanted(next_step, self._rank):
            self._capture.close()

    def close(self) -> None:
        """Send what is there and say that this was all."""
        if not self._over:
            self._over = True
            cut = self._seeing or has_raised() or signal_shutdown.get_seconds_left() < math.inf
            self._finish_step(complete=not cut)
            if self._store is None and not self._left_out:
                _log.warning("%s: nothing was sent: start() was called in no step that 'step' wants", PART)
            self._disconnect()
        if self._ending is not None:
            self._ending.join()

    # ---- parts ----

    def _connect(self, rank: int) -> None:
        """The way to the benchmark host, anew when the rank of this process has become another one."""
        if self._transport is not None and rank == self._rank:
            return
        self._finish_step(complete=False)
        self._disconnect()
        self._rank = rank
        self._transport = transport = connect(self._online, rank, self._queue_bytes, self._log_event)
        self._store = CallStore(
            self._text,
            transport,
            rank,
            self._stacks,
            self._faults,
            budget=self._budget,
            count=self._writer.lose,
            patience=_patience(self._online),
        )
        self._store.send(
            {"kind": messages.RUN, "version": messages.VERSION, "world": self._backend.world_size(), "framework": self._backend.framework},
            [],
        )
        self._sink = CallSink(self._store)
        self._writer.sinks[:] = [self._sink]
        self._keeper = TensorSaver(self._backend, self._store, self._faults, self._pipeline.lose)
        self._capture = Capture(
            self._pipeline,
            self._dump.level,
            stacks=self._dump.extra_info,
            data_mode=("forward",) if self._online.recompute else ("all",),
            kept=record_filter(self._dump, current_graph_task),
            keeper=self._keeper,
        )
        self._texts = self._capture.recorder.stacks

    def _stacks(self) -> list[list[str]]:
        """Called by the thread that makes messages, which may be behind."""
        return [] if self._texts is None else self._texts.texts()

    def _finish_step(self, complete: bool) -> None:
        if self._step is None or self._capture is None:
            return
        step, self._step, self._seeing = self._step, None, False
        with self._faults.guard(PART):
            self._capture.pause()
            stacks = self._capture.end_step()
            if not self._pipeline.entries:
                _log.warning("%s, step %d: no call of an API was seen between start() and stop()", PART, step)
            self._pipeline.end_step(step, stacks, complete)

    def _disconnect(self, wait: bool = True) -> None:
        """Everything goes on its way, and the other end is told that it was all; without `wait` in the background."""
        transport, sink, store, capture = self._transport, self._sink, self._store, self._capture
        self._transport = self._capture = self._keeper = None
        if transport is None or sink is None or store is None:
            return
        with self._faults.guard(PART):
            if capture is not None:
                capture.close()
            self._pipeline.advance(wait=True)
        if wait:
            self._finish_transport(transport, sink, store)
        else:
            self._ending = threading.Thread(
                target=self._finish_transport, args=(transport, sink, store), name="msprobe-online-last", daemon=True
            )
            self._ending.start()

    def _finish_transport(self, transport: Transport, sink: CallSink, store: CallStore) -> None:
        with self._faults.guard(PART):
            self._writer.flush()
            counts = finish(transport, self._online.longest_wait, signal_shutdown.get_seconds_left)
            store.memory.trim()
            lost = {**self._lost, **self._writer.lost}
            missing = {"refused": counts.refused, "dropped": counts.dropped, "not acknowledged": counts.lost}
            lost |= {f"messages {why}": count for why, count in missing.items() if count}
            text = f"{sink.steps} steps with {store.calls:,} records of calls for {self._where()}, {counts.bytes / 1e6:.1f} MB have arrived"
            if lost:
                said = ", ".join(f"{reason} {count:,}" for reason, count in sorted(lost.items()))
                _log.warning("%s: %s, but not everything is there: %s", PART, text, said)
            else:
                _log.info("%s: %s", PART, text)

    def _where(self) -> str:
        return self._online.nfs_path or f"{self._online.host}:{self._online.port}"

    def _log_event(self, event: Event) -> None:
        again = event.kind in (DROPPING, RECOVERED) and event.kind in self._told_kinds
        self._told_kinds.add(event.kind)
        log = _log.debug if again else _log.warning if event.bad else _log.info
        log("%s: %s", PART, event.message)

    def _count_lost(self, frame: Frame, _alerts: Sequence[Alert]) -> None:
        for reason, count in frame.lost.items():
            self._lost[reason] = self._lost.get(reason, 0) + count


def _patience(online: OnlineSettings) -> float:
    """How long a hook waits for memory while none comes free: longer than a message for room in the queue, which gives memory back."""
    return online.longest_wait + 5.0 if online.policy == BLOCK else 0.0


class CallSink(Sink):
    """The sink that sends what is known when a step is over.

    Args:
        store: the calls of the step went through it.
    """

    name = "online"

    def __init__(self, store: CallStore) -> None:
        self._store = store
        self.steps = 0
        """Steps whose end was sent."""

    def write(self, frame: Frame, alerts: Sequence[Alert] = ()) -> None:  # noqa: ARG002 - no business of a pre-check
        """Send the files of a step."""
        step = self._store.step(frame.step)
        saved = self._store.finish(frame.step)
        assert isinstance(step, SentStep)
        ready = self._store.text.prepare(frame, saved, {"dump_data_dir": "", "tensor_format": "packed"})
        files: dict[str, list[bytes | memoryview]] = {messages.NAMES: [step.data_names()]}
        if listed := step.not_saved():
            files[layout.NOT_SAVED] = [listed]
        files |= self._store.text.documents(ready)
        header = {
            "kind": messages.STEP,
            "step": frame.step,
            "complete": frame.complete,
            "files": {name: sum(len(part) for part in parts) for name, parts in files.items()},
        }
        self.steps += self._store.send(header, [part for parts in files.values() for part in parts], important=True)
        self._store.over(frame.step)

    def drain(self) -> None:
        """Wait until all messages of calls are with the transport."""
        self._store.drain()

    def close(self) -> None:
        """Give memory back."""
        self._store.close()
