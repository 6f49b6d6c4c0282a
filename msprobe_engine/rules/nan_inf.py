"""Rule ``nan_inf``: NaN or Inf in any tensor or number of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.records import Frame
from msprobe_engine.rows import COUNT, NANS, NEG_INF, POS_INF, as_int64, nonfinite
from msprobe_engine.rules.args import CommonArgs, arg
from msprobe_engine.rules.base import Alert
from msprobe_engine.rules.common import alert_at, check_kinds, excluded, note_rest, scalar_alert
from msprobe_engine.rules.computed import Computed
from msprobe_engine.rules.kinds import KINDS, scalar_kind
from msprobe_engine.rules.layout import Layout, LayoutCache


@dataclass(frozen=True, kw_only=True)
class NanInfArgs(CommonArgs):
    """Arguments of the rule."""

    masks: bool = arg(True, "in activations, -Inf without NaN and +Inf is taken for an attention mask and is fine")
    overflow: bool = arg(True, "with a loss scale other than 1, NaN and Inf in gradients are warnings: such a step is skipped")


_FLAG = "npu_overflow"
_SCALED = ("grad", "activation_grad")
"""What a loss scale multiplies, and what therefore may overflow in a healthy run."""


class NanInfRule:
    """Critical alerts for records with NaN or Inf, earliest first, at most `max_alerts` per step.

    A healthy frame costs one look at three columns; entries are walked only after something was found.
    """

    name = "nan_inf"

    def __init__(
        self, args: NanInfArgs | None = None, *, severity: str = "", kinds: Sequence[str] = (), layouts: LayoutCache | None = None
    ) -> None:
        self._args = args or NanInfArgs()
        self._severity = severity
        self._kinds = check_kinds(self.name, kinds)
        self._layouts = layouts or LayoutCache()
        self._computed = Computed()
        self._flagged = False

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for the NaN and Inf of one frame: tensors in order of execution, then scalars."""
        alerts: list[Alert] = []
        if len(frame.rows) and nonfinite(frame.rows).any():
            alerts = self._tensors(frame)
        for name, value in frame.scalars.items():
            kind = scalar_kind(name)
            if not math.isfinite(value) and kind in self._kinds and not excluded(name, self._args.exclude):
                severity = self._severity_of("grad" if name.startswith("grad") else kind, frame)
                alerts.append(
                    scalar_alert(
                        frame, name, kind, rule=self.name, severity=severity, value=value, expected="a finite number", seen=f"value {value}"
                    )
                )
        return [*alerts, *self._saturated(frame)]

    def _saturated(self, frame: Frame) -> list[Alert]:
        """The device's own flag, where it writes large finite numbers in place of Inf. It stays until somebody clears it: said once."""
        flag = frame.scalars.get(_FLAG)
        if flag is None or excluded(_FLAG, self._args.exclude):
            return []
        before, self._flagged = self._flagged, flag > 0
        if before or not self._flagged:
            return []
        severity = self._severity_of("grad", frame)
        seen = "an overflow that the device saturated: no tensor shows it"
        kind = scalar_kind(_FLAG)
        return [scalar_alert(frame, _FLAG, kind, rule=self.name, severity=severity, value=flag, expected="no overflow", seen=seen)]

    def _tensors(self, frame: Frame) -> list[Alert]:
        layout = self._layouts.of(frame)
        found = self._hits(frame, layout)
        ints = as_int64(layout.take(frame))
        # Entries come before samples in a layout; within both it is the order of observation.
        alerts = []
        for i in found[: self._args.max_alerts]:
            nans, plus, minus = (int(ints[i, word]) for word in (NANS, POS_INF, NEG_INF))
            parts = [f"{n} {what}" for n, what in ((nans, "NaN"), (plus, "+Inf"), (minus, "-Inf")) if n]
            severity = self._severity_of(KINDS[layout.kinds[i]], frame)
            alerts.append(
                alert_at(
                    frame,
                    layout,
                    i,
                    rule=self.name,
                    severity=severity,
                    value=math.nan if nans else math.inf if plus else -math.inf,
                    expected="only finite values",
                    seen=f"{', '.join(parts)} of {int(ints[i, COUNT])} elements",
                    extra={"nans": nans, "infs": plus + minus, "count": int(ints[i, COUNT])},
                )
            )
        return note_rest(alerts, len(found))

    def first(self, frame: Frame) -> tuple[str, npt.NDArray[np.float64]] | None:
        """Name and statistics row, [16], of the first tensor of the frame that the rule would fire for."""
        if not len(frame.rows) or not nonfinite(frame.rows).any():
            return None
        layout = self._layouts.of(frame)
        found = self._hits(frame, layout)
        return (layout.names[found[0]], layout.take(frame)[found[0]]) if found else None

    def _hits(self, frame: Frame, layout: Layout) -> list[int]:
        ints = as_int64(layout.take(frame))
        certain = (ints[:, NANS] + ints[:, POS_INF]) > 0
        if self._args.masks:
            bad = certain | ((ints[:, NEG_INF] > 0) & ~layout.mask(("activation",)))
        else:
            bad = certain | (ints[:, NEG_INF] > 0)
        bad &= layout.mask(self._kinds)
        if not bad.any():
            return []
        hits = np.flatnonzero(bad & self._computed.of(layout))
        return [i for i in hits.tolist() if not excluded(layout.names[i], self._args.exclude)]

    def _severity_of(self, kind: str, frame: Frame) -> str:
        if self._severity:
            return self._severity
        scaled = self._args.overflow and kind in _SCALED and frame.scalars.get("loss_scale", 1.0) != 1.0
        return "warning" if scaled else "critical"
