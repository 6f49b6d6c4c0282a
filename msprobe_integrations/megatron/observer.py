"""Follows one Megatron training: from the events that the launcher or a callback reports to steps of the probe.

Whatever goes wrong in here stays here: every event is guarded, and a probe that cannot be built leaves the training alone.

Megatron's rerun machine runs a step again when its validation fails (``--rerun-mode validate_results``, Megatron's default): that
second run is captured at full level into an incident of the very step, and nothing of it counts as the step's own.

`train_step` loops ``while machine.should_run_forward_backward(data)``. The first True is the ordinary run, a True in state
``RERUNNING_IN_PLACE`` the second one; whatever comes next ends it (core/rerun_state_machine.py, 0.10 to 0.19). With
``report_stats`` every step runs twice: the second runs are kept apart and not captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import ProbeSettings
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.rerun_check import RerunCheck
from msprobe_integrations.megatron import reliance
from msprobe_integrations.megatron.layout import rank_info, unwrap_model
from msprobe_integrations.megatron.optimizers import is_megatron, loss_scale, numbers_of_update
from msprobe_integrations.megatron.source import MegatronSource, find
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.monitor.step_rerun import StepRerun, seen_so_far
from msprobe_integrations.torch.training.loop import LoopObserver

if TYPE_CHECKING:
    from msprobe_integrations.torch.monitor.probe import TorchProbe


class TrainingObserver(LoopObserver):
    """A `LoopObserver` for Megatron: chunks and their shards, micro batches of the schedules, the rerun machine."""

    def __init__(
        self, settings: ProbeSettings, make_probe: Callable[[ProbeSettings], TorchProbe] = TorchProbe, *, file: str | Path | None = None
    ) -> None:
        super().__init__(settings, make_probe, file=file)
        self._source: MegatronSource | None = None
        self._held = False
        self._marks: dict[str, float] = {}
        self._rerun = Rerun(lambda: {**self.numbers(), **self._scalars}, self._exchange)

    # what is there

    def attach(self, probe: TorchProbe) -> None:
        """The model chunks (DDP-wrapped) and the optimizer exist."""
        probe.pipeline.rank_info.update(rank_info())
        reliance.check(self.models, self.optimizer)
        self._source = None
        megatron = self.optimizer is None or is_megatron(self.optimizer)
        probe.attach([unwrap_model(c) for c in self.models], self.optimizer, find=self._find if megatron else None)
        if self.optimizer is not None:
            self._wrap_step(self.optimizer)

    def _find(self, probe: TorchProbe, _models: Sequence[Any], optimizer: Any) -> MegatronSource | None:
        """The source of the wrapped chunks; modules have their names in the unwrapped ones."""
        self._source = find(probe, self.models, optimizer)
        return self._source

    def _wrap_step(self, optimizer: Any) -> None:
        original, own = optimizer.step, "step" in optimizer.__dict__

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            with self.safely("optimizer"):
                self.add_scalars(self.numbers())  # those of this update: the scheduler and the scaler change them right after
            result = original(*args, **kwargs)
            with self.safely("optimizer"):
                self.after_optimizer(result)
            return result

        def restore() -> None:
            if optimizer.__dict__.get("step") is not step:
                return
            if own:
                optimizer.step = original
            else:
                del optimizer.step

        optimizer.step = step
        self.undo(restore)

    def numbers(self) -> dict[str, Any]:
        """Learning rate, weight decay and the like, and the loss scale, as they are now."""
        numbers: dict[str, Any] = {}
        if self.optimizer is not None:
            numbers.update(numbers_of_update(self.optimizer))
            scale = loss_scale(self.optimizer)
            if scale is not None:
                numbers["loss_scale"] = scale
        return numbers

    def leave_step(self) -> None:
        """A second run that was not finished is over."""
        if self.probe is not None:
            self._rerun.finish(self.probe, complete=False)

    # steps

    def iteration(self, number: int | None) -> AbstractContextManager[dict[str, Any]]:
        """One `train_step`. The step stays open after it, unseen, until Megatron has written its log line
        (`add_logged_scalars`) or the next one begins: what Megatron computes for its log belongs to it. The mapping takes the step's
        scalars."""
        return self.driven(number, over=self._hold)

    def _hold(self) -> None:
        with self.safely("step end"):
            if self._open and self.probe is not None:
                self._held = True
                self.leave_step()
                self.probe.pause()

    def is_step_done(self) -> bool:
        """A step that waits for the log line is complete."""
        return self._held

    def add_logged_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Megatron has written its log line, with these numbers; what is None was not asked for."""
        self.add_scalars({name: value for name, value in scalars.items() if isinstance(value, (int, float, torch.Tensor))})
        if self._held:
            self.end()

    def end(self, scalars: Mapping[str, Any] | None = None, *, complete: bool = True) -> None:
        """The step is over, for whatever reason."""
        with self.safely("step end"):
            if self._held:
                self._held = False
                if self.probe is not None:
                    self.probe.resume()
            if self._open:
                self._scalars.update(self._marks)
                self._marks.clear()
        super().end(scalars, complete=complete)

    def mark(self, name: str, value: float) -> None:
        """The step that is about to begin has scalar `name`: what lies between it and the one before."""
        self._marks[name] = value

    def auxiliary(self, sums: Mapping[str, Any] | None, before: Mapping[str, Any]) -> None:
        """Megatron has added auxiliary losses of the step to its sums; nothing is read here.

        Args:
            sums: name to a tensor of one element; None: this version keeps them elsewhere.
        """
        for name, value in (sums or {}).items():
            key = str(name).replace(" ", "_")
            if key in self._scalars or not isinstance(value, torch.Tensor) or value.numel() != 1:
                continue
            old = before.get(name)
            self.add_scalars({key: value.detach().clone() if old is None else value.detach() - old})

    # events within a step

    def forward_backward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a forward-backward function: all micro batches of a step, or an evaluation."""
        if kwargs.get("forward_only"):
            with self.evaluation():
                return function(*args, **kwargs)
        if self.probe is None and "model" in kwargs:
            self.setup(kwargs["model"])
        if not self.in_step and not self.is_driven:
            self.begin()
        try:
            result = function(*args, **kwargs)
        except BaseException:
            self.interrupted()
            raise
        with self.safely("loss"):
            self._scalars.update(losses(result))
        return result

    def handle_rerun(self, machine: Any, run: bool) -> None:
        """Megatron's rerun machine has said whether a pass of the step is to run."""
        with self.safely("second run"):
            if self.probe is not None and self.in_step:
                self._rerun.handle_rerun(self.probe, machine, run)

    def _exchange(self, counts: Any) -> Any:
        return self._source.exchange(counts) if self._source is not None else None

    def after_optimizer(self, result: Any) -> None:
        """Exit of `optimizer.step`; in a loop that we know nothing else of, the end of the step."""
        with self.safely("optimizer"):
            if not self.in_step:
                return
            if isinstance(result, tuple) and len(result) >= 2:
                self._scalars["skipped"] = 0.0 if result[0] else 1.0
                if result[1] is not None:
                    self._scalars["grad_norm"] = result[1]
            if not self.is_driven:
                self.end()


def step_scalars(result: Any) -> dict[str, Any]:
    """Loss and gradient norm from what `train_step` returns: (loss dict, skipped, ..., grad_norm, zeros ...), where grad_norm is
    the third of four values in 0.8 and 0.9 and the sixth of seven or more since 0.10."""
    if not isinstance(result, tuple) or len(result) < 4:
        return {}
    scalars = losses(result[0])
    scalars["skipped"] = 1.0 if result[1] else 0.0
    norm = result[2] if len(result) < 7 else result[5]
    if isinstance(norm, (int, float)) or hasattr(norm, "detach"):
        scalars["grad_norm"] = norm
    return scalars


def losses(result: Any) -> dict[str, Any]:
    """Losses of a step from what a forward-backward function returned: a dict per micro batch, on the last pipeline stage only.

    A value is a number, or a pair (sum, number of tokens) as Megatron's own loss functions give it. The first key is also called
    ``loss``. Works on the device, reads nothing.
    """
    if isinstance(result, Mapping):
        result = [result]
    if not isinstance(result, Sequence) or not result or not isinstance(result[0], Mapping):
        return {}
    named: dict[str, Any] = {}
    for key in result[0]:
        value = _mean([entry[key] for entry in result if key in entry])
        if value is not None:
            named.setdefault("loss", value)
            named[str(key).replace(" ", "_")] = value
    return named


def _mean(values: Sequence[Any]) -> torch.Tensor | None:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, (tuple, list)) and len(value) == 2:
            parts = [torch.as_tensor(v).detach().float().reshape(()) for v in value]
            tensors.append(torch.stack(parts))
        elif isinstance(value, (int, float, torch.Tensor)):
            tensors.append(torch.as_tensor(value).detach().float().reshape(-1))
    if not tensors or any(t.shape != tensors[0].shape or t.numel() not in (1, 2) for t in tensors):
        return None
    total = torch.stack(tensors).sum(0)
    return total[0] / total[1] if total.numel() == 2 else total[0] / len(tensors)


_log = get_logger()
RULE = "rerun"


class Rerun:
    """Follows the machine through the steps of one training.

    Args:
        scalars: the losses of the step so far.
        exchange: puts aside what the samplers of gradients count within a step (None: they begin anew), or gives it back to them.
    """

    def __init__(self, scalars: Callable[[], Mapping[str, Any]], exchange: Callable[[Any], Any]) -> None:
        self._scalars = scalars
        self._exchange = exchange
        self._counts: Any = None
        self._fired = False
        self._second: StepRerun | None = None
        self._judge: RerunCheck | None = None

    def handle_rerun(self, probe: TorchProbe, machine: Any, run: bool) -> None:
        """The machine has answered whether the pass that follows is to run. All ranks get the same answer."""
        self.finish(probe, says=self._says(machine))
        if run and getattr(machine.state, "name", "") == "RERUNNING_IN_PLACE":
            with probe.guard("second run"), torch.no_grad():
                self._begin_rerun(probe, machine)

    def finish(self, probe: TorchProbe, complete: bool = True, says: str = "") -> None:
        """The second run, if there is one, is over.

        Args:
            complete: False when it was cut off.
            says: the machine's own finding, on the rank whose validation failed.
        """
        second, self._second = self._second, None
        if second is None:
            return
        self._exchange(self._counts)
        with probe.guard("second run"), torch.no_grad():
            facts: dict[str, Any] = {"scalars": self._numbers(), "by": "Megatron's rerun machine"}
            verdict = second.end(complete, {**facts, "machine": says} if says else facts)
            _log.warning("step %d ran twice: %s", probe.step, verdict)

    def _says(self, machine: Any) -> str:
        """``reproduced`` or ``transient`` where the machine compared its result with the first run's, else empty. A validation that
        is not fatal leaves no trace of the comparison."""
        if self._second is None or not self._fired or getattr(machine, "continue_requested", False):
            return ""
        return "reproduced" if getattr(machine, "checkpoint_requested", False) else "transient"

    def _begin_rerun(self, probe: TorchProbe, machine: Any) -> None:
        judge = self._judge = self._judge or RerunCheck(probe.settings)
        first = seen_so_far(probe, scalars=self._numbers())
        probe.pipeline.advance()
        alerts = judge.check(first)
        incidents = probe.session.incidents
        event: Event | None = None
        call = getattr(machine, "failed_validation_call", None)
        failed = bool(getattr(machine, "rerun_requested", False)) and call is not None
        validates = getattr(machine.mode, "name", "") == "VALIDATE_RESULTS"
        if validates:
            probe.pipeline.alert(alerts)
        if validates and incidents is not None and incidents.may_rerun(probe.step):
            reason = getattr(getattr(call, "caller", None), "message", "") if failed else ""
            message = f"Megatron's rerun machine runs this step again{': ' if reason else ''}{reason}"
            rank = first.rank if failed else 0
            event = Event(f"step{probe.step}-{RULE}", probe.step, RULE, rank, probe.step, message[:500])
        second = StepRerun(probe, judge, first, fired=failed, event=event, alerts=alerts)
        self._fired = failed and validates
        self._counts = self._exchange(None)
        second.begin()
        self._second = second

    def _numbers(self) -> dict[str, float]:
        """The losses, read now: this waits for the device, in a step that runs twice anyway."""
        return {name: float(value) for name, value in self._scalars().items()}
