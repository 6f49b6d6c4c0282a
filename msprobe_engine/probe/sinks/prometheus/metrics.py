"""What Prometheus is told about one rank: counters and gauges held as plain numbers, turned into families when somebody asks.

Names follow https://prometheus.io/docs/practices/naming/: base unit in the name, `_total` for counters, no step, shape or tensor
name as a label. A gauge never becomes NaN, because no comparison with NaN is true: it keeps its last finite value, and
``msprobe_nonfinite_elements_total`` counts.
"""

from __future__ import annotations

import bisect
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.metrics_server.families import Family, Labels
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.rows import NANS, NEG_INF, POS_INF, as_int64
from msprobe_engine.probe.rules.layout import KIND_INDEX, LayoutCache
from msprobe_engine.probe.rules.tensor_kinds import KINDS, scalar_kind
from msprobe_engine.probe.sinks.prometheus.layers import Key, LayerGauges
from msprobe_engine.probe.sinks.prometheus.names import METRICS, PREFIX

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the step duration histogram in seconds."""


_SCALARS = ("loss", "grad_norm", "learning_rate", "loss_scale", "param_norm", "update_norm")
"""Numbers of a step that are metrics of their own; the others are ``msprobe_scalar``."""
_NO_SCALARS = ("step_seconds", "skipped")
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
        self._traffic = Traffic()
        self._steps = self._incomplete = self._skipped = 0
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
        self._cost: Mapping[str, float] = {}
        self._missing: Mapping[str, str] = {}

    @property
    def _info(self) -> Labels:
        return tuple(sorted((str(k), str(v)[:_MAX_TEXT]) for k, v in {**self._more_info, **self._own_info}.items()))

    def watch_info(self, info: Mapping[str, Any]) -> None:
        """Export `info` (place of the rank in the parallel layout), a mapping that its owner fills when it is known."""
        self._more_info = info

    def watch_losses(self, losses: Mapping[str, int]) -> None:
        """Export `losses` (what lost something, to how often), a mapping that its owner goes on changing."""
        self._errors = losses

    def watch_missing(self, missing: Mapping[str, str]) -> None:
        """Export `missing` (names of a framework to the part that is off without them), a mapping that its owner goes on filling."""
        self._missing = missing

    def watch_cost(self, cost: Mapping[str, float]) -> None:
        """Export ``cost["seconds"]`` (time spent at step boundaries), a mapping that its owner goes on changing."""
        self._cost = cost

    def update(self, frame: Frame, alerts: Sequence[Alert]) -> None:
        layout = self._layouts.of(frame)
        rows = layout.order_rows(frame)
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
            self._skipped += frame.skipped
            self._traffic.update(frame)
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
            self._anomalies[pair] = self._anomalies.get(pair, 0) + alert.count
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
        make, none = self._family, ()
        out = [
            make("series_over_limit", {none: float(self._cut)}),
            make("series_dropped", {none: float(self._cut_total)}),
            make("rank_info", {self._info: 1.0}),
            make("steps", {none: float(self._steps)}),
            make("steps_skipped", {none: float(self._skipped)}),
            make("incomplete_steps", {none: float(self._incomplete)}),
            make("start_time_seconds", {none: self._started}),
            make("last_step_timestamp_seconds", {none: self._time}),
            make("nonfinite_elements", {(("kind", kind),): float(count) for kind, count in self._nonfinite.items()}),
        ]
        if self._step is not None:
            out.append(make("step", {none: float(self._step)}))
        if "seconds" in self._cost:
            out.append(make("probe_seconds", {none: self._cost["seconds"]}))
        out.append(self._histogram())
        out += [
            make("first_nonfinite_step", _by("kind", self._first_nonfinite)),
            make("anomalies", {_pair(pair): float(count) for pair, count in self._anomalies.items()}),
            make("last_anomaly_step", {_pair(pair): float(step) for pair, step in self._last_anomaly.items()}),
            make("alert_active", {(*_pair(key[:2]), ("severity", key[2])): float(on) for key, on in self._active.items()}),
        ]
        if self._incident is not None:
            step, when = self._incident
            out += [make("last_incident_step", {none: float(step)}), make("last_incident_timestamp_seconds", {none: when})]
        out.append(make("records_lost", _by("reason", self._lost)))
        out.append(make("write_errors", _by("sink", dict(self._errors))))
        gone = dict(self._missing).items()
        out.append(make("integration_missing", {(("name", name[:_MAX_TEXT]), ("part", part[:_MAX_TEXT])): 1.0 for name, part in gone}))
        out += [make(name, {none: self._scalars[name]}) for name in _SCALARS if name in self._scalars]
        rest = {name: value for name, value in self._scalars.items() if name not in _SCALARS and name not in _NO_SCALARS}
        out.append(make("scalar", {(("name", name[:_MAX_TEXT]),): value for name, value in rest.items()}))
        out += [make("collective_calls", _by("op", self._traffic.calls)), make("collective_bytes", _by("op", self._traffic.bytes))]
        return _within([family for family in out if family.samples], self._max)

    def _layer_families(self) -> list[Family]:
        room = len(self._layer_values) - self._over()
        metrics: dict[str, dict[Labels, float]] = {}
        for (metric, labels), value in list(self._layer_values.items())[:room]:
            metrics.setdefault(metric, {})[tuple((k, v[:_MAX_TEXT]) for k, v in labels)] = value
        return [self._family(name, values) for name, values in metrics.items()]

    def _family(self, name: str, values: Mapping[Labels, float]) -> Family:
        metric = METRICS[name]
        suffix = "_total" if metric.type == "counter" else ""
        return Family(PREFIX + name, metric.type, metric.help, [(suffix, self._rank + labels, value) for labels, value in values.items()])

    def _histogram(self) -> Family:
        samples: list[tuple[str, Labels, float]] = []
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._durations):
            total += count
            samples.append(("_bucket", (*self._rank, ("le", bound)), float(total)))
        samples += [("_count", self._rank, float(total)), ("_sum", self._rank, self._duration_sum)]
        return self._family("step_duration_seconds", {})._replace(samples=samples if total else [])


def _pair(pair: tuple[str, str]) -> Labels:
    return (("rule", pair[0]), ("kind", pair[1]))


def _by(label: str, counts: Mapping[str, float]) -> dict[Labels, float]:
    return {((label, str(name)[:_MAX_TEXT]),): float(count) for name, count in list(counts.items())[:_MAX_SCALARS]}


def _within(families: list[Family], room: int) -> list[Family]:
    out = []
    for family in families:
        if len(family.samples) > room:
            break
        room -= len(family.samples)
        out.append(family)
    return out


_BITS = re.compile(r"(\d+)")


class Traffic:
    """Adds up collectives of frames; what a step holds is worked out once per layout.

    Attributes:
        calls, bytes: operation to count, since the start.
    """

    def __init__(self) -> None:
        self.calls: dict[str, float] = {}
        self.bytes: dict[str, float] = {}
        self._samples: Sequence[Sample] = ()
        self._step: tuple[dict[str, float], dict[str, float]] = ({}, {})

    def update(self, frame: Frame) -> None:
        if frame.samples != self._samples:
            self._samples = frame.samples
            self._step = _count(frame.samples)
        for total, step in zip((self.calls, self.bytes), self._step):
            for op, value in step.items():
                total[op] = total.get(op, 0.0) + value


def _count(samples: Sequence[Sample]) -> tuple[dict[str, float], dict[str, float]]:
    calls: dict[str, set[object]] = {}
    sizes: dict[str, float] = {}
    for sample in samples:
        if sample.family == "other" and "call" in sample.extra:
            calls.setdefault(sample.name, set()).add(sample.extra["call"])
            if "/pre_" not in str(sample.extra.get("tag", "")):
                description = sample.ref.description
                sizes[sample.name] = sizes.get(sample.name, 0.0) + math.prod(description.shape) * element_size(description.dtype)
    return {op: float(len(found)) for op, found in calls.items()}, sizes


def element_size(dtype: str) -> float:
    """Bytes of one element, from the name of its type; 1 for bool and types without a number."""
    match = _BITS.search(dtype)
    return int(match.group(1)) / 8 if match is not None else 1.0
