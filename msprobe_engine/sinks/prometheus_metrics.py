"""What Prometheus is told about one rank: counters and gauges held as plain numbers, turned into families when somebody asks.

Names follow https://prometheus.io/docs/practices/naming/: base unit in the name, `_total` for counters, no step, shape or tensor
name as a label. A gauge never becomes NaN, because no comparison with NaN is true: it keeps its last finite value, and
``msprobe_nonfinite_elements_total`` counts.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from msprobe_engine.records import Frame
from msprobe_engine.rows import NANS, NEG_INF, POS_INF, as_int64
from msprobe_engine.rules.base import Alert
from msprobe_engine.rules.kinds import KINDS, scalar_kind
from msprobe_engine.rules.layout import KIND_INDEX, LayoutCache
from msprobe_engine.sinks.prometheus_layers import HELP as LAYER_HELP
from msprobe_engine.sinks.prometheus_layers import Key, LayerGauges

PREFIX = "msprobe_"
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the step duration histogram in seconds."""

Labels = tuple[tuple[str, str], ...]


class Family(NamedTuple):
    """One metric family: name (counters without ``_total``), type, help, and samples (suffix, labels, value)."""

    name: str
    type: str
    help: str
    samples: list[tuple[str, Labels, float]]


_SCALARS = {
    "loss": ("loss", "Last finite loss."),
    "grad_norm": ("grad_norm", "Global gradient norm as the framework reports it (before clipping), last finite value."),
    "learning_rate": ("learning_rate", "Learning rate."),
    "loss_scale": ("loss_scale", "Loss scale."),
}
_MAX_TEXT = 200
_MAX_SCALARS = 50


class RankMetrics:
    """The metrics of one rank. `update` and `families` may be called from different threads.

    Args:
        rank: global rank, becomes the label `rank` of every series.
        max_series: upper bound of series; per-layer gauges are cut first, and what is cut is counted.
        layers: export per-layer gauges.
        info: further labels of ``msprobe_rank_info``, for example ``{"tp": "0"}``.
        clock: seconds since the epoch.
    """

    def __init__(
        self, rank: int, *, max_series: int, layers: bool, info: Mapping[str, str] | None = None, clock: Callable[[], float]
    ) -> None:
        self._rank: Labels = (("rank", str(rank)),)
        self._max = max_series
        self._own_info = dict(info or {})
        self._more_info: Mapping[str, Any] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._layouts = LayoutCache()
        self._layers = LayerGauges(layers)
        self._layer_values: dict[Key, float] = {}
        self._cut = 0
        self._cut_total = 0
        self._steps = self._incomplete = 0
        self._step: int | None = None
        self._time = clock()
        self._started = self._time
        self._durations = [0] * (len(BUCKETS) + 1)
        self._duration_sum = 0.0
        self._scalars: dict[str, float] = {}
        self._nonfinite = dict.fromkeys(KINDS, 0)
        self._first_nonfinite: dict[str, int] = {}
        self._anomalies: dict[tuple[str, str], int] = {}
        self._last_anomaly: dict[tuple[str, str], int] = {}
        self._active: dict[tuple[str, str, str], bool] = {}
        self._incident: tuple[int, float] | None = None
        self._lost: dict[str, int] = {}
        self._errors: Mapping[str, int] = {}

    @property
    def _info(self) -> Labels:
        return tuple(sorted((str(k), str(v)[:_MAX_TEXT]) for k, v in {**self._more_info, **self._own_info}.items()))

    def watch_info(self, info: Mapping[str, Any]) -> None:
        """Export `info` (place of the rank in the parallel layout), a mapping that its owner fills when it is known."""
        self._more_info = info

    def watch_losses(self, losses: Mapping[str, int]) -> None:
        """Export `losses` (what lost something, to how often), a mapping that its owner goes on changing."""
        self._errors = losses

    def update(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        """Take one frame in."""
        layout = self._layouts.of(frame)
        rows = layout.take(frame)
        ints = as_int64(rows)
        bad = ints[:, NANS] + ints[:, POS_INF]
        if len(ints):
            # -Inf alone in an activation is an attention mask (rule nan_inf reads it the same way).
            bad = bad + np.where(layout.kinds == KIND_INDEX["activation"], 0, ints[:, NEG_INF])
        per_kind = np.bincount(layout.kinds, bad, len(KINDS)).astype(np.int64).tolist()
        layers = self._layers.values(frame, layout)
        now = self._clock()
        with self._lock:
            self._steps += 1
            self._incomplete += not frame.complete
            self._duration(frame, now)
            self._step, self._time = frame.step, now
            for kind, count in zip(KINDS, per_kind):
                self._count_nonfinite(kind, count, frame.step)
            for name, value in frame.scalars.items():
                if math.isfinite(value):
                    if name in self._scalars or len(self._scalars) < _MAX_SCALARS:
                        self._scalars[name] = value
                    else:
                        self._cut_total += 1
                else:
                    self._count_nonfinite(scalar_kind(name), 1, frame.step)
            self._take_alerts(alerts, now)
            for reason, count in frame.lost.items():
                self._lost[reason] = self._lost.get(reason, 0) + count
            self._take_layers(layers)

    def families(self) -> list[Family]:
        """All families with at most `max_series` series, those that say what was cut first."""
        with self._lock:
            return self._rank_families() + self._layer_families()

    def _duration(self, frame: Frame, now: float) -> None:
        seconds = frame.scalars.get("step_seconds")
        if seconds is None and self._step is not None and frame.step > self._step:
            seconds = (now - self._time) / (frame.step - self._step)
        if seconds is not None and math.isfinite(seconds):
            self._durations[bisect.bisect_left(BUCKETS, seconds)] += 1
            self._duration_sum += seconds

    def _count_nonfinite(self, kind: str, count: int, step: int) -> None:
        if count:
            self._nonfinite[kind] += count
            self._first_nonfinite.setdefault(kind, step)

    def _take_alerts(self, alerts: Sequence[Alert], now: float) -> None:
        for key in self._active:
            self._active[key] = False
        for alert in alerts:
            pair = (alert.rule, alert.kind)
            self._anomalies[pair] = self._anomalies.get(pair, 0) + 1 + int(alert.extra.get("more", 0))
            self._last_anomaly[pair] = alert.step
            self._active[(alert.rule, alert.kind, alert.severity)] = True
            if alert.severity == "critical":
                self._incident = (alert.step, now)

    def _take_layers(self, layers: list[tuple[Key, float]]) -> None:
        cut = 0
        for key, value in layers:
            if key in self._layer_values or len(self._layer_values) < self._max:
                self._layer_values[key] = value
            else:
                cut += 1
        self._cut = cut + self._over()
        self._cut_total += self._cut

    def _over(self) -> int:
        rank_level = sum(len(family.samples) for family in self._rank_families())
        return max(0, len(self._layer_values) - max(0, self._max - rank_level))

    def _rank_families(self) -> list[Family]:
        gauge, counter = self._gauge, self._counter
        out = [
            gauge("series_over_limit", "Series cut at the last step because of max_series.", {(): float(self._cut)}),
            counter("series_dropped", "Values not exported because of max_series.", {(): float(self._cut_total)}),
            gauge("rank_info", "Constant 1; the labels say which rank this is.", {self._info: 1.0}),
            counter("steps", "Steps seen by the probe.", {(): float(self._steps)}),
            counter("incomplete_steps", "Steps that were cut off.", {(): float(self._incomplete)}),
            gauge("start_time_seconds", "When the probe started.", {(): self._started}),
            gauge(
                "last_step_timestamp_seconds",
                "When the last step was seen, or the probe started.",
                {(): self._time},
            ),
            counter(
                "nonfinite_elements",
                "NaN and Inf elements seen, by kind of tensor; -Inf in activations (attention masks) left out.",
                {(("kind", kind),): float(count) for kind, count in self._nonfinite.items()},
            ),
        ]
        if self._step is not None:
            out.append(gauge("step", "Last step seen.", {(): float(self._step)}))
        out.append(self._histogram())
        by_rule = {_pair(pair): float(count) for pair, count in self._anomalies.items()}
        out += [
            gauge("first_nonfinite_step", "First step with NaN or Inf.", _by("kind", self._first_nonfinite)),
            counter("anomalies", "Alerts raised.", by_rule),
            gauge("last_anomaly_step", "Step of the last alert.", {_pair(pair): float(step) for pair, step in self._last_anomaly.items()}),
            gauge(
                "alert_active",
                "1 when the rule fired at the last step, else 0.",
                {(*_pair(key[:2]), ("severity", key[2])): float(on) for key, on in self._active.items()},
            ),
        ]
        if self._incident is not None:
            step, when = self._incident
            out.append(gauge("last_incident_step", "Step of the last critical alert; critical alerts start incidents.", {(): float(step)}))
            out.append(gauge("last_incident_timestamp_seconds", "When the last critical alert was raised.", {(): when}))
        out.append(counter("records_lost", "What was observed but could not be kept.", _by("reason", self._lost)))
        out.append(counter("write_errors", "Frames that a sink or its queue lost.", _by("sink", dict(self._errors))))
        for name, value in self._scalars.items():
            if name in _SCALARS:
                out.append(gauge(*_SCALARS[name], {(): value}))
        rest: dict[Labels, float] = {
            (("name", name[:_MAX_TEXT]),): v for name, v in self._scalars.items() if name not in _SCALARS and name != "step_seconds"
        }
        out.append(gauge("scalar", "Any other number of the step, last finite value.", rest))
        return _within([family for family in out if family.samples], self._max)

    def _layer_families(self) -> list[Family]:
        room = len(self._layer_values) - self._over()
        metrics: dict[str, dict[Labels, float]] = {name: {} for name in LAYER_HELP}
        for (metric, labels), value in list(self._layer_values.items())[:room]:
            metrics[metric][tuple((k, v[:_MAX_TEXT]) for k, v in labels)] = value
        return [self._gauge(name, LAYER_HELP[name], values) for name, values in metrics.items() if values]

    def _gauge(self, name: str, help: str, values: Mapping[Labels, float]) -> Family:
        return Family(PREFIX + name, "gauge", help, [("", self._rank + labels, value) for labels, value in values.items()])

    def _counter(self, name: str, help: str, values: Mapping[Labels, float]) -> Family:
        return Family(PREFIX + name, "counter", help, [("_total", self._rank + labels, value) for labels, value in values.items()])

    def _histogram(self) -> Family:
        samples: list[tuple[str, Labels, float]] = []
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._durations):
            total += count
            samples.append(("_bucket", (*self._rank, ("le", bound)), float(total)))
        samples += [("_count", self._rank, float(total)), ("_sum", self._rank, self._duration_sum)]
        return Family(PREFIX + "step_duration_seconds", "histogram", "Wall-clock time of a step.", samples if total else [])


def _pair(pair: tuple[str, str]) -> Labels:
    return (("rule", pair[0]), ("kind", pair[1]))


def _by(label: str, counts: Mapping[str, int]) -> dict[Labels, float]:
    return {((label, str(name)[:_MAX_TEXT]),): float(count) for name, count in list(counts.items())[:_MAX_SCALARS]}


def _within(families: list[Family], room: int) -> list[Family]:
    out = []
    for family in families:
        if len(family.samples) > room:
            break
        room -= len(family.samples)
        out.append(family)
    return out
