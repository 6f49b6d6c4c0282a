"""What the always-on probe of a training is, whatever the framework: settings, steps, watches and their faults, and the end.

A framework's probe (`TorchProbe`, `MindSporeProbe`) says what it watches with (`monitor/parts.py`).
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msprobe_engine.core.guard import is_of_training
from msprobe_engine.core.records import Frame, TensorRef
from msprobe_engine.core.settings.schema import MonitorSettings, ProbeSettings
from msprobe_engine.core.window import Window, of_monitor
from msprobe_engine.probe.output_claims import OutputClaims
from msprobe_engine.probe.session import Session
from msprobe_engine.probe.sinks.base import Sink
from msprobe_integrations import requirements
from msprobe_integrations.autoload import report, request
from msprobe_integrations.common.monitor.capture_scheduler import CaptureScheduler
from msprobe_integrations.common.monitor.hot import FollowedFile
from msprobe_integrations.common.monitor.parts import ProbeBase
from msprobe_integrations.common.monitor.usage_warnings import UsageWarnings
from msprobe_integrations.common.parameters.parameter_monitor import Attached, Find, ParameterMonitor
from msprobe_integrations.common.ranks.shutdown_deadline import ShutdownDeadline
from msprobe_integrations.common.shutdown import at_exit, signal_shutdown, trackers_end
from msprobe_integrations.common.statistics.statistics_options import StatisticsOptions

Self = TypeVar("Self", bound="Probe")


class Probe(ProbeBase):
    """Monitor, rules, sinks and incidents around a training loop.

    All methods are safe to call at any time: a fault inside disables the part it happened in and the training goes on.
    """

    def __init__(self, settings: ProbeSettings, *, extra_sinks: Sequence[Sink] = ()) -> None:
        self.backend = self.backend_type()
        self.outputs = OutputClaims()
        self.settings = settings = self.outputs.place(settings, self.backend.rank())
        StatisticsOptions.of(settings).apply(self.backend)
        local_rank, local_world_size = self._local_place()
        self.session = Session(
            settings,
            self.backend,
            local_rank=local_rank,
            local_world_size=local_world_size,
            notifier=self.make_notifier(),
            extra_sinks=extra_sinks,
            missing=requirements.MISSING,
        )
        self.pipeline = self.session.pipeline
        self.faults = self.session.faults
        self.step = 0
        self.told_micro_step = -1  # none was set
        self._paused = 0
        self._closed = False
        self._said = False
        self._in_step = False
        self._patience = ShutdownDeadline()
        self._membership = self._make_membership()
        m = settings.monitor if settings.monitor is not None and settings.monitor.enabled else None
        self._window = _window_of(m)
        self._due = False
        self._models: list[Any] = []
        self._optimizer: Any = None
        self._file: FollowedFile | None = None
        self.parameters = self._make_parameters()
        self._advice = UsageWarnings(self, self.parameters)
        self._run_config = self._make_run_config()
        self.pipeline.listeners.append(self._advice.on_frame)
        self.scheduler = CaptureScheduler(self.session, self._make_capture, self._make_dump)
        self._watch = self._make_watch(m)
        signal_shutdown.at_signal(self.close, settings.exit_patience)
        if settings.sinks.tracker.enabled:
            trackers_end.register(self.session.hand_over_to_tracker)
        at_exit.register(self.close)  # last: where anything of this fails there is no probe, and nothing to be closed
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _stop_in_fork(this()))

    def _make_parameters(self) -> ParameterMonitor:
        raise NotImplementedError

    @classmethod
    def from_config(cls: type[Self], path: str | Path, **arguments: Any) -> Self:
        """Build from a settings file; raises `SettingsError` when it is wrong. With ``monitor.hot`` the file is followed."""
        probe = cls(request.of_script(path), **arguments)
        probe._of_user()
        if probe.monitor is not None and probe.monitor.hot:
            probe.follow_file(path)
        return probe

    @property
    def frames(self) -> list[Frame]:
        """One frame per step, oldest first, with ``sinks: {memory: true}``; empty without."""
        return self.session.frames

    def count_micro_steps_again(self) -> None:
        """The step runs once more: its first pass of the model is micro batch 0 again."""
        if self._watch is not None:
            self._watch.count_again()

    @property
    def micro_step(self) -> int:
        """Current micro batch, -1 outside. When nobody sets it: how many training passes of the model came before in this step, counted
        in steps in which modules are watched."""
        return self.told_micro_step if self._watch is None else self._watch.micro_step()

    @micro_step.setter
    def micro_step(self, value: int) -> None:
        self.told_micro_step = value
        if self.scheduler.current is not None:
            self.scheduler.current.recorder.micro_step = value

    def attach(
        self,
        models: Any,
        optimizer: Any = None,
        on_update: Callable[[bool], None] | None = None,
        find: Find | None = None,
    ) -> None:
        """Name the modules of the model (or of a list: virtual pipeline chunks) and, with an optimizer, watch its parameters. Called
        again, the newest objects count. Other ranks are not waited for: what lies in shards is merged as soon as all that hold the rest
        have attached, too.

        Args:
            models: the model, or its virtual pipeline chunks.
            optimizer: an optimizer, or a list of optimizers that have different parameters.
            on_update: called after every update of an optimizer, with True when it was skipped; from inside its hooks.
            find: what finds the `ParameterSource` of an optimizer; None: the framework's own.
        """
        with self.guard("attach"):
            self._models, self._optimizer = self.chunks_of(models, optimizer), optimizer
            self._prepare_models()
            attached = self._models if len(self._models) > 1 else self._models[0]
            self.scheduler.attach(attached)
            if self._watch is not None:
                self._watch.attach(self._models)
            self.parameters.attach(Attached(self._models, optimizer, on_update, find))

    def detach(self) -> None:
        """Let go of models and optimizers, between two steps: until the next `attach` nothing here holds them."""
        with self.guard("attach"):
            self._models, self._optimizer = [], None
            self.scheduler.attach([])
            if self._watch is not None:
                self._watch.detach()
            self.parameters.detach()

    def apply_monitor_settings(self, monitor: MonitorSettings, *, in_update: bool = False) -> None:
        """Other monitor settings hold from now on: between two steps, or in a step before its first forward pass. Rules, sinks and
        incidents stay as they are.

        Args:
            in_update: called from inside a hook of the optimizer, where none may come or go: `settle` does what is left.
        """
        before, self.settings = self.settings.monitor, replace(self.settings, monitor=monitor)
        self.session.apply_settings(self.settings)
        same = before is not None and replace(before, ops=monitor.ops, eps=monitor.eps) == monitor
        if self._closed:
            return
        self.scheduler.always = StatisticsOptions.of(self.settings)
        self.scheduler.always.apply(self.backend)
        if same:
            return
        active = monitor if monitor.enabled else None
        if self._watch is not None:
            self._watch.remove()
        self._watch = None
        with self.guard("attach"):
            self._window = _window_of(active)
            self._watch = self._make_watch(active)
            if self._watch is not None and self._models:
                self._watch.attach(self._models)
        self.parameters.stale = True
        if self._in_step:
            self._due = self._window is not None and self._window.is_wanted(self.step, self._membership.rank)
            with self.guard("capture"):
                self._begin_monitor()
        if not in_update:
            self.reattach_parameters()

    def reattach_parameters(self) -> None:
        """After `apply_monitor_settings` inside of an update, outside of it, before the next backward pass: watch parameters anew."""
        if self.parameters.stale and not self._closed:
            with self.guard("attach"):
                self.parameters.attach()
            if self._in_step:
                self.parameters.begin_step(self._due)

    def follow_file(self, path: str | Path) -> None:
        """Look at the settings file after every step and follow its monitor section (``monitor.hot``); not with `follow` by hand."""
        self._file = FollowedFile(self, path)

    def begin_step(self, step: int) -> None:
        """A step begins; hooks are put on where they are wanted. One that nobody has ended is over with it, without numbers of the loop."""
        if self._closed:
            return
        signal_shutdown.check_wakeup_fd()
        self._patience.renew()
        if self._in_step and not self.pipeline.empty:
            self._finish_step()
        self.step = step
        self._in_step = True
        self._due = False
        with self.guard("step begin"):
            self._open_step(step)

    def _open_step(self, step: int) -> None:
        if not self._said:
            self._said = True
            self.session.start_first_step(step)
        self._membership.update_rank()
        trackers_end.patch_new_trackers()
        if self._run_config is not None:
            with self.guard("config check"):
                self._run_config.begin_step(self._models, self._optimizer, step, sys._getframe(1))
                self.pipeline.doubtful, self._run_config.doubtful = self._run_config.doubtful, {}
        self._due = self._window is not None and self._window.is_wanted(step, self._membership.rank)
        self.parameters.begin_step(self._due)
        if self._paused or not self.faults.is_enabled("capture"):
            return
        with self.guard("capture"):
            self.scheduler.open(step)
            self._begin_monitor()

    def _begin_monitor(self) -> None:
        if self._watch is not None:
            self._watch.begin() if self._due else self._watch.remove()

    def end_step(self, scalars: Mapping[str, Any] | None = None, *, complete: bool = True) -> None:
        """A step is over: everything seen becomes a frame; `complete` False: it was cut off."""
        if self._closed:
            return
        if not self._in_step:
            self._advice.no_begin()
        scalars = self._advice.numbers(scalars)
        if self._due:
            self._step_ends()
        self._finish_step(self._numbers(scalars), complete)
        if self._file is not None and self.faults.is_enabled("monitor.hot"):
            with self.guard("monitor.hot"):
                changed = self._file.end_step(self.step)
                if changed is not None:
                    self.apply_monitor_settings(changed)

    def _finish_step(self, scalars: Mapping[str, Any] | None = None, complete: bool = True) -> None:
        self._in_step = False
        self.micro_step = -1
        report.report_event("step" if complete else "cut")
        stacks: list[list[str]] | None = None
        again = False
        with self.guard("capture"):
            stacks = self.scheduler.end_step(self.step)
            if self._watch is not None:
                self._watch.end_step()
            if self._due and self._window is not None:
                self._window.count_step()
            again = self._window is not None and self._window.is_wanted(self.step + 1, self._membership.rank)
            if self._watch is not None and not again:
                self._watch.remove()
        if self._due:
            self.parameters.end_step(scalars or {}, again)
        self.parameters.replicas.end_step(self.step)
        self.parameters.leave_where_off()
        self.session.end_step(self.step, scalars, stacks, complete)
        self._due = False
        self.session.stop_if_wanted(self.step)

    def sample(
        self,
        family: str,
        name: str,
        tensor: Any,
        *,
        phase: str = "",
        micro_step: int = -1,
        vpp_stage: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> TensorRef:
        """Start the reduction of one tensor and note it as a sample of this step; no wait."""
        with self.unseen():
            return self.pipeline.sample(family, name, tensor, phase=phase, micro_step=micro_step, vpp_stage=vpp_stage, extra=extra)

    def pause(self) -> None:
        """Evaluation begins: nothing is seen until `resume`."""
        self._paused += 1
        self.session.hold(True)
        self.scheduler.pause()
        if self._watch is not None:
            self._watch.pause()

    def resume(self) -> None:
        """Evaluation is over."""
        self._paused = max(0, self._paused - 1)
        if not self._paused:
            self.session.hold(False)
            with self.guard("capture"):
                if self._in_step:  # between two steps nothing was seen before, either
                    self.scheduler.resume()
                    if self._watch is not None and self._due:
                        self._watch.begin()

    def drain(self, *, cut: bool = False) -> None:
        """Hand on what was seen; other ranks are waited for, and only briefly when the training has raised (`cut`, or so it looks)."""
        if cut:
            self._patience.cut()
        self.pipeline.patience = self._patience.left()
        self.pipeline.advance(wait=True)

    def close(self) -> None:
        """Finish, flush, take all hooks off. Called at interpreter exit too.

        Raises:
            Exception: an operator of the training has failed, which came to light here (`msprobe_engine.core.guard.of_training`).
        """
        if self._closed:
            return
        self._closed = True
        with self.guard("closing"):
            at_exit.unregister(self.close)
            trackers_end.unregister(self.session.hand_over_to_tracker)
        failed: Exception | None = None
        try:
            self._patience.limit()
            self.pipeline.patience = self._patience.left()
            for end in self._ends():
                try:
                    with self.guard("closing"):
                        end()
                except Exception as error:  # of the training: files are complete first
                    if not is_of_training(error):
                        raise
                    failed = failed or error
        finally:
            signal_shutdown.forget(self.close)
        if failed is not None:
            raise failed

    def _ends(self) -> Iterator[Callable[[], Any]]:
        """What is done at the end, in this order, whatever becomes of the others."""
        if self._in_step and not self.pipeline.empty:  # cut off by an exception: what was seen may say why
            yield lambda: self._finish_step(complete=False)
        if self._file is not None:
            yield self._file.close
        yield self.scheduler.close
        if self._watch is not None:
            yield self._watch.remove
        yield self.parameters.remove
        yield from self._further_ends()
        if self._run_config is not None:
            yield lambda: self._run_config.close(signal_shutdown.get_seconds_left() / 4)
        yield self.parameters.hurry
        yield self.drain
        yield lambda: self.parameters.finish(self._patience.left())
        yield partial(self.session.close, signalled=signal_shutdown.get_seconds_left() < math.inf)
        yield from (self._membership.close, self.parameters.close, self.outputs.release)


def _window_of(m: MonitorSettings | None) -> Window | None:
    return None if m is None else of_monitor(m, m.rank)


def _stop_in_fork(probe: Probe | None) -> None:
    """In a forked child (a worker of a data loader): it is not the training, nothing is seen or written there."""
    if probe is not None and not probe._closed:
        probe._closed = True
        probe._due = False
        at_exit.unregister(probe.close)
        trackers_end.unregister(probe.session.hand_over_to_tracker)
        if probe.scheduler.current is not None:
            probe.scheduler.current.on = False
        if probe._watch is not None:
            probe._watch.remove()
        probe.parameters.remove()
