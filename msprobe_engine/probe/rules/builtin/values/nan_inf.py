"""Rule ``nan_inf``: NaN or Inf in any tensor or number of the step.

Which -Inf of activations are those of masks, as against a -Inf that was born in the forward pass (the logarithm of zero).

An additive mask is -Inf on purpose, and so are the scores that it is added to until softmax takes it away. It does no harm: nothing that is
computed after it is NaN or infinite for its sake. So a -Inf is a mask's unless something else of its step is wrong; and then it still is
one where that can be seen:

* all other elements are zero;
* an operation made it that fills memory with what the caller names, or handed on what it was given;
* a module was given it, and what the module gives is finite;
* the same tensor held -Inf in an earlier step, in which nothing was wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.operator_traits import FILLS, normal_op
from msprobe_engine.core.records import Entry, Frame
from msprobe_engine.core.statistics.rows import COUNT, NANS, NEG_INF, POS_INF, ZEROS, as_int64, nonfinite
from msprobe_engine.probe.rules.alert_factory import alert_at, is_excluded, note_rest, scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.base import ORDER, Rule
from msprobe_engine.probe.rules.layout import Layout, LayoutCache
from msprobe_engine.probe.rules.tensor_kinds import KINDS, scalar_kind
from msprobe_engine.probe.rules.uninitialised import API_CALL, Computed


@dataclass(frozen=True, kw_only=True)
class NanInfArgs(CommonArgs):
    masks: bool = arg(True, "in activations, -Inf without NaN and +Inf is taken for an attention mask where it does no harm")
    overflow: bool = arg(True, "with a loss scale above 1, NaN and Inf in gradients are warnings: such a step is skipped")


_FLAG = "npu_overflow"
_LEFT_BEHIND = ", which no gradient of a parameter takes over"
_SCALED = ("grad", "activation_grad")
"""What a loss scale multiplies, and what therefore may overflow in a healthy run."""


class NanInfRule(Rule):
    """Critical alerts for records with NaN or Inf, earliest first, at most `max_alerts` per step. Warnings where only gradients of
    activations are so, and those of parameters are finite.

    A healthy frame costs one look at three columns; entries are walked only after something was found. What overflows in gradients that
    carry a loss scale is said where two steps in a row are skipped after one was not: a scaler looks for its scale by single ones, and
    until the first update by as many as it takes.
    """

    name = "nan_inf"
    fires = "a tensor or number of the step is NaN or Inf; earliest first"
    severity = "critical"
    meaning = "An operation overflowed, divided by zero, or was given NaN. What comes later in the step follows from the first one."
    next = f"{ORDER}. In a dump of the step `msprobe nan_analyze -i DUMP` names the operator in which the first NaN was born"
    args_type = NanInfArgs
    remark = "masks"
    args: NanInfArgs

    def __init__(
        self, args: NanInfArgs | None = None, *, severity: str = "", kinds: Sequence[str] = (), layouts: LayoutCache | None = None
    ) -> None:
        super().__init__(args, severity=severity, kinds=kinds, layouts=layouts)
        self._given_severity = severity

    def setup(self) -> None:
        self._computed = Computed()
        self._masks = Masks()
        self.passed_over = self._masks.passed_over
        self._flagged = False
        self._updated = False
        self._skipped = 0

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for the NaN and Inf of one frame: tensors in order of execution, then scalars."""
        alerts = self._all(frame)
        self._skipped = self._skipped + 1 if frame.skipped else 0
        self._updated = self._updated or not frame.skipped
        usual = self._is_scaled(frame) and frame.skipped and (not self._updated or self._skipped < 2)
        if usual and alerts and alerts[0].severity != self.severity:
            return []  # what comes after the gradient follows from it
        return alerts

    def _all(self, frame: Frame) -> list[Alert]:
        alerts: list[Alert] = []
        masks: list[str] = []
        if len(frame.rows) and nonfinite(frame.rows).any():
            alerts, masks = self._tensors(frame)
        for name in self._scalars(frame):
            kind, value = scalar_kind(name), frame.scalars[name]
            severity = self._severity_of("grad" if name.startswith("grad") else kind, frame)
            alerts.append(
                scalar_alert(
                    frame, name, kind, rule=self, severity=severity, value=value, expected="a finite number", seen=f"value {value}"
                )
            )
        if masks and alerts:
            activations = f"{len(masks)} activation{'s' if len(masks) > 1 else ''}"
            said = f"; further -Inf, in {activations}, was taken for that of masks, the first is {masks[0]}"
            alerts[0] = replace(alerts[0], message=alerts[0].message + said, extra={**alerts[0].extra, "masks": len(masks)})
        return [*alerts, *self._check_saturation(frame)]

    def _scalars(self, frame: Frame) -> list[str]:
        """Numbers of the step that are not finite."""
        bad = [name for name, value in frame.scalars.items() if not math.isfinite(value) and scalar_kind(name) in self.kinds]
        return [name for name in bad if not is_excluded(name, self.args.exclude)]

    def _check_saturation(self, frame: Frame) -> list[Alert]:
        """The device's own flag, where it writes large finite numbers in place of Inf. It stays until somebody clears it: said once."""
        flag = frame.scalars.get(_FLAG)
        if flag is None or is_excluded(_FLAG, self.args.exclude):
            return []
        before, self._flagged = self._flagged, flag > 0
        if before or not self._flagged:
            return []
        severity = self._severity_of("grad", frame)
        seen = "an overflow that the device saturated: no tensor shows it"
        kind = scalar_kind(_FLAG)
        return [scalar_alert(frame, _FLAG, kind, rule=self, severity=severity, value=flag, expected="no overflow", seen=seen)]

    def _tensors(self, frame: Frame) -> tuple[list[Alert], list[str]]:
        """Their alerts, and the names of those whose -Inf is taken for that of a mask."""
        layout = self.layouts.of(frame)
        rows, masks = self._hits(frame, layout)
        ints = as_int64(layout.order_rows(frame))
        # Entries come before samples in a layout; within both it is the order of observation.
        alerts = []
        left_behind = self._is_left_behind(frame, layout, rows, ints)
        for i in rows[: self.args.max_alerts]:
            nans, plus, minus = (int(ints[i, word]) for word in (NANS, POS_INF, NEG_INF))
            parts = [f"{n} {what}" for n, what in ((nans, "NaN"), (plus, "+Inf"), (minus, "-Inf")) if n]
            severity = self._severity_of(KINDS[layout.kinds[i]], frame)
            if left_behind and not self._given_severity:
                severity = "warning"
            alerts.append(
                alert_at(
                    frame,
                    layout,
                    i,
                    rule=self,
                    severity=severity,
                    value=math.nan if nans else math.inf if plus else -math.inf,
                    expected="only finite values",
                    seen=f"{', '.join(parts)} of {int(ints[i, COUNT])} elements{_LEFT_BEHIND if left_behind else ''}",
                    extra={"nans": nans, "infs": plus + minus, "count": int(ints[i, COUNT])},
                )
            )
        return note_rest(alerts, len(rows)), [layout.names[i] for i in masks]

    def first(self, frame: Frame) -> tuple[str, npt.NDArray[np.float64]] | None:
        """Name and statistics row, [16], of the first tensor of the frame that the rule would fire for."""
        if not len(frame.rows) or not nonfinite(frame.rows).any():
            return None
        layout = self.layouts.of(frame)
        rows, _ = self._hits(frame, layout)
        return (layout.names[rows[0]], layout.order_rows(frame)[rows[0]]) if rows else None

    def _hits(self, frame: Frame, layout: Layout) -> tuple[list[int], list[int]]:
        """Tensors that are not finite, in order, and those whose -Inf is taken for that of a mask."""
        ints = as_int64(layout.order_rows(frame))
        certain = (ints[:, NANS] + ints[:, POS_INF]) > 0
        infinite = ~certain & (ints[:, NEG_INF] > 0)
        doubtful = infinite & layout.mask(("activation",)) if self.args.masks else np.zeros(len(infinite), bool)
        hits = self._select_watched(layout, (certain | infinite) & ~doubtful)
        masks = self._select_watched(layout, doubtful)
        if not masks:
            return hits, []
        if not hits and not self._scalars(frame):
            self._masks.without_harm(frame, layout, masks)
            return [], masks
        # What comes after something that is wrong may follow from it: it is neither named nor taken for a mask.
        before = [i for i in masks if not hits or i < hits[0]]
        born = {i for i in before if self._masks.is_born(frame, layout, ints, i)}
        return sorted([*hits, *born]), [i for i in before if i not in born]

    def _is_left_behind(self, frame: Frame, layout: Layout, rows: list[int], ints: Integers) -> bool:
        """Are these gradients of activations, which no gradient of a parameter and no number of the step takes over? The derivative of a
        root at 0 is infinite, and a ReLU before it lets nothing of that through. The gradient of the first call has to be finite as well:
        a stage of a pipeline hands it to another rank."""
        backward = np.flatnonzero(layout.mask(("activation_grad",)))
        if not layout.mask(("grad",)).any() or frame.skipped or not set(rows) <= set(backward.tolist()):
            return False
        elsewhere = ~layout.mask(("activation", "activation_grad"))
        elsewhere[backward] = layout.order[backward] == layout.order[backward].max(initial=0)
        return not ints[elsewhere][:, [NANS, POS_INF, NEG_INF]].any() and all(map(math.isfinite, frame.scalars.values()))

    def _select_watched(self, layout: Layout, bad: npt.NDArray[np.bool_]) -> list[int]:
        bad &= layout.mask(self.kinds)
        if not bad.any():
            return []
        rows = np.flatnonzero(bad & self._computed.of(layout))
        return [i for i in rows.tolist() if not is_excluded(layout.names[i], self.args.exclude)]

    def _severity_of(self, kind: str, frame: Frame) -> str:
        if self._given_severity:
            return self._given_severity
        return "warning" if kind in _SCALED and self._is_scaled(frame) else self.severity

    def _is_scaled(self, frame: Frame) -> bool:
        """A scaler that still has room skips the steps whose gradients overflow, and looks for its scale so."""
        return self.args.overflow and frame.scalars.get("loss_scale", 1.0) > 1.0


Integers = npt.NDArray[np.int64]
_KEPT = 100_000
"""Tensors that are remembered; names that change at every step must not fill the memory."""
_OUTPUT = re.compile(r"(.*)\.output(?:[._].*)?", re.DOTALL)
_GIVEN = re.compile(r"(.*)\.(?:input|kwargs)(?:[._].*)?", re.DOTALL)


class Masks:
    """Tells -Inf of masks from others, frame by frame.

    Attributes:
        passed_over: what was taken for masks so far: number of tensors, name and step of the first; empty: nothing.
    """

    def __init__(self) -> None:
        self.passed_over: dict[str, Any] = {}
        self._harmless: set[str] = set()

    def without_harm(self, frame: Frame, layout: Layout, rows: list[int]) -> None:
        """Nothing else of the frame is wrong: these tensors with -Inf are masks, here and in later frames."""
        new = [key for i in rows if (key := layout.keys[i]) not in self._harmless]
        if not new:
            return
        if not self.passed_over:
            self.passed_over.update(tensors=0, first=layout.names[rows[0]], step=frame.step)
        self.passed_over["tensors"] += len(new)
        if len(self._harmless) < _KEPT:
            self._harmless.update(new)

    def is_born(self, frame: Frame, layout: Layout, ints: Integers, i: int) -> bool:
        """Is the -Inf of tensor `i` no mask's, where something after it in the frame is wrong?

        Args:
            ints: integer words of the rows in the order of the layout, [n, 16].
        """
        zeros, count = int(ints[i, ZEROS]), int(ints[i, COUNT])
        if (zeros and zeros + int(ints[i, NEG_INF]) == count) or layout.keys[i] in self._harmless:
            return False
        name = layout.names[i]
        if (made := API_CALL.fullmatch(name)) is not None and made[2].startswith("output") and normal_op(made[1]) in FILLS:
            return False
        if (match := _OUTPUT.fullmatch(name)) is not None:
            return not any(ints[j, NEG_INF] for j in _of_call(frame, layout, i, match[1], _GIVEN))
        if (match := _GIVEN.fullmatch(name)) is not None:
            return bool(any(ints[j, [NANS, POS_INF, NEG_INF]].any() for j in _of_call(frame, layout, i, match[1], _OUTPUT)))
        return True


def _of_call(frame: Frame, layout: Layout, i: int, call: str, wanted: re.Pattern[str]) -> list[int]:
    """Inputs or outputs of the call that tensor `i` is of."""
    source = layout.source(frame, i)
    near = np.flatnonzero(layout.order == layout.order[i]) if isinstance(source, Entry) else np.arange(len(layout.names))
    rows = []
    for j in near.tolist():
        match = wanted.fullmatch(layout.names[j]) if layout.names[j].startswith(call) else None
        if match is not None and match[1] == call:
            other = layout.source(frame, j)
            if isinstance(other, Entry) or isinstance(source, Entry):
                if other is source:
                    rows.append(j)
            elif (other.family, other.micro_step, other.vpp_stage) == (source.family, source.micro_step, source.vpp_stage):
                rows.append(j)
    return rows
