"""Follows one training loop: from the events that an integration reports to steps of the probe. The same for all frameworks on torch.

Whatever goes wrong in here stays here: every event is guarded, and a probe that cannot be built leaves the training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.autoload import request
from msprobe_integrations.common.shutdown import at_exit, signal_shutdown, trackers_end
from msprobe_integrations.torch.gradient_probe.probe import GradientProbe
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.monitor.targets import unwrap_model
from msprobe_integrations.torch.parameters.find import OURS
from msprobe_integrations.torch.training.batches import Batches
from msprobe_integrations.torch.training.module_call_interceptor import ModuleCallInterceptor

_log = get_logger()
Observer = TypeVar("Observer", bound="LoopObserver")


class LoopObserver:
    """One per training loop. Integrations report events; what is special to a framework they say by overriding `attach` and `numbers`.

    Args:
        settings: the probe's settings; the probe itself is built when the model is there (the rank is known then).
        make_probe: builds the probe; for tests.
        file: where the settings come from; followed with ``monitor.hot``.
    """

    def __init__(
        self, settings: ProbeSettings, make_probe: Callable[[ProbeSettings], TorchProbe] = TorchProbe, *, file: str | Path | None = None
    ) -> None:
        self.settings = settings
        self.probe: TorchProbe | None = None
        self._failed: TorchProbe | None = None
        self.step = 0
        """Number of the current or next step: optimizer steps from 0, skipped ones counted."""
        self.models: list[Any] = []
        """As the loop has them: wrapped."""
        self.optimizer: Any = None
        self._file = file
        self._make_probe = make_probe
        self._broken = False
        self._said = False
        self._open = False
        self._driven = 0
        self._scalars: dict[str, Any] = {}
        self._undo: list[Callable[[], None]] = []
        self._gradients: LoopGradients | None = None
        self._batches = Batches()

    @classmethod
    def of(cls: type[Observer], config: ProbeSettings | str | Path) -> Observer:
        """As a script asks for it: from settings, or from a settings file, which is followed with ``monitor.hot``; raises `SettingsError`
        when it is wrong."""
        return cls(config) if isinstance(config, ProbeSettings) else cls(request.of_script(config), file=config)

    # for a framework

    def attach(self, probe: TorchProbe) -> None:
        """`models` and `optimizer` are new: name them to the probe."""
        probe.attach([m for m in self.models if isinstance(m, nn.Module)], self.optimizer)

    def numbers(self) -> dict[str, Any]:
        """Scalars that the framework knows at the end of a step; tensors are fine. What the loop itself reports counts more."""
        return {}

    def is_step_done(self) -> bool:
        """Has the step in progress been done, although nobody has said that it is over? For loops whose steps end with the next."""
        return False

    def leave_step(self) -> None:
        """The step is over; what only belongs to it is closed."""

    def watch_calls(self) -> None:
        """The models are new: `take_batch` is to be called with what each training pass gives them. Here by standing in their place, for
        loops that do not see these calls."""
        for model in self.models:
            if isinstance(model, nn.Module):
                self.undo(ModuleCallInterceptor(model, self._enters, _leaves).remove)

    def take_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A model is called with these in a training pass. Nothing is read."""
        probe = self.probe
        if self._open and probe is not None and self.settings.monitor is not None and torch.is_grad_enabled():
            with self.safely("batches"):
                self._batches.begin_pass(probe, args, kwargs, ages=False)

    def leave_loop(self) -> None:
        """The observer closes; what it holds besides models and probe is given up."""

    def undo(self, action: Callable[[], None]) -> None:
        """To be called when the observer lets go of the models, the newest first."""
        self._undo.append(action)

    # what is there

    def setup(self, models: Any, optimizer: Any = None) -> None:
        """The models and the optimizer exist, on all ranks (a collective call where parameters are sharded). Called again with other
        ones, the newest count."""
        with self.safely("setting up"):
            if self._broken:
                return
            given = list(models) if isinstance(models, Sequence) else [models]
            same = bool(self.models) and len(given) == len(self.models) and all(model is known for model, known in zip(given, self.models))
            if same and (optimizer is None or optimizer is self.optimizer):
                return
            self._let_go()
            probe = self.probe
            if probe is None:
                probe = self.probe = self._make_probe(self.settings)
                if self._file is not None and self.settings.monitor is not None and self.settings.monitor.hot:
                    probe.follow_file(self._file)
                at_exit.register(self.close)
                if self.settings.sinks.tracker.enabled:
                    trackers_end.register(self.end_finished_step)
                signal_shutdown.at_signal(self.close, self.settings.exit_patience)
            self.models, self.optimizer = given, optimizer
            self.attach(probe)
            self.watch_calls()
            if self.settings.grad_probe is not None:
                if self._gradients is None:
                    self._gradients = LoopGradients(self.settings)
                self._gradients.watch_training(given, optimizer)

    # steps

    def begin(self, step: int | None = None) -> None:
        """A step begins. Without a number: the one after the last."""
        with self.safely("step begin"):
            if self.probe is None:
                return
            if self._open:
                self.end()
            if step is not None:
                self.step = step
            self._open = True
            if self._gradients is not None:
                self._gradients.remove_finished_hooks()
            self.probe.begin_step(self.step)

    def end(self, scalars: Mapping[str, Any] | None = None, *, complete: bool = True) -> None:
        """The step is over; `complete` False: it was cut off, and its records say so."""
        with self.safely("step end"):
            if self.probe is None or not self._open:
                return
            self._open = False
            self._batches.end_step(self.probe)
            self.leave_step()
            found = {**self._batches.finish_digest(), **self.numbers(), **self._scalars, **(scalars or {})}
            self._scalars = {}
            self.probe.end_step(found, complete=complete)
            self.step += 1

    @contextmanager
    def driven(self, step: int | None = None, over: Callable[[], None] | None = None) -> Iterator[dict[str, Any]]:
        """A step whose borders are known (`train_step`, a callback): inside, nothing else opens or closes steps. The mapping takes
        the step's scalars. `over` is called at the end of the outermost one; None: `end`."""
        scalars: dict[str, Any] = {}
        level, self._driven = self._driven, self._driven + 1
        if not level:
            self.begin(step)
        try:
            yield scalars
        except BaseException:
            self.interrupted()
            raise
        finally:
            self._driven = level
            self.add_scalars(scalars)
            if not level:
                (over or self.end)()

    @property
    def in_step(self) -> bool:
        """Has a step begun that is not over?"""
        return self._open

    @property
    def is_driven(self) -> bool:
        """Are the borders of steps known, so that nothing else opens or closes them?"""
        return self._driven > 0

    def interrupted(self) -> None:
        """Training raised in this step: what was seen so far is still handed on (and may be what explains it)."""
        with self.safely("step end"):
            if self._open and self.probe is not None:
                self._driven = 0
                self.end({"interrupted": 1.0}, complete=False)
                self.probe.drain(cut=True)

    # events within a step

    def add_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Scalars of the step in progress: loss, gradient norm, ... Tensors are fine; they are not read here."""
        if self._open:
            self._scalars.update(scalars)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Nothing is seen inside: evaluation, checkpoints, what a framework tells itself."""
        probe = self.probe
        if probe is None:
            yield
            return
        with self.safely("pause"):
            probe.pause()
        try:
            yield
        finally:
            with self.safely("resume"):
                probe.resume()

    def micro_batch(self, number: Any) -> None:
        """The forward pass of a micro batch begins."""
        if self.probe is not None and isinstance(number, int):
            with self.safely("micro batch"):
                self.probe.micro_step = number

    # end

    def end_finished_step(self) -> None:
        """The program closes its tracker's run: a step that has been done ends here, not with a next one."""
        if self._open and self.is_step_done():
            self.end()

    def close(self) -> None:
        """Take everything off and finish the files. A step that is open was cut off, unless `is_step_done` says it has all it needs."""
        probe = self.probe or self._failed
        try:
            if self._open:
                with self.safely("closing"):
                    self.end(complete=self.is_step_done())
            ends = [self._let_go, self.leave_loop]
            if self._gradients is not None:
                ends.append(self._gradients.close)
            if probe is not None:
                ends.append(probe.close)
            for end in ends:
                with self.safely("closing"):
                    end()
            with self.safely("closing"):
                at_exit.unregister(self.close)
                trackers_end.unregister(self.end_finished_step)
        finally:
            with self.safely("closing"):
                signal_shutdown.forget(self.close)
        self._broken = True
        self.probe = self._failed = None

    @contextmanager
    def safely(self, what: str) -> Iterator[None]:
        """A fault inside switches the observer off with one message; ``strict: true`` raises."""
        try:
            if not self._broken:
                with torch.no_grad():
                    yield
            else:
                yield
        except Exception as error:
            raise_of_training(error)
            if self.settings.strict:
                raise
            if not self._said:  # also of an observer that is closed: something of it may still be on
                self._said = True
                _log.error(
                    "the probe is switched off (%s), training goes on: %s: %s (strict: true raises)", what, type(error).__name__, error
                )
            if not self._broken:
                self._broken = True
                self._failed, self.probe = self.probe, None

    def _enters(self, _module: nn.Module, inner: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if inner.training and torch._C._current_graph_task_id() == -1:  # not again in the backward pass
            self.take_batch(args, kwargs)

    def _let_go(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def _leaves(_module: int) -> None:
    """Nothing is asked of the end of a call."""


class LoopGradients:
    """Watches the optimizers of a loop; hooks come and go only at the borders of steps, never inside of an update.

    Args:
        settings: with a section ``grad_probe``.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        self.probe = GradientProbe(settings, at_once=False)

    def watch_training(self, models: Sequence[Any], optimizer: Any) -> None:
        """These are trained from now on, no longer what was before."""
        probe = self.probe
        with probe.guard():
            probe.forget()
            modules = [model for model in models if isinstance(model, nn.Module)]
            optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
            inner = [
                each if isinstance(each, Optimizer) or _of_a_framework(each) else getattr(each, "optimizer", each) for each in optimizers
            ]
            if optimizers and all(isinstance(each, Optimizer) for each in inner):
                modules = [unwrap_model(module) for module in modules]  # names without wrappers; others need what wraps them
                optimizers = inner
            if modules:
                probe.monitor(modules if len(modules) > 1 else modules[0], optimizers or None)

    def remove_finished_hooks(self) -> None:
        """A step begins or ends: take off what is over."""
        self.probe.remove_finished_hooks()

    def close(self) -> None:
        self.probe.close()


def _of_a_framework(optimizer: Any) -> bool:
    """Is this an optimizer of Megatron or DeepSpeed, whose gradients are found by its own tables? What it wraps has other tensors."""
    return any(cls.__module__.partition(".")[0] in OURS for cls in type(optimizer).__mro__)
