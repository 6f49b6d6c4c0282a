"""What is seen of a training loop of plain torch that says nothing: optimizers that are made, calls of their models, backward passes,
updates. Told to a `PlainObserver`, which is made at the first training pass of a module whose parameters an optimizer holds.

Until then only this small module is loaded. Every call of a module goes through a patch only while models are looked for: from the making
of an optimizer until all optimizers have updated once, and not inside of a call that is looked at. No global module hooks: torch warns
of them, and compiles them into compiled code. After that the models that were found have a hook before and one after their own call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import optimizer as optim
from torch.utils.data import DistributedSampler

from msprobe_engine.core.guard import is_of_training, raise_of_training, suppress_faults
from msprobe_integrations.autoload import report
from msprobe_integrations.autoload.imports import after_import
from msprobe_integrations.patching import FunctionPatch, shared_patch
from msprobe_integrations.requirements import MissingNameError, need
from msprobe_integrations.torch.ranks.process_group_teardown import before_ranks_end
from msprobe_integrations.torch.training.plain.epochs import Epochs
from msprobe_integrations.torch.training.plain.models import parameters_of, say_not_watched, trains

if TYPE_CHECKING:
    from msprobe_integrations.torch.training.plain.loop import PlainObserver

_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_compiling = torch.compiler.is_compiling
_ENGINES = ("deepspeed",)
"""Root packages of models that drive their optimizer themselves and have an integration that sees their calls."""
_SCHEDULES = "torch.distributed.pipelining.schedules"


class TrainingDetector:
    """One per process, from the import of torch until somebody else follows the training.

    Attributes:
        optimizers: alive, in the order they were made; in this process, not in one that it was forked from.
        observer: whom things are told to; None before the training begins.
        stood_back: somebody else follows the training.
        epochs: of samplers that shuffle for several ranks.
        updating: ids of the optimizers that are in an update now, the outermost first.
    """

    current: ClassVar[TrainingDetector | None] = None

    def __init__(self) -> None:
        self.observer: PlainObserver | None = None
        self.stood_back = False
        self.epochs = Epochs()
        self.updating: list[int] = []
        self._made: list[weakref.ref[Any]] = []
        self._held: dict[int, int] = {}
        self._others: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inside: list[int] = []
        self._looking = False
        self._compiled_update = False
        self._evaluated = ""
        self._entries: dict[int, Any] = {}
        self._undo: list[Callable[[], Any]] = []
        self._following: list[Callable[[], Any]] = []
        self._update_hooks: list[Any] = []
        self._thread = threading.get_ident()

    @classmethod
    def start(cls) -> TrainingDetector:
        """Wait for an optimizer."""
        if cls.current is None or cls.current.stood_back:
            sight = cls.current = cls()
            sight._watch_making()
            this = weakref.ref(sight)
            os.register_at_fork(after_in_child=lambda: _reset_after_fork(this()))
        return cls.current

    @property
    def optimizers(self) -> list[Any]:
        return [optimizer for ref in self._made if (optimizer := ref()) is not None]

    def _watch_making(self) -> None:
        self._patch(self._undo, shared_patch(optim.Optimizer, "__init__"), self._watch_creation)
        self._patch(self._undo, shared_patch(DistributedSampler, "__iter__"), self.epochs.begin)

    def _watch_creation(self, following: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = following(optimizer, *args, **kwargs)
        with self._safely():
            report.report_event("optimizer", type(optimizer).__name__)
            if not self._update_hooks:
                self._update_hooks = [
                    optim.register_optimizer_step_pre_hook(self._update_begins),
                    optim.register_optimizer_step_post_hook(self._update_ends),
                ]
            if all(ref() is not optimizer for ref in self._made):
                self._made = [ref for ref in self._made if ref() is not None] + [weakref.ref(optimizer)]
            self.start_looking()
            if self.observer is not None:
                self.observer.optimizer_made()
        return result

    def start_looking(self) -> None:
        """Look for models from the next call on."""
        self._held = {}
        self._others.clear()
        if self.stood_back:
            return
        if not self._looking:
            self._looking = True
            self._module_patch().add(self._intercept_call)
            after_import(_SCHEDULES, self._watch_schedules)

    def look_no_longer(self) -> None:
        """All models are known."""
        if self._looking:
            self._looking = False
            self._module_patch().discard(self._intercept_call)

    @staticmethod
    def _module_patch() -> FunctionPatch:
        return shared_patch(nn.Module, "__call__")

    def _intercept_call(self, following: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A call from outside of any call that is looked at."""
        if (
            self.stood_back
            or self._inside
            or _compiling()
            or threading.get_ident() != self._thread
            or (_graph_task() != -1 and self.observer is not None)
        ):
            return following(module, *args, **kwargs)  # a first pass within a backward pass is that of reentrant checkpointing
        with self._safely():
            if id(module) not in self._entries and torch.is_grad_enabled() and self._trains(module):
                if module.training:
                    self.follow_modules([module])
                else:
                    self._evaluated = type(module).__name__
                    report.report_event("evaluation", self._evaluated)
        if id(module) in self._entries:
            return following(module, *args, **kwargs)
        with self.within(module):
            return following(module, *args, **kwargs)

    def _trains(self, module: nn.Module) -> bool:
        if module in self._others:
            return False
        if not self._held:
            self._held = parameters_of(self.optimizers)
        if not trains(module, self._held):
            self._held |= parameters_of(self.optimizers, [module])
        if trains(module, self._held) and type(module).__module__.partition(".")[0] not in _ENGINES:
            return True
        self._others.add(module)
        return False

    @contextmanager
    def within(self, module: Any) -> Iterator[None]:
        """Calls inside are no calls of the loop."""
        with self._safely():
            self._inside.append(id(module))
            self._module_patch().discard(self._intercept_call)
        try:
            yield
        finally:
            self._leaves(id(module))

    def _enter(self, key: int) -> bool:
        """A call of a known model begins; True when the loop itself calls it."""
        if key in self._inside:  # its last call never came to its end
            del self._inside[self._inside.index(key) :]
        self._inside.append(key)
        if len(self._inside) > 1:
            return False
        if self._looking:
            self._module_patch().discard(self._intercept_call)
        return True

    def _leaves(self, key: int) -> None:
        """A call is over, whatever came of it."""
        with self._safely():
            self._leave(key)

    def _leave(self, key: int) -> None:
        if key in self._inside:
            del self._inside[self._inside.index(key) :]
        if not self._inside and self._looking:
            self._module_patch().add(self._intercept_call)

    def follow_modules(self, modules: Sequence[nn.Module]) -> None:
        """A training pass of these begins: follow them."""
        if self.observer is None:
            from msprobe_integrations.torch.training.plain.loop import claim

            self.observer = claim(self)
            if self.observer is None:
                self.stand_back()
                return
            self._install_patches()
        for model in self.observer.begin_pass(modules):
            self.add_entry(model)

    def forget_what_is_gone(self) -> None:
        """Models that are no more have no entry: others may be known by their numbers now."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry.alive}

    def add_entry(self, module: nn.Module) -> None:
        """Calls of this module are told from the next one on."""
        if id(module) in self._entries:
            return
        from msprobe_integrations.torch.training.module_call_interceptor import ModuleCallInterceptor

        self._entries[id(module)] = ModuleCallInterceptor(module, self._enters, self._leaves)

    def _enters(self, module: nn.Module, inner: nn.Module, args: Any, kwargs: Any) -> None:
        """A known model is called."""
        if threading.get_ident() != self._thread or _graph_task() != -1:
            return
        with self._safely():
            if self._enter(id(module)) and self.observer is not None:
                if self._compiled_update:
                    self._tell_compiled_updates(self.observer)
                self.observer.forward(training=inner.training, graph=torch.is_grad_enabled())
                self.observer.take_batch(args, kwargs)

    def _tell_compiled_updates(self, observer: PlainObserver) -> None:
        """``torch.compile(optimizer.step)``: that it has run is known at the next call of a model, of which optimizer is not."""
        self._compiled_update = False
        for optimizer in self.optimizers:
            observer.update_begins(optimizer, None)
            observer.update_ends(optimizer)

    # what else a training does

    def _install_patches(self) -> None:
        on = self._following
        self._patch(on, shared_patch(torch.autograd, "backward"), self._backward)
        for scaler in {getattr(torch.amp, "GradScaler", None), torch.cuda.amp.GradScaler} - {None}:
            if "step" in vars(scaler):
                self._patch(on, shared_patch(scaler, "step"), self._scaler_step)
                self._patch(on, shared_patch(scaler, "scale"), self._scale)
        on.append(before_ranks_end(self._ranks_end))

    @staticmethod
    def _patch(undo: list[Callable[[], Any]], patch: FunctionPatch, handler: Any) -> None:
        patch.add(handler)
        undo.append(lambda: patch.discard(handler))

    def _backward(self, following: Any, *args: Any, **kwargs: Any) -> Any:
        if self.observer is not None and not _compiling() and _graph_task() == -1 and threading.get_ident() == self._thread:
            tensors = args[0] if args else kwargs.get("tensors")
            given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
            with self._safely():
                self.observer.backward(tensors, given)
        return following(*args, **kwargs)

    def _scale(self, following: Any, scaler: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = following(scaler, outputs, *args, **kwargs)
        with self._safely():
            if self.observer is not None and isinstance(result, torch.Tensor) and isinstance(outputs, torch.Tensor):
                self.observer.record_scaled_loss(outputs, result)
        return result

    def _scaler_step(self, following: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self.observer
        if observer is None or not scaler.is_enabled():
            return following(scaler, optimizer, *args, **kwargs)
        before = observer.updates
        with self._safely():
            observer.loss_scale(scaler, optimizer)
        result = following(scaler, optimizer, *args, **kwargs)
        with self._safely():
            if observer.updates == before:
                observer.left_out(optimizer)
        return result

    def _update_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _compiling():
            self._compiled_update = True  # compiled code does that too, each time
            return
        if self.stood_back:
            return
        key = id(optimizer)
        if key in self.updating:  # the last time it has raised
            del self.updating[self.updating.index(key) :]
        self.updating.append(key)
        if self.observer is not None:
            with self._safely():
                self.observer.update_begins(optimizer, args[1] if len(args) > 1 else kwargs.get("closure"))
        elif self._evaluated:
            say_not_watched(self._evaluated)

    def _update_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if _compiling():
            self._compiled_update = True
        elif self.observer is not None:
            self._compiled_update = False  # only its beginning was
            with self._safely():
                self.observer.update_ends(optimizer)
        key = id(optimizer)
        if key in self.updating:  # until now: torch goes through its hooks, none may be taken off
            del self.updating[self.updating.index(key) :]

    def _ranks_end(self) -> None:
        with self._safely():
            if self.observer is not None:
                self.observer.end_of_ranks()

    def _watch_schedules(self, schedules: Any) -> None:
        """Pipeline stages: all ranks begin a step here. At the first pass of its stage a rank of the first stage would wait for the
        others, which wait for what that pass gives."""
        for cls in {c for c in vars(schedules).values() if isinstance(c, type) and c.__module__ == schedules.__name__}:
            if "step" in vars(cls) and hasattr(cls, "_step_microbatches"):
                self._patch(self._undo, shared_patch(cls, "step"), self._schedule_step)

    def _schedule_step(self, following: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or threading.get_ident() != self._thread:
            return following(schedule, *args, **kwargs)
        with self._safely():
            stages = getattr(schedule, "_stages", None) or [schedule._stage]
            modules = [stage.submod for stage in stages]
            training = torch.is_grad_enabled() and getattr(schedule, "_has_backward", True)
            if training and not all(id(m) in self._entries for m in modules) and any(map(self._trains, modules)):
                self.follow_modules(modules)
            elif self.observer is not None:
                self.observer.forward(training=training, graph=training)
            if self.observer is not None and training:
                self.observer.parts = _parts_of_loss(schedule)
        with self.within(schedule):
            return following(schedule, *args, **kwargs)

    def stand_back(self) -> None:
        """For good: take everything off."""
        self.stood_back = True
        self.observer = None
        actions = [self.look_no_longer, *self._following, *self._undo, *(entry.remove for entry in self._entries.values())]
        if not self.updating:  # torch goes through them just now
            actions += [hook.remove for hook in self._update_hooks]
            self._update_hooks.clear()
        self._following.clear()
        self._undo.clear()
        self._entries.clear()
        self._made.clear()
        self._inside.clear()
        failed: list[Exception] = []
        for action in actions:
            try:
                action()
            except Exception as error:  # the others come off all the same
                failed.append(error)
        if failed:
            raise next(filter(is_of_training, failed), failed[0])

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """What goes wrong in here does not reach the training; the observer has guards of its own, and its ``strict`` raises."""
        try:
            yield
        except Exception as error:
            raise_of_training(error)
            observer, stood_back = self.observer, self.stood_back
            with suppress_faults():
                self.stand_back()
            if observer is not None and observer.settings.strict:
                raise
            if stood_back:
                return
            from msprobe_engine.core.log import get_logger

            get_logger().error("the training is not followed, it goes on: %s: %s", type(error).__name__, error)


def _reset_after_fork(sight: TrainingDetector | None) -> None:
    """A forked child of a training is none (a worker of a data loader). One that makes an optimizer itself is."""
    if sight is None or sight.stood_back:
        return
    if sight.observer is not None:
        sight.stand_back()
    sight._made.clear()
    sight._inside.clear()
    sight._thread = threading.get_ident()
    sight.look_no_longer()


def _parts_of_loss(schedule: Any) -> int:
    """By what the sum of a schedule's losses is divided: its micro batches where it scales gradients itself, 0: that is not known."""
    if torch.__version__ < (2, 6):  # type: ignore[operator]  # a TorchVersion; none scaled them
        return 1
    try:
        scales = need(schedule, "scale_grads", for_="the loss of steps of a pipeline")
        return int(need(schedule, "_n_microbatches", for_="the loss of steps of a pipeline")) if scales else 1
    except MissingNameError:
        return 0
