"""Follows a training loop of plain torch that says nothing: from what `TrainingDetector` sees to steps of the probe."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.log import warn_once, warning
from msprobe_engine.core.records import DIVIDED_TWICE, GRADIENTS_KEPT, ORDER_KEPT, UPDATED_BY
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.probe.rules.builtin.progress.repeated_batch import repeated_batch_rule
from msprobe_integrations.common.parameters.optimizer_numbers import LEARNING_RATE, update_numbers
from msprobe_integrations.requirements import MissingNameError, check, need
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.parameters.optimizer_states import updates_done
from msprobe_integrations.torch.parameters.scaler import inner_optimizer
from msprobe_integrations.torch.reliance import NAME, PACKAGE, TABLE
from msprobe_integrations.torch.tensors import dtensors
from msprobe_integrations.torch.training import owner
from msprobe_integrations.torch.training.loop import LoopObserver
from msprobe_integrations.torch.training.plain.kept_gradients import KeptGradients
from msprobe_integrations.torch.training.plain.loss_divisors import LossDivisors
from msprobe_integrations.torch.training.plain.models import chosen_models, chosen_optimizers, parameters_of, trains
from msprobe_integrations.torch.training.plain.step_boundary import StepBoundary
from msprobe_integrations.torch.training.plain.training_detector import TrainingDetector

_no_function = torch._C.DisableTorchFunction
_PAUSE = 100
"""Between two collections of garbage, in lengths of the first: a loop may make a model for every task it learns."""


def claim(sight: TrainingDetector) -> PlainObserver | None:
    """The observer of this process' training, when nobody who knows more follows it."""
    check(NAME, PACKAGE, TABLE)
    return owner.claim("torch", lambda settings, file: PlainObserver(settings, sight, file))


class PlainObserver(LoopObserver):
    """Steps by `StepBoundary`.

    Args:
        sight: what tells it things.
        file: where the settings come from.

    Attributes:
        updates: of followed optimizers, so far.
        parts: the losses of a step are to be divided by this: micro batches of a schedule that scales gradients itself; 0: not known.
    """

    def __init__(self, settings: ProbeSettings, sight: TrainingDetector, file: Path | None = None) -> None:
        super().__init__(settings, file=file)
        self.updates = 0
        self.parts = 1
        self._sight = sight
        self._rule = StepBoundary()
        self._called: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[Any] = []
        self._sizes: dict[int, int] = {}
        self._recent: list[weakref.ref[Any]] = []
        self._stale = self._more = False
        self._collect_after = 0.0
        self._away = False
        self._without_graph = False
        self._kept = KeptGradients()
        self._divisors = LossDivisors()
        self._evaluated = self._evaluation_mode = False
        self._stack = sight.updating
        self._loss: torch.Tensor | None = None
        self._first_loss: torch.Tensor | None = None
        self._losses: dict[int, torch.Tensor | None] = {}
        self._has_loss = False
        self._in_vain = 0
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None

    # what is there

    def begin_pass(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        """A training pass of `modules` begins. Returns whose calls are to be told: these, and the models that were found."""
        self._called += [weakref.ref(m) for m in modules if all(m is not known() for known in self._called)]
        if self.probe is not None and not self._stale and all(any(m in model.modules() for model in self.models) for m in modules):
            self.forward(training=True)
            return [*modules]
        if self._is_over():
            self.end()
        was_open = self.in_step
        self._look_again()
        if self.probe is not None and not was_open and not self.step:
            self.step = updates_done(self._optimizers)
        self.forward(training=True)
        return [*modules, *self.models]

    def _look_again(self) -> None:
        """Which models and optimizers there are, from what was called and who holds its parameters."""
        if self._more and not self.in_step:
            self._forget_what_is_gone()
        self._stale = self._more = False
        optimizers = self._sight.optimizers
        called = [model for ref in self._called if (model := ref()) is not None]
        held = parameters_of(optimizers, called)
        called = [model for model in called if trains(model, held)]
        self._called = [weakref.ref(model) for model in called]
        models = chosen_models(called, held)
        recent = [optimizer for ref in self._recent if (optimizer := ref()) is not None]
        self._optimizers = chosen_optimizers(optimizers, models, recent)
        self._sizes = {id(o): _size(o) for o in self._optimizers}
        self._rule.expect(id(o) for o in self._optimizers)
        self.setup(models, list(self._optimizers))

    def _forget_what_is_gone(self) -> None:
        """A new optimizer may be the start of another training: what the script holds no longer, nothing of ours holds either."""
        self._optimizers, self.models, self.optimizer = [], [], None
        if self.probe is not None:
            self.probe.detach()
        if self._gradients is not None:
            self._gradients.probe.forget()
        began = time.monotonic()
        if began >= self._collect_after:
            gc.collect()  # schedulers of the learning rate and their optimizers hold each other
            self._collect_after = time.monotonic() + _PAUSE * (time.monotonic() - began)
        self._sight.forget_what_is_gone()

    def attach(self, probe: TorchProbe) -> None:
        """Models as they are called, optimizers as they were made."""
        probe.attach(self.models, self._optimizers if len(self._optimizers) > 1 else self._optimizers[0])

    # passes

    def forward(self, *, training: bool, graph: bool = True) -> None:
        """The loop calls a model.

        Args:
            training: in training mode; in evaluation mode a pass is one of the training once an update has come of such a pass.
            graph: with gradients. Without, in training mode: an evaluation, or checkpointing that makes the graph in the backward pass.
        """
        self._evaluation_mode &= not training
        self._without_graph, self._evaluated = training and not graph, graph and not training
        over = self._is_over()
        if graph and (training or self._evaluation_mode):
            self._come_back()
            if over:
                self.end()
            if not self.in_step:
                self._begin_step()
            self._rule.count_pass()
        elif not self._stack:
            if over:
                self.end()
            self._go_away()

    def watch_calls(self) -> None:
        """`TrainingDetector` sees the calls of models."""

    def take_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The loop calls a model with these. Nothing is read."""
        if self.in_step and self.probe is not None and not self._away and not self._stack and torch.is_grad_enabled():
            with self.safely("batches"):  # what goes wrong in there costs only that
                self._batches.begin_pass(self.probe, args, kwargs, ages=repeated_batch_rule(self.probe.pipeline.rules) is not None)

    def backward(self, tensors: Any, given: Any) -> None:
        """A backward pass begins. Nothing is read."""
        self._come_back()
        if self._is_over():
            self.end()
            self._begin_step()
        elif self._without_graph and not self.in_step:
            self._begin_step()
        self._rule.count_pass()
        if not self._stack:
            with self.safely("kept gradients"):
                self._kept.backward()
            with self.safely("loss divisors"), _no_function():
                self._divisors.backward(tensors)
        self._note_loss(tensors, given)

    def _is_over(self) -> bool:
        """Passes inside of an update (an optimizer that evaluates its closure) belong to it: to another step than its last update."""
        return self.in_step and self._rule.over and (not self._stack or not self._rule.first(self._stack[0]))

    def _begin_step(self) -> None:
        if self._stale or any(_size(optimizer) != self._sizes[id(optimizer)] for optimizer in self._optimizers):
            self._look_again()
            for model in self.models:
                self._sight.add_entry(model)
        self._rule.next()
        self._loss, self._first_loss, self._losses = None, None, {}
        self._has_loss = False
        self.parts = 1
        self.step += self._in_vain
        self._in_vain = 0
        self.begin()
        if self._stack and self._stack[0] == id(self._optimizers[0]):
            self._note_rate(self._optimizers[0])

    def _go_away(self) -> None:
        """Evaluation, until something that only a training does."""
        if not self._away and self.probe is not None:
            self._away = True
            with self.safely("pause"):
                self.probe.pause()

    def _come_back(self) -> None:
        if self._away:
            self._away = False
            with self.safely("resume"):
                if self.probe is not None:
                    self.probe.resume()

    # loss

    def record_scaled_loss(self, loss: torch.Tensor, result: torch.Tensor) -> None:
        """A loss scaler has made `result` of `loss`."""
        with _no_function(), torch.no_grad():
            self._scaled = weakref.ref(result), loss.detach()

    def _note_loss(self, tensors: Any, given: Any) -> None:
        if isinstance(tensors, (list, tuple)) and len(tensors) == 1:
            tensors = tensors[0]
            given = given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given
        if not self.in_step or not isinstance(tensors, torch.Tensor) or given is not None or (self._stack and self._has_loss):
            return
        scaled, self._scaled = self._scaled, None
        if scaled is not None and scaled[0]() is tensors:
            tensors = scaled[1]
        with self.safely("loss"), _no_function(), torch.no_grad():
            if dtensors.is_dtensor(tensors):
                if not all(placement.is_replicate() for placement in tensors.placements):
                    return
                tensors = dtensors.local(tensors)
            if tensors.numel() != 1:
                return
            loss = tensors.detach().reshape(())
            loss = loss.float() if loss.element_size() < 4 else loss.clone()
            self._loss = loss if self._loss is None else self._loss + loss
            self._has_loss = True

    def numbers(self) -> dict[str, Any]:
        """The loss: what backward was called on, summed over the step. And whether a further epoch is in the order of the one before, and
        which optimizers have updated."""
        known: dict[str, Any] = {ORDER_KEPT: 1.0} if self._sight.epochs.take_order_kept() else {}
        if len(self._optimizers) > 1:
            known[UPDATED_BY] = float(sum(1 << i for i, optimizer in enumerate(self._optimizers) if not self._rule.first(id(optimizer))))
        loss = self._first_loss if self._in_vain else self._loss
        self._loss, self._first_loss, self._losses = None, None, {}
        if loss is None or not self.parts:
            return known
        with _no_function():
            return {"loss": loss if self.parts == 1 else loss / self.parts, **known}

    def loss_scale(self, scaler: Any, optimizer: Any) -> None:
        """A scaler is about to step an optimizer."""
        if self._is_followed(inner_optimizer(optimizer)):
            with suppress(MissingNameError), _no_function(), torch.no_grad():
                scale = need(scaler, "_scale", for_="scalar loss_scale")
                self.add_scalars({"loss_scale": scale.clone()} if isinstance(scale, torch.Tensor) else {})

    # updates

    def _is_followed(self, optimizer: Any) -> bool:
        return id(optimizer) in self._sizes

    def optimizer_made(self) -> None:
        """There is one more; the next step knows it."""
        self._stale = self._more = True

    def update_begins(self, optimizer: Any, closure: Any) -> None:
        """Called from inside its hooks, where none may be put on it or taken off. The passes of a `closure` are yet to come."""
        key = id(optimizer)
        if key not in self._sizes:
            if self._stack == [key] and self.probe is not None:
                self._stranger(optimizer)
            return
        self._come_back()
        self._notice_evaluation_mode()
        if _size(optimizer) != self._sizes[key]:
            self._stale = True  # it has more parameters than before
        if not self._rule.first(key):
            if closure is None:
                self._go_away()  # rows of a second update would stand beside those of the first
        elif optimizer is self._optimizers[0]:
            self._note_rate(optimizer)
            if len(self._optimizers) == 1 and self._kept.added:
                self.add_scalars({GRADIENTS_KEPT: 1.0})
            if self._divisors.twice():
                self.add_scalars({DIVIDED_TWICE: 1.0})

    def update_ends(self, optimizer: Any) -> None:
        key = id(optimizer)
        if key in self._sizes:
            found = getattr(optimizer, "found_inf", None)
            self._count(key, None if isinstance(found, torch.Tensor) else 0.0)
            with self.safely("kept gradients"), _no_function():
                self._kept.updated(optimizer)

    def left_out(self, optimizer: Any) -> None:
        """A scaler was asked for an update, and made none."""
        inner = inner_optimizer(optimizer)
        if self._is_followed(inner):
            self._note_rate(inner)
            self._count(id(inner), 1.0)

    def _count(self, key: int, skipped: float | None) -> None:
        first = self._rule.first(key)
        if first:
            self._losses[key] = self._loss
        if waited_for := self._rule.update(key):
            self._waited_in_vain(waited_for)
        self.updates += 1
        self._has_loss = False  # what a closure of the next update evaluates again is known from its first pass
        if first and skipped is not None and not (skipped == 0.0 and self._scalars.get("skipped")):
            self.add_scalars({"skipped": skipped})
        if self._rule.over:
            self._sight.look_no_longer()
            if self.probe is not None:
                self.probe.pipeline.mark_update()

    def _waited_in_vain(self, waited_for: Collection[int]) -> None:
        """The step has seen a second round of passes and updates. Its numbers are those of the first, and the next step is numbered as if
        it had ended there."""
        self._in_vain = 1
        self._first_loss = [loss for key, loss in self._losses.items() if key in self._rule.expected][-1]
        names = [type(optimizer).__name__ for optimizer in self._optimizers if id(optimizer) in waited_for]
        warning(
            f"step {self.step + 1} is not watched: it was taken for a part of step {self.step}, because {', '.join(names)} had not updated "
            "yet; the steps behind it do not wait for that",
        )

    def _note_rate(self, optimizer: Any) -> None:
        found = update_numbers(optimizer.param_groups)
        if isinstance(rate := found.get(LEARNING_RATE), torch.Tensor):
            with _no_function(), torch.no_grad():
                found[LEARNING_RATE] = rate.detach().clone()
        if found:
            self.add_scalars(found)

    def _notice_evaluation_mode(self) -> None:
        """An update has come of a pass in evaluation mode, of which nothing was seen: it is a step, and such passes are of the training."""
        if self._evaluated and not self.in_step and not self._evaluation_mode:
            self._evaluation_mode = True
            self.step += 1
            warning(f"step {self.step - 1} is not watched: the model is trained in evaluation mode (model.eval()), which it was not before")

    def _stranger(self, optimizer: Any) -> None:
        """One that is not followed updates. If it has parameters of ours, it is from the next step on."""
        held = parameters_of([optimizer], self.models).keys()
        if any(id(p) in held for model in self.models for p in model.parameters()):
            self._recent = [weakref.ref(optimizer), *(ref for ref in self._recent if ref() is not optimizer)]
            self._stale = True
            self._notice_evaluation_mode()
            self._rule.stranger(id(optimizer))
            if not any(known is optimizer for known in self._sight.optimizers):
                warn_once("optimizer without a beginning", f"{type(optimizer).__name__}: was not seen being made and is not watched")

    # end

    def end_of_ranks(self) -> None:
        """The process group is about to go."""
        self._come_back()
        if self.in_step:
            self.end()
        with self.safely("step end"):
            if self.probe is not None:
                self.probe.drain()

    def end_finished_step(self) -> None:
        if self.in_step and self.is_step_done():
            self._come_back()
            self.end()

    def is_step_done(self) -> bool:
        """A step ends when the next one begins; the last one has all it needs with its updates."""
        return self._rule.begun

    def leave_loop(self) -> None:
        """Nothing is seen any more."""
        self._sight.stand_back()

    def close(self) -> None:
        """Take everything off and finish the files."""
        with self.safely("closing"):
            self._come_back()
        super().close()


def _size(optimizer: Any) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
