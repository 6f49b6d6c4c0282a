"""Follows one DeepSpeed engine: from calls of its methods to steps of the probe.

============================  ========================================================================================================
call                          what it is
============================  ========================================================================================================
forward                       a training pass; the first one of an update begins the step. Without gradients, or with the module in
                              eval mode: an evaluation, of which nothing is seen
backward                      the loss of a micro batch, as the user passed it
step                          the end of the step when `engine.global_steps` has moved, which it also does when the update is skipped
train_batch                   a whole step of a pipeline engine
eval_batch, save, load, ...   nothing is seen
============================  ========================================================================================================

One engine is followed: the one whose configuration has the key ``msprobe``, else the first that trains.

The pipeline engine: micro batches by the instructions of its schedule.

`_exec_schedule` looks its methods up in the table `_INSTRUCTION_MAP` of the class, so wrapping the methods has no effect. The followed
engine gets a table of its own; the class keeps its one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.deepspeed import key, reliance
from msprobe_integrations.deepspeed.monitor import Events, MonitorSink
from msprobe_integrations.deepspeed.source import parts_of
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.ranks.process_group_teardown import before_ranks_end
from msprobe_integrations.torch.training.loop import LoopObserver

_log = get_logger()
_QUIET = "quiet"


class EngineObserver(LoopObserver):
    """A `LoopObserver` for a DeepSpeed engine.

    Attributes:
        engine: the engine that is followed, None before the first training pass.
        micro: backward passes that the step in progress has had.
    """

    def __init__(self, settings: ProbeSettings, *, file: str | Path | None = None) -> None:
        self.sink = MonitorSink() if settings.sinks.deepspeed.enabled else None
        super().__init__(settings, self._probe_with_sink, file=file)
        self.engine: Any = None
        self.micro = 0
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._losses: list[torch.Tensor] = []
        self._divided = False
        self._events: Events | None = None
        self._batch: Any = None
        self._grad = True
        self._batch_scalars: dict[str, Any] = {}

    def _probe_with_sink(self, settings: ProbeSettings) -> TorchProbe:
        return TorchProbe(settings, extra_sinks=[] if self.sink is None else [self.sink])

    # what is there

    def attach(self, probe: TorchProbe) -> None:
        """An engine is new: names of its module, and the optimizer it has made."""
        (engine,) = self.models
        self.engine = engine
        reliance.check_engine(engine)
        parts = parts_of(engine)
        probe.pipeline.rank_info.update(parts.place)
        probe.attach([parts.module], parts.optimizer, find=parts.find)  # hooks come in time for the pass that has just begun
        if is_pipeline(engine):
            instructions = Instructions(engine, self)
            instructions.put_on()
            self.undo(instructions.take_off)
        events = Events(engine, self.add_scalars, self.safely)
        events.put_on()
        self.undo(events.take_off)
        self._events = events
        if self.sink is not None:
            self.sink.attach(engine)
            self.undo(before_ranks_end(self._ranks_end))

    def follows(self, engine: Any) -> bool:
        """Is this the engine to follow? Of the others nothing is seen; said once for each that trains."""
        wanted = key.find_chosen_engine()
        if wanted is None:
            wanted = engine if self.engine is None else self.engine
        if engine is wanted:
            return True
        if engine not in self._others:
            self._others.add(engine)
            _log.warning(
                "DeepSpeed: a second engine (of %s) trains in this process; the one of %s is followed. To follow another one, put the key "
                "'msprobe' into its own configuration",
                type(getattr(engine, "module", engine)).__name__,
                type(getattr(wanted, "module", wanted)).__name__,
            )
        return False

    # events

    def call(self, kind: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of an engine, with what is to be done before and after. Whatever that does, the method is called once, with
        its own arguments, and its own result is returned."""
        engine, state = args[0], None
        self._grad = torch.is_grad_enabled()  # the guard switches it off
        with self.safely(kind):
            state = getattr(self, f"_before_{kind}")(engine, args[1:], kwargs)
        try:
            result = original(*args, **kwargs)
        except Exception as error:
            self._training_raised(state, error)
            raise
        with self.safely(kind):
            if state == _QUIET:
                self._resume()
            elif state is not None:
                getattr(self, f"_after_{kind}")(engine, state, result)
        return result

    def _training_raised(self, state: Any, error: Exception) -> None:
        if state == _QUIET:
            self._resume()
            return
        batch, self._batch = self._batch, None
        self.interrupted()
        if batch is not None:
            with self.safely("step end"):
                try:
                    batch.__exit__(type(error), error, error.__traceback__)
                except type(error):  # the caller raises it
                    pass

    def _before_quiet(self, _engine: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> str | None:
        if self.probe is None:
            return None
        self.probe.pause()
        return _QUIET

    def _resume(self) -> None:
        with self.safely("resume"):
            if self.probe is not None:
                self.probe.resume()

    def _before_forward(self, engine: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._batch is not None and engine is self.engine:
            return None  # a pass of a pipeline: its instructions say what it is
        if not self._grad or not engine.module.training or not self.follows(engine):
            return self._before_quiet(engine, args, kwargs)
        self._ready(engine)
        if not self.in_step:
            self._begin_engine_step(engine)
        self.micro_batch(self.micro)
        return None

    def _before_backward(self, engine: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._batch is not None and engine is self.engine:
            return None
        if not self.follows(engine):
            return self._before_quiet(engine, args, kwargs)
        self._ready(engine)
        if not self.in_step:  # the pass was made in eval mode: gradients and the update are a step all the same
            self._begin_engine_step(engine)
        loss = args[0] if args else kwargs.get("loss")
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            with torch._C.DisableTorchFunction():  # no call of the user's
                self._losses.append(loss.detach().clone())
        self._divided = kwargs.get("scale_wrt_gas", True) is False
        return True

    def _after_backward(self, _engine: Any, _state: Any, _result: Any) -> None:
        self.micro += 1

    def _before_step(self, engine: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.follows(engine):
            return self._before_quiet(engine, args, kwargs)
        return self._before_update(engine) if self.in_step else None

    def _after_step(self, engine: Any, before: dict[str, Any], _result: Any) -> None:
        if getattr(engine, "global_steps", -1) == before["step"]:
            return  # not the last micro batch
        self.end(self._after_update(engine, before))
        self._hand_over()

    def _before_train_batch(self, engine: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if not self.follows(engine):
            return self._before_quiet(engine, args, kwargs)
        self._ready(engine)
        before = self._before_update(engine)
        self._batch = self.driven(before["step"] if before["step"] >= 0 else None)
        self._batch_scalars = self._batch.__enter__()
        return before

    def _after_train_batch(self, engine: Any, before: dict[str, Any], result: Any) -> None:
        batch, self._batch = self._batch, None
        self._batch_scalars.update(self._after_update(engine, before))
        if isinstance(result, torch.Tensor) and result.numel() == 1:
            with torch._C.DisableTorchFunction():
                self._batch_scalars["loss"] = result.detach()
        batch.__exit__(None, None, None)
        self._hand_over()

    def _before_destroy(self, engine: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
        """The engine is taken apart; another one may come."""
        if engine is self.engine:
            if self.in_step:
                self.end()
            self._hand_over()
            self._let_go()
            self.engine = self._events = None
            self.models, self.optimizer = [], None
            if self.probe is not None:
                self.probe.parameters.remove()

    # a step

    def _ready(self, engine: Any) -> None:
        optimizer = getattr(engine, "optimizer", None)
        if engine is not self.engine or optimizer is not self.optimizer:
            self.setup([engine], optimizer)

    def _begin_engine_step(self, engine: Any) -> None:
        self.micro = 0
        self._losses.clear()
        step = getattr(engine, "global_steps", None)
        self.begin(step if isinstance(step, int) else None)

    def _before_update(self, engine: Any) -> dict[str, Any]:
        """Numbers that the update is made with: DeepSpeed moves on to the next ones in it."""
        step, skipped = getattr(engine, "global_steps", -1), getattr(engine, "skipped_steps", None)
        seen: dict[str, Any] = {"step": step, "skipped": skipped}
        optimizer = getattr(engine, "optimizer", None)
        seen["numbers"] = numbers = update_numbers(getattr(optimizer, "param_groups", ()))
        scale = getattr(optimizer, "loss_scale", None)
        if isinstance(scale, (int, float)) and not isinstance(scale, bool):
            numbers["loss_scale"] = float(scale)
        return seen

    def _after_update(self, engine: Any, before: dict[str, Any]) -> dict[str, Any]:
        numbers: dict[str, Any] = dict(before["numbers"])
        skipped = getattr(engine, "skipped_steps", None)
        if isinstance(skipped, int) and isinstance(before["skipped"], int):
            numbers["skipped"] = float(skipped > before["skipped"])
        norm = getattr(engine, "_global_grad_norm", None)  # the method of the same name may wait for the device
        if isinstance(norm, (int, float, torch.Tensor)):
            numbers["grad_norm"] = norm
        if self._losses:
            with torch._C.DisableTorchFunction():
                losses = torch.stack([loss.float().reshape(()) for loss in self._losses])
                numbers["loss"] = losses.sum() if self._divided else losses.mean()
            self._losses.clear()
        return numbers

    def _hand_over(self) -> None:
        if self.sink is not None and self._events is not None:
            self.sink.hand_over(self._events.write)

    def _ranks_end(self) -> None:
        """The user's writers ask for their rank, so they get the last steps before the process group goes."""
        with self.safely("end of the process group"):
            if self.probe is not None:
                self.probe.drain()
                self.probe.session.writer.flush()
                self._hand_over()

    def close(self) -> None:
        """Take everything off and finish the files; what the user's writers have not had yet goes there."""
        events = self._events
        super().close()
        if self.sink is not None and events is not None:
            with self.safely("closing"):
                self.sink.hand_over(events.write)
        self.engine = self._events = None


_TABLE = "_INSTRUCTION_MAP"
_PASSES = ("ForwardPass", "BackwardPass")


def is_pipeline(engine: Any) -> bool:
    """Does this engine run schedules?"""
    return isinstance(getattr(type(engine), _TABLE, None), dict)


class Instructions:
    """Tells the observer which micro batch a pass is of: forward and backward passes of different ones alternate."""

    def __init__(self, engine: Any, observer: EngineObserver) -> None:
        self._engine = engine
        self._observer = observer
        self._passes: dict[tuple[str, Any], int] = {}
        self._step = -1
        self._mine: dict[Any, Callable[..., Any]] = {}

    def put_on(self) -> None:
        """The engine gets its own table."""
        table = getattr(self._engine, _TABLE)
        self._mine = {
            kind: self._wrap_instruction(kind.__name__, method) if kind.__name__ in _PASSES else method for kind, method in table.items()
        }
        setattr(self._engine, _TABLE, self._mine)

    def take_off(self) -> None:
        """It uses its class's again."""
        if vars(self._engine).get(_TABLE) is self._mine:
            delattr(self._engine, _TABLE)

    def _wrap_instruction(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def instruction(*args: Any, **kwargs: Any) -> Any:
            observer = self._observer
            if observer.is_driven:  # else an evaluation
                with observer.safely("micro batch"):
                    if observer.step != self._step:
                        self._step = observer.step
                        self._passes.clear()
                    place = (name, kwargs.get("phase"))
                    number = self._passes.get(place, 0)
                    self._passes[place] = number + 1
                    observer.micro_batch(number)
            return method(*args, **kwargs)

        return instruction
