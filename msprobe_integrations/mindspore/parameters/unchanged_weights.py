"""Does the optimizer change the weights at all? Looked at in the first updates of every optimizer that is watched, whatever is monitored.

On the CPU operators that work in place give a new tensor and leave the old one as it is (mindspore 2.7 and 2.10), so the optimizers of
``mint.optim`` run, keep their moments, and never write a weight. The loss stays what it was, and nothing says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mindspore
import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_integrations.common.parameters.gradients import Piece
from msprobe_integrations.mindspore.parameters.optimizers import OptimizerView
from msprobe_integrations.mindspore.tensors.memory import array_at, numel_of

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.probe import Probe

RULE = "no_progress"
UPDATES = 2
"""Updates in a row without any change after which it is said; the first change ends the looking."""
WEIGHTS = 16
LARGEST = 1 << 20
"""Elements of the largest weight that is looked at."""
_EXACT = (mindspore.float32, mindspore.float64)  # in shorter types an update may be lost in rounding


class MovedCheck:
    """Looks at some weights of one optimizer before and after its updates.

    Args:
        probe: gets the alert.
    """

    def __init__(self, probe: Probe, view: OptimizerView, pieces: Sequence[Piece]) -> None:
        self._probe = probe
        self._view = view
        usable = [p for p in pieces if p.parameter.dtype in _EXACT and p.parameter.requires_grad and 0 < numel_of(p.parameter) <= LARGEST]
        self._chosen = sorted(usable, key=lambda p: numel_of(p.parameter))[:WEIGHTS]
        self._before: list[tuple[Piece, Any]] = []
        self._same = 0

    @property
    def over(self) -> bool:
        """Nothing is looked at any more."""
        return not self._chosen

    def before(self, gradients: dict[int, Any]) -> None:
        """An update begins. `gradients`: by id of the parameter."""
        rate = self._view.learning_rate()
        self._before = []
        if rate is None or bool(np.all(array_at(rate) == 0) if isinstance(rate, mindspore.Tensor) else rate == 0):
            return
        for piece in self._chosen:
            gradient = gradients.get(id(piece.parameter))
            if gradient is not None and gradient.dtype in _EXACT and _moves(gradient):
                self._before.append((piece, array_at(piece.parameter).copy()))

    def after(self) -> None:
        """The update is over."""
        before, self._before = self._before, []
        if not before:
            return
        if any(not np.array_equal(old, array_at(piece.parameter), equal_nan=True) for piece, old in before):
            self._chosen = []
            return
        self._same += 1
        if self._same >= UPDATES:
            self._chosen = []
            self._probe.pipeline.alert([self._alert([piece.name for piece, _ in before])])

    def _alert(self, names: list[str]) -> Alert:
        optimizer = type(self._view.optimizer)
        what = f"{optimizer.__module__.rpartition('.')[0] or optimizer.__module__}.{optimizer.__name__}"
        why = "look at the learning rate, at frozen weights and at what the optimizer is called with"
        if optimizer.__module__.startswith("mindspore.mint.optim") and str(mindspore.get_context("device_target")) == "CPU":
            why = (
                "on the CPU the in-place operators that mint.optim writes weights with change nothing; use an optimizer of mindspore.nn or "
                "mindspore.experimental.optim there"
            )
        text = (
            f"{what} has made {self._same} updates and no weight has moved ({len(names)} looked at, all with gradients, '{names[0]}' first)"
        )
        step, rank = self._probe.step, self._probe.backend.rank() or 0
        message = f"rank {rank}, step {step}: {text}: {why}"
        return Alert(RULE, "warning", "param", names[0], step, rank, float(self._same), "weights that change with the update", message)


def _moves(gradient: Any) -> bool:
    values = array_at(gradient)
    return bool(np.isfinite(values).all() and values.any())
