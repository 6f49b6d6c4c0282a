"""Megatron's rerun machine runs a step again when its validation fails (``--rerun-mode validate_results``, Megatron's default): that
second run is captured at full level into an incident of the very step, and nothing of it counts as the step's own.

`train_step` loops ``while machine.should_run_forward_backward(data)``. The first True is the ordinary run, a True in state
``RERUNNING_IN_PLACE`` the second one; whatever comes next ends it (core/rerun_state_machine.py, 0.10 to 0.19). With
``report_stats`` every step runs twice: the second runs are kept apart and not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from msprobe_engine.core.log import get_logger
from msprobe_engine.probe.incident.again import Judge
from msprobe_engine.probe.incident.event import Event
from msprobe_integrations.torch.monitor.step_rerun import StepRerun, seen_so_far

if TYPE_CHECKING:
    from msprobe_integrations.torch.monitor.probe import TorchProbe

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
        self._judge: Judge | None = None

    def turn(self, probe: TorchProbe, machine: Any, run: bool) -> None:
        """The machine has answered whether the pass that follows is to run. All ranks get the same answer."""
        self.finish(probe, says=self._says(machine))
        if run and getattr(machine.state, "name", "") == "RERUNNING_IN_PLACE":
            with probe.guard("second run"), torch.no_grad():
                self._begin(probe, machine)

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

    def _begin(self, probe: TorchProbe, machine: Any) -> None:
        judge = self._judge = self._judge or Judge(probe.settings)
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
            what = getattr(getattr(call, "caller", None), "message", "") if failed else ""
            message = f"Megatron's rerun machine runs this step again{': ' if what else ''}{what}"
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
