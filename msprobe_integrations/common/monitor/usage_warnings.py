"""What a loop may have forgotten: without it the monitor is on and writes nothing, and nobody knows why. Said once, in the first steps."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import Frame
from msprobe_integrations.common.monitor.parts import ProbeBase
from msprobe_integrations.common.parameters.parameter_monitor import ParameterMonitor

_log = get_logger()
_STEPS = 3
"""Steps after which it is clear that no update is seen."""
_SWITCHES = (
    *("gradients", "unreduced_gradients", "micro_batch_gradients"),
    *("parameters", "optimizer_states", "updates", "momentum_agreement"),
)
"""What needs an optimizer."""


class UsageWarnings:
    """Looks at the first frames of a probe, as a listener of its pipeline.

    Args:
        probe: whose frames they are; not kept alive.
        parameters: of this probe; not kept alive.
    """

    def __init__(self, probe: ProbeBase, parameters: ParameterMonitor) -> None:
        self._probe, self._parameters = weakref.ref(probe), weakref.ref(parameters)
        self._left = _STEPS
        self._began = True

    def no_begin(self) -> None:
        """`end_step` was called and no step had begun."""
        if self._began:
            self._began = False
            _log.warning(
                "end_step was called without begin_step: nothing of that step was watched; call begin_step(step) where a step begins"
            )

    def numbers(self, scalars: Any) -> Mapping[str, Any] | None:
        """What was given to `end_step` if it has names; else nothing, and it is said once. With `strict` it is raised."""
        if scalars is None or isinstance(scalars, Mapping):
            return scalars
        if (probe := self._probe()) is not None:
            problem = UsageError(f"end_step: {type(scalars).__name__} is not allowed; allowed: names and numbers, like {{'loss': loss}}")
            probe.faults.fail("numbers of end_step", problem, disable=False, hint="the step is written without them")
        return None

    def on_frame(self, frame: Frame, _alerts: Any) -> None:
        """A step is over."""
        if not self._left:
            return
        probe, parameters = self._probe(), self._parameters()
        window = None if probe is None else probe._window
        if probe is None or parameters is None or window is None or not self._began or not window.is_wanted(frame.step, frame.rank):
            return
        self._left = 0 if "skipped" in frame.scalars else self._left - 1  # an update was seen
        if text := self._explain_missing(probe, parameters, frame):
            self._left = 0
            _log.warning(text)

    def _explain_missing(self, probe: ProbeBase, parameters: ParameterMonitor, frame: Frame) -> str:
        if not probe._models:
            return "" if frame.samples else "no model is watched: call attach(model, optimizer) before the first step"
        wanted = _list_switches(probe)
        if not wanted:
            return ""
        if parameters.without_optimizer:
            return f"{', '.join(wanted)}: attach was given no optimizer, so this is not watched; give it one, or switch this off"
        if "skipped" not in frame.scalars and not self._left and parameters.watches:
            names = ", ".join(type(optimizer).__name__ for optimizer in parameters.optimizers) or "the optimizer"
            return f"no update by {names} was seen in {_STEPS} steps; attach the optimizer that trains the model; a step holds one update"
        return ""


def _list_switches(probe: ProbeBase) -> Sequence[str]:
    monitor = probe.monitor
    return [f"monitor.{name}" for name in _SWITCHES if monitor is not None and monitor.enabled and getattr(monitor, name)]
