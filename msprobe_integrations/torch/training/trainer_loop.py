"""What the integrations of Trainers have in common: an observer that numbers the steps of several trainings in one process, methods
of objects looked through for a while, and a shield around all of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.probe.incident.on_alert import StopTraining
from msprobe_integrations.patching import replace
from msprobe_integrations.requirements import MissingNameError, Requirement, check, need
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.parameters.find import engine_of
from msprobe_integrations.torch.parameters.scaler import inner_optimizer
from msprobe_integrations.torch.tensors.dtensors import local
from msprobe_integrations.torch.training.loop import LoopObserver

_log = get_logger()
_said: set[str] = set()
Hook = TypeVar("Hook", bound=Callable[..., Any])


class TrainerObserver(LoopObserver):
    """A `LoopObserver` for a Trainer, which may train several times in one process.

    Step numbers are those of the Trainer, the number of updates before. A training that begins at a smaller number than the one before
    it has reached (trained again, another trial of a search) goes on counting where that one ended: numbers never run backwards.
    """

    relies: tuple[str, str, Sequence[Requirement]] | None = None
    """NAME, PACKAGE and TABLE of the integration."""
    objects: Mapping[str, Any] = MappingProxyType({})
    """What rows of the table are about."""
    _offset = 0
    _passes = 0
    _loss: torch.Tensor | None = None

    def training_begins(self, step: int) -> None:
        """`step`: updates that the Trainer has counted before its next one."""
        self._offset = max(0, self.step - step)

    def begin(self, step: int | None = None) -> None:
        """A step begins; `step` as the Trainer counts. The number of the step in progress again: there has been no update since (the data
        ran out amid its micro batches), and the step goes on."""
        number = None if step is None else step + self._offset
        if self.in_step and number == self.step:
            return
        super().begin(number)
        self._passes, self._loss = 0, None

    def setup(self, models: Any, optimizer: Any = None) -> None:
        """As the Trainer has them: wrapped models (one of them may be an engine of DeepSpeed, which holds its optimizer), optimizers in
        wrappers of a launcher."""
        with self.safely("setting up"):
            models = list(models) if isinstance(models, (list, tuple)) else [models]
            several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
            optimizers = [] if any(engine_of(model) for model in models) else [inner_optimizer(one) for one in several]
            super().setup(models, optimizers if len(optimizers) > 1 else optimizers[0] if optimizers else None)

    def attach(self, probe: TorchProbe) -> None:
        """Names models and optimizers; says what the framework's version lacks."""
        if self.relies is not None:
            check(*self.relies, self.objects)
        engine = next(filter(None, map(engine_of, self.models)), None)
        if engine is None:
            super().attach(probe)
            return
        probe.pipeline.rank_info.update(engine.place)
        probe.attach([engine.module], engine.optimizer, find=engine.find)

    def has_updated(self, step: int) -> bool:
        """Has the step in progress had its update? `step`: updates that the Trainer has counted."""
        return self.in_step and step + self._offset > self.step

    def pass_begins(self) -> None:
        """The next micro batch of the step begins."""
        self.micro_batch(self._passes)
        self._passes += 1

    def pass_ends(self, loss: Any) -> None:
        """Its loss, a tensor that is not read here; they add up to the step's."""
        with self.safely("loss"), torch._C.DisableTorchFunction():  # no call of the user's
            if self.in_step and isinstance(loss, torch.Tensor) and loss.numel() == 1:
                value = loss.detach().float().reshape(())
                self._loss = value.clone() if self._loss is None else self._loss + value

    @property
    def loss(self) -> torch.Tensor | None:
        """Sum of the losses of the step's micro batches."""
        return self._loss

    def numbers(self) -> dict[str, Any]:
        """The loss, where `pass_ends` was given one and the Trainer itself gives none to `end`."""
        return {} if self._loss is None else {"loss": self._loss}

    def pause(self) -> None:
        """Evaluation begins: nothing is seen until `resume`."""
        with self.safely("pause"):
            if self.probe is not None:
                self.probe.pause()

    def resume(self) -> None:
        """Training again."""
        with self.safely("resume"):
            if self.probe is not None:
                self.probe.resume()

    def flush(self) -> None:
        """Training is over: what was seen is written, of a step without an update as one that was cut off. The probe stays for a next
        training of this process."""
        with self.safely("end of training"):
            if self.in_step:
                self.end(complete=self.is_step_done())
            if self.probe is not None:
                self.probe.drain()


def number(value: Any) -> Any:
    """A scalar that can be handed on: of a DTensor this rank's copy, None where it has only a part; a tensor's own copy, as Trainers
    go on writing to theirs."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if hasattr(value, "placements"):
            value = local(value) if all(place.is_replicate() for place in value.placements) else None
        return value.detach().clone() if isinstance(value, torch.Tensor) else value


def report_fault(observer: LoopObserver | None, what: str, error: BaseException) -> None:
    """A fault of ours outside of everything that the observer guards: said once.

    Raises:
        Exception: `error`, with ``strict: true``.
    """
    if observer is not None and observer.settings.strict:
        raise error
    if what not in _said:
        _said.add(what)
        _log.error("the probe does not follow %s, training goes on: %s: %s", what, type(error).__name__, error)


def scale_of(scaler: Any) -> torch.Tensor | None:
    """The loss scale that a GradScaler holds now, without the read that its `get_scale` makes."""
    try:
        found = None if scaler is None else number(need(scaler, "_scale", for_="scalar loss_scale"))
    except MissingNameError:
        return None
    return found if isinstance(found, torch.Tensor) else None


def quietly(observer: LoopObserver | None, what: str, method: str, *args: Any) -> None:
    """Call a method of the observer; nothing that it raises comes out."""
    try:
        if observer is not None:
            getattr(observer, method)(*args)
    except Exception as error:
        raise_of_training(error)
        report_fault(observer, what, error)


def one_pass(observer: TrainerObserver | None, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what makes one micro batch's passes and returns its loss."""
    quietly(observer, "micro batches", "pass_begins")
    loss = original(*args, **kwargs)
    quietly(observer, "the loss", "pass_ends", loss)
    return loss


def isolated(method: Hook) -> Hook:
    """For methods of a callback that has ``observer``: nothing that they raise reaches the Trainer."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            raise_of_training(error)
            report_fault(self.observer, method.__name__, error)

    return call  # type: ignore[return-value]  # hooks of Trainers return nothing


@contextmanager
def save_before_stop(whose: str, save: Callable[[], object]) -> Iterator[None]:
    """Around the end of a step: where it ends the training (``on_alert.stop``), a checkpoint is saved first, on all ranks alike."""
    try:
        yield
    except StopTraining:
        try:
            save()
        except Exception as error:
            _log.error("on_alert.stop: %s saved no checkpoint: %s: %s", whose, type(error).__name__, error)
        raise


@contextmanager
def shielded(what: str, manager: Callable[[], AbstractContextManager[Any]], observer: LoopObserver | None = None) -> Iterator[None]:
    """The body runs inside of ``manager()`` if that works, and in any case once; faults of the manager do not reach it."""
    stack = ExitStack()
    try:
        stack.enter_context(manager())
    except Exception as error:
        raise_of_training(error)
        report_fault(observer, what, error)
    try:
        yield
    except BaseException as error:
        _leave(stack, what, observer, error)
        raise
    else:
        _leave(stack, what, observer, None)


def _leave(stack: ExitStack, what: str, observer: LoopObserver | None, raised: BaseException | None) -> None:
    try:
        stack.__exit__(*(sys.exc_info() if raised is not None else (None, None, None)))
    except Exception as error:
        raise_of_training(error)
        if error is not raised:
            report_fault(observer, what, error)


def exclude_methods(observer: LoopObserver, owner: Any, *names: str) -> list[Callable[[], None]]:
    """Nothing is seen inside of these methods: evaluation, prediction, checkpoints. Returns what puts them back."""

    def around(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with shielded("evaluation", observer.evaluation, observer):
            return original(*args, **kwargs)

    return [replace(owner, name, around) for name in names]
