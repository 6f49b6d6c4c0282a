"""Rule ``turbulence``: a magnitude leaves the range of its own past."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.core.statistics.rows import COUNT, NANS, NEG_INF, POS_INF, SUM, SUMSQ, as_int64
from msprobe_engine.probe.rules.alert_factory import alert_at, is_excluded, note_rest, number, scalar_alert
from msprobe_engine.probe.rules.arguments import CommonArgs, arg
from msprobe_engine.probe.rules.base import ORDER, Rule
from msprobe_engine.probe.rules.layout import Layout
from msprobe_engine.probe.rules.tensor_kinds import scalar_kind

OPS = ("norm", "mean")


@dataclass(frozen=True, kw_only=True)
class TurbulenceArgs(CommonArgs):
    """Arguments of the rule. With `threshold` t and running mean m of ``|x|``, it fires when ``|x| > m * (1 + t)``."""

    threshold: float = arg(4.0, "how far above its running mean a value may be, relative to it", minimum=0.0)
    two_sided: bool = arg(False, "also fire when |x| * (1 + threshold) is below the running mean")
    warmup: int = arg(10, "healthy values seen before the rule may fire", minimum=1)
    momentum: float = arg(0.05, "weight of a new value in the running mean, once warm", above=0.0)
    floor: float = arg(1e-12, "values and means at or below this are noise", minimum=0.0)
    mean: bool = arg(False, "watch the mean too, not only the norm")
    calls: bool = arg(False, "watch the calls kept for incidents (incident.level) too, not only what the monitor watches")
    scalars: tuple[str, ...] = arg(("loss", "grad_norm"), "numbers of the step that are watched")


class _History:
    """Running mean of `n` magnitudes. Only healthy values enter, and none with more than the limit it was held against, so that
    neither NaN nor one outlier spoils it, and a lasting change of level is accepted after some steps."""

    def __init__(self, n: int) -> None:
        self.mean: Column = np.zeros(n)
        self.seen: npt.NDArray[np.int64] = np.zeros(n, np.int64)

    def find_out_of_range(self, x: Column, healthy: npt.NDArray[np.bool_], args: TurbulenceArgs) -> npt.NDArray[np.bool_]:
        """Positions of `x` (absolute values, [n]) that are out of range. Then takes the healthy values in."""
        limit = self.mean * (1.0 + args.threshold)
        warm = healthy & (self.seen >= args.warmup)
        out = (x > limit) & (x > args.floor)
        if args.two_sided:
            out |= (x * (1.0 + args.threshold) < self.mean) & (self.mean > args.floor)
        out &= warm
        taken = np.where(warm, np.minimum(x, limit), x) if out.any() else x
        # A plain mean while it is young, then an exponential one.
        weight = np.maximum(1.0 / (self.seen + 1.0), args.momentum)
        if healthy.all():
            self.mean += weight * (taken - self.mean)
            self.seen += 1
        else:
            self.mean = np.where(healthy, self.mean + weight * (np.where(healthy, taken, 0.0) - self.mean), self.mean)
            self.seen += healthy
        return out

    def reorder(self, source: npt.NDArray[np.intp]) -> _History:
        """The same history in another order: position i comes from `source[i]`, or is new where that is -1."""
        out = _History(len(source))
        old = source >= 0
        out.mean[old] = self.mean[source[old]]
        out.seen[old] = self.seen[source[old]]
        return out


class TurbulenceRule(Rule):
    """Warnings for records whose norm (or mean) is far from the running mean of its own healthy past.

    Of thousands of intermediate results of a step some leave their range in any healthy run, so calls are looked at only on demand.

    History is kept per record. It follows a record when others come and go, and is dropped when the record is missing.
    """

    name = "turbulence"
    fires = "norm (or mean) above `(1 + threshold)` times the running mean of its own healthy past"
    meaning = "One tensor left the range of its own past: a rare batch, a learning rate that is too high, or a fault in its layer."
    next = f"{ORDER}; a single hit with a normal next step is usually the batch"
    recommended = False
    args_type = TurbulenceArgs
    args: TurbulenceArgs

    def setup(self) -> None:
        self._layout: Layout | None = None
        self._watched: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._scaled: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._ops = OPS if self.args.mean else OPS[:1]
        self._history = {op: _History(0) for op in self._ops}
        self._scalars: dict[str, _History] = {}

    def check(self, frame: Frame) -> list[Alert]:
        """Alerts for one frame. A step that was cut off is not looked at: its values are partial."""
        if not frame.complete:
            return []
        layout = self.layouts.of(frame)
        if layout is not self._layout and layout.names:  # a step that is not due holds nothing, and history waits for the next
            self._adopt_layout(layout, frame)
        far: list[tuple[int, str, float, float]] = []
        if len(layout.names):
            rows = layout.order_rows(frame)
            ints = as_int64(rows)
            finite = ints[:, COUNT] > 0
            if (ints[:, NANS] + ints[:, POS_INF] + ints[:, NEG_INF]).any():
                finite &= (ints[:, NANS] == 0) & (ints[:, POS_INF] == 0) & (ints[:, NEG_INF] == 0)
            factor = self._factor(frame)
            for op in self._ops:
                with np.errstate(invalid="ignore", divide="ignore"):
                    values = np.sqrt(rows[:, SUMSQ]) if op == "norm" else np.abs(rows[:, SUM] / ints[:, COUNT])
                values = values / factor
                history = self._history[op]
                before = history.mean.copy()
                # A sum of squares can overflow although every element is finite.
                hits = history.find_out_of_range(values, finite & (values < np.inf), self.args)
                far += [
                    (i, op, float(values[i] * factor[i]), float(before[i] * factor[i]))
                    for i in np.flatnonzero(hits & self._watched).tolist()
                ]
        far.sort()
        alerts = [
            alert_at(
                frame,
                layout,
                i,
                rule=self,
                value=value,
                expected=self._format_expected(mean),
                seen=f"{op} {number(value)}, {_ratio(value, mean)} its running mean {number(mean)}",
                extra={"op": op, "running_mean": mean},
            )
            for i, op, value, mean in far[: self.args.max_alerts]
        ]
        return note_rest(alerts, len(far)) + self._check_scalars(frame)

    def _factor(self, frame: Frame) -> Column:
        """What each magnitude is divided by before it is held against its past: the loss scale, for gradients that hold it. [n]"""
        scale = frame.scalars.get("loss_scale", 1.0)
        if scale == 1.0 or not 0.0 < scale < np.inf:
            return np.ones(len(self._scaled))
        return np.where(self._scaled, scale, 1.0)

    def _check_scalars(self, frame: Frame) -> list[Alert]:
        alerts = []
        for name in self.args.scalars:
            value = frame.scalars.get(name)
            kind = scalar_kind(name)
            if value is None or kind not in self.kinds:
                continue
            history = self._scalars.setdefault(name, _History(1))
            mean = float(history.mean[0])
            x = np.abs(np.array([value], np.float64))
            if history.find_out_of_range(x, np.isfinite(x), self.args)[0]:
                seen = f"value {number(value)}, {_ratio(abs(value), mean)} its running mean {number(mean)}"
                alerts.append(scalar_alert(frame, name, kind, rule=self, value=value, expected=self._format_expected(mean), seen=seen))
        return alerts

    def _format_expected(self, mean: float) -> str:
        factor = 1.0 + self.args.threshold
        low = f"at least {number(mean / factor)} and " if self.args.two_sided else ""
        return f"{low}at most {number(mean * factor)}"

    def _adopt_layout(self, layout: Layout, frame: Frame) -> None:
        known = {key: i for i, key in enumerate(self._layout.keys)} if self._layout is not None else {}
        source = np.array([known.get(key, -1) for key in layout.keys], np.intp)
        self._history = {op: history.reorder(source) for op, history in self._history.items()}
        self._watched = layout.mask(self.kinds)
        entries = len(frame.entries)
        plain = {i for i, sample in enumerate(frame.samples, entries) if sample.phase in ("unscaled", "clipped")}
        self._scaled = layout.mask(("grad", "activation_grad")) & np.array(
            [order not in plain for order in layout.order.tolist()], np.bool_
        )
        if not self.args.calls:
            self._watched &= layout.order >= len(frame.entries)
        if self.args.exclude:
            self._watched &= np.array([not is_excluded(name, self.args.exclude) for name in layout.names], np.bool_)
        self._layout = layout


def _ratio(value: float, mean: float) -> str:
    return f"{value / mean:.3g} times" if mean > 0.0 else "far above"
