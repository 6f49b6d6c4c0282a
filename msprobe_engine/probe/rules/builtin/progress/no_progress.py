"""Rule ``no_progress``: steps go by and nothing changes.

That no step goes by at all cannot be seen from inside a frame; the Prometheus alert ``MsprobeNoStep`` looks after it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import BATCH_AGE, FINER_COPY, NO_GRADIENT, Frame
from msprobe_engine.core.statistics.rows import COUNT, DIGEST, FLAGS, HAS_DIGEST, MAX, MIN, SUM, SUMSQ, ZEROS, as_int64
from msprobe_engine.probe.rules.alert_factory import scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.fallen_loss import Remainder
from msprobe_engine.probe.rules.layout import Layout
from msprobe_engine.probe.rules.tensor_kinds import scalar_kind

GRADIENTS = "all reduced gradients"
_AMONG, _GAPS = 5, 2
"""Among how many times `patience` steps gradients that come and go are counted, and how often they have to have come again."""
_KNOWN, _KEPT, _EVEN = 3, 10, 0.2
"""How many times `patience` losses have to be there and are kept, and part of their usual bend that is an even fall."""


@dataclass(frozen=True, kw_only=True)
class NoProgressArgs(CommonArgs):
    patience: int = arg(10, "monitored steps in a row without a change before the rule fires, and between two alerts", minimum=1)


class _Scatter:
    """Whether a loss that scattered from batch to batch has begun to fall smoothly."""

    def __init__(self, patience: int) -> None:
        self._values: deque[float] = deque(maxlen=_KEPT * patience)
        self._patience = patience

    def is_gone(self, value: float) -> bool:
        """One more value: has the loss fallen in each of the last steps, evenly as it never did before?"""
        self._values.append(value)
        if len(self._values) < _KNOWN * self._patience:
            return False
        steps = np.diff(np.array(self._values))
        bends, last = np.abs(np.diff(steps)), self._patience
        return bool((steps[-last:] < 0.0).all() and bends[1 - last :].max() < _EVEN * np.median(bends[:-last]))


class _ComeAndGo:
    """Whether gradients are exactly zero in some steps, other ones in between, whose losses are like those of the other steps. A batch that
    leaves nothing to learn (a margin that is kept, answers that are all as good) has a loss of its own: the least, or always the same."""

    def __init__(self, patience: int) -> None:
        self._steps: deque[tuple[bool, float]] = deque(maxlen=_AMONG * patience)
        self._patience = patience

    def __len__(self) -> int:
        return len(self._steps)

    def count(self, zero: bool, loss: float) -> int:
        """One more step: how many of the last ones are without gradients, 0 where it is no such case."""
        self._steps.append((zero, loss))
        without, others = ([loss for is_zero, loss in self._steps if is_zero == wanted] for wanted in (True, False))
        seen = [is_zero for is_zero, _ in self._steps]
        gaps = sum(before and not after for before, after in itertools.pairwise(seen))
        if len(without) < self._patience or gaps < _GAPS or not all(map(math.isfinite, without)):
            return 0
        return len(without) if 2 * len(set(without)) > len(without) and statistics.median(without) > min(others) else 0


class NoProgressRule(Rule):
    """Warnings when for `patience` frames in a row the loss is bitwise the same, all reduced gradients are exactly zero, all
    updated parameters are the same (by digest where it was taken, else by five statistics), or all learning rates are 0 after they were
    not. And when a loss that scattered falls smoothly for so many steps: it is that of one batch over and over; or when gradients are
    all zero in so many of the last steps, again and again, and the losses of these steps are as those of others.

    Steps with learning rate 0 say nothing about parameters, nor do those of which the optimizer updates a finer copy. What a frame does
    not hold is not judged, nor is a task that is learned: a loss that has come down to nothing has no gradient.
    """

    name = "no_progress"
    fires = (
        "`patience` monitored steps with the same loss, with all reduced gradients exactly zero, with unchanged parameters, with a "
        "learning rate that has become 0, or with a loss that has stopped to scatter; or gradients that are all zero in every few steps"
    )
    meaning = "Nothing is learned: a learning rate of 0, a graph that is cut off, frozen parameters, or the same batch over and over."
    next = "check learning rate, requires_grad and the data loader"
    all_kinds = ("loss", "grad", "param", "step")
    args_type = NoProgressArgs
    args: NoProgressArgs

    def setup(self) -> None:
        self._same: dict[str, int] = {}
        self._losses: dict[str, float] = {}
        self._left: dict[str, Remainder] = {}
        self._scatter: dict[str, _Scatter] = {}
        self._come_and_go = _ComeAndGo(self.args.patience)
        self._said: set[str] = set()
        self._had_rate = False
        self._params: npt.NDArray[np.int64] | None = None
        self._layout: Layout | None = None
        self._families: dict[str, npt.NDArray[np.intp]] = {}

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame; a step that was cut off, or whose update was skipped, is not looked at."""
        if not frame.complete or frame.skipped:
            return []
        losses = {name: value for name, value in frame.scalars.items() if scalar_kind(name) == "loss"}
        nothing = {name: self._left.setdefault(name, Remainder()).is_nothing(value) for name, value in losses.items()}
        same = {name: self._loss_stays(name, value) for name, value in losses.items()}
        if nothing and all(nothing.values()):
            self._same.clear()
            return []
        alerts: list[Alert] = []
        if "loss" in self.kinds:
            for name, value in losses.items():
                if not nothing[name]:
                    alerts += self._count(frame, name, "loss", same[name], value, "unchanged", "a loss that changes")
                    alerts += self._evenly(frame, name, value)
        if "grad" in self.kinds:
            rows = self._rows_of(frame, "grad_reduced")
            zero = bool((as_int64(rows)[:, ZEROS] == as_int64(rows)[:, COUNT]).all()) if len(rows) else None
            if zero is None and NO_GRADIENT in frame.untrained.values():
                zero = True
            what = "exactly zero" if len(rows) else "not there at the update"
            alerts += self._count(frame, GRADIENTS, "grad", zero, 0.0, what, "gradients other than zero")
            if zero is not None and losses:
                alerts += self._again_and_again(frame, zero, next(iter(losses.values())))
        if "param" in self.kinds:
            still = self._params_stay(frame)
            alerts += self._count(frame, "all parameters", "param", still, 0.0, "unchanged by the optimizer step", "parameters that change")
        if "step" in self.kinds:
            rates = [value for name, value in frame.scalars.items() if name.startswith("learning_rate")]
            idle = bool(rates) and not any(rates)
            self._had_rate = self._had_rate or any(rates)
            stays = idle if self._had_rate and rates else None
            alerts += self._count(frame, "learning_rate", "step", stays, 0.0, "0, which it was not before,", "a rate other than 0")
        return alerts

    def _evenly(self, frame: Frame, name: str, value: float) -> list[Alert]:
        """Of a loss that has stopped to scatter, once. Where it is known to be that of one batch, ``repeated_batch`` says it."""
        scatter = self._scatter.setdefault(name, _Scatter(self.args.patience))
        if not math.isfinite(value) or not scatter.is_gone(value) or name in self._said or frame.facts.get(BATCH_AGE) == 1.0:
            return []
        if any(pattern in name for pattern in self.args.exclude):
            return []
        self._said.add(name)
        seen = f"value {value!r}, falls smoothly for {self.args.patience} steps and scattered before: the same batch over and over?"
        return [scalar_alert(frame, name, "loss", rule=self, value=value, expected="the scatter of other batches", seen=seen)]

    def _again_and_again(self, frame: Frame, zero: bool, loss: float) -> list[Alert]:
        """Of gradients that are zero in every few steps, once."""
        count = self._come_and_go.count(zero, loss)
        if not count or GRADIENTS in self._said or any(pattern in GRADIENTS for pattern in self.args.exclude):
            return []
        self._said.add(GRADIENTS)
        seen = (
            f"exactly zero at the update in {count} of the last {len(self._come_and_go)} monitored steps, again and again, although their "
            "losses are as those of others: are they set to zero before the update?"
        )
        return [scalar_alert(frame, GRADIENTS, "grad", rule=self, value=0.0, expected="gradients other than zero", seen=seen)]

    def _count(self, frame: Frame, name: str, kind: str, stays: bool | None, value: float, what: str, expected: str) -> list[Alert]:
        if stays is None:
            return []
        self._same[name] = n = self._same.get(name, 0) + 1 if stays else 0
        if n == 0 or n % self.args.patience or any(pattern in name for pattern in self.args.exclude):
            return []
        seen = f"{what} for {n} monitored steps" + (f" (value {value!r})" if kind == "loss" else "")
        return [scalar_alert(frame, name, kind, rule=self, value=value, expected=expected, seen=seen)]

    def _loss_stays(self, name: str, value: float) -> bool | None:
        if not math.isfinite(value):
            return None  # rule nan_inf
        last = self._losses.get(name)
        self._losses[name] = value
        return last == value

    def _params_stay(self, frame: Frame) -> bool | None:
        rows = self._rows_of(frame, "param_updated")
        if not len(rows):
            return None
        ints = as_int64(rows)
        if (ints[:, FLAGS] & HAS_DIGEST).all():
            now = ints[:, [COUNT, DIGEST]]
        else:
            now = ints[:, [COUNT, ZEROS, MIN, MAX, SUM, SUMSQ]]
        last, self._params = self._params, now
        if frame.scalars.get("learning_rate") == 0.0 or last is None:
            return None
        return last.shape == now.shape and bool((last == now).all())

    def _rows_of(self, frame: Frame, family: str) -> npt.NDArray[np.float64]:
        layout = self.layouts.of(frame)
        if layout is not self._layout:
            self._layout, self._families = layout, {}
        index = self._families.get(family)
        if index is None:
            chosen = [s for s in frame.samples if s.family == family and s.ref.row >= 0]
            if family == "param_updated":
                chosen = [s for s in chosen if FINER_COPY not in s.extra]
            index = np.array([s.ref.row for s in chosen], np.intp)
            self._families[family] = index
        return frame.rows[index]
