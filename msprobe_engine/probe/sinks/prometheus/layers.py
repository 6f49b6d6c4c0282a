"""Per-layer gauges: thousands of tensors become a few numbers per layer.

Within one layer (and one phase or point) norms are added in quadrature, the largest absolute value is the maximum, and the share
of zeros and means are over all elements. Micro steps are not added up: the largest of them counts, because an accumulated gradient holds
those before it. A group with NaN or Inf gives no new number; the gauge keeps the last finite one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.names import layer_of
from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.columns import absmax
from msprobe_engine.core.statistics.rows import COUNT, SUM, SUMSQ, ZEROS, as_int64, nonfinite
from msprobe_engine.probe.rules.layout import Layout

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
"""Metric name without prefix, labels without rank."""

_GRADIENT = (("layer_grad_norm", "norm"), ("layer_grad_absmax", "absmax"), ("layer_grad_zero_ratio", "zeros"))
_METRICS: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("grad_unreduced", ""): _GRADIENT,
    ("grad_reduced", ""): _GRADIENT,
    ("actv", ""): (("layer_activation_norm", "norm"), ("layer_activation_absmax", "absmax")),
    ("actv_grad", ""): (("layer_activation_grad_norm", "norm"),),
    ("param_updated", ""): (("layer_param_norm", "norm"),),
    ("exp_avg", ""): (("layer_exp_avg_norm", "norm"),),
    ("exp_avg_sq", ""): (("layer_exp_avg_sq_norm", "norm"),),
    ("update", ""): (("layer_update_norm", "norm"),),
    ("other", "mg_direction"): (("layer_momentum_agreement_ratio", "mean"),),
    ("attention_hook", "entropy"): (("layer_attention_entropy_nats", "mean"),),
    ("attention_hook", "softmax_max"): (("layer_attention_max_weight_ratio", "mean"),),
    ("linear_hook", "kernel_norm"): (("layer_weight_spectral_norm", "absmax"),),
    ("linear_hook", "stable_rank"): (("layer_weight_stable_rank", "mean"),),
    ("moe_router_weight_hook", "router_weight_similarity"): (("layer_router_similarity_ratio", "mean"),),
    ("moe_router_logit_hook", "per_token_expert_entropy"): (("layer_router_entropy_nats", "mean"),),
    ("moe_router_logit_hook", "dead_experts"): (("layer_router_dead_experts", "absmax"),),
}
"""Family, and column or tag of the sample, to metrics and the statistic that each of them is."""
_PHASE = {"grad_unreduced": "accumulated", "grad_reduced": "reduced"}


class _Groups(NamedTuple):
    samples: npt.NDArray[np.intp]  # tensors of the layout that belong to a group, [m]
    group: npt.NDArray[np.intp]  # group of each of them, micro steps apart, [m]
    merged: npt.NDArray[np.intp]  # group without micro step of each group, [groups]
    keys: list[tuple[tuple[Key, str], ...]]  # metrics and their statistic, for each merged group


class LayerGauges:
    """Computes the gauges of frames; the grouping is worked out once per layout. Not safe for several threads."""

    def __init__(self, layers: bool = True) -> None:
        self._by_layer = layers
        self._number = -1
        self._groups: _Groups | None = None

    def values(self, frame: Frame, layout: Layout) -> list[tuple[Key, float]]:
        """Metrics of one frame, in the order of the samples; groups that are not finite are missing."""
        if layout.number != self._number:
            self._groups = _group(frame, layout, self._by_layer)
            self._number = layout.number
        groups = self._groups
        if groups is None:
            return []
        rows = frame.rows[layout.rows[groups.samples]]
        ints = as_int64(rows)
        n, merged = len(groups.merged), len(groups.keys)
        bad = np.bincount(groups.group, nonfinite(rows), n) > 0
        norm = np.sqrt(np.bincount(groups.group, rows[:, SUMSQ], n))
        top = np.zeros(n)
        np.maximum.at(top, groups.group, absmax(rows))
        with np.errstate(invalid="ignore", divide="ignore"):
            count = np.bincount(groups.group, ints[:, COUNT], n)
            zero = np.bincount(groups.group, ints[:, ZEROS], n) / count
            mean = np.bincount(groups.group, rows[:, SUM], n) / count
        columns = {}
        for name, column in (("norm", norm), ("absmax", top), ("zeros", zero), ("mean", mean)):
            best = np.full(merged, -np.inf)
            np.maximum.at(best, groups.merged, np.where(bad | ~np.isfinite(column), -np.inf, column))
            columns[name] = best.tolist()
        gauges = ((key, columns[statistic][i]) for i, keys in enumerate(groups.keys) for key, statistic in keys)
        return [(key, value) for key, value in gauges if value != -np.inf]


def _group(frame: Frame, layout: Layout, by_layer: bool) -> _Groups | None:
    samples: list[int] = []
    group: list[int] = []
    merged: list[int] = []
    groups: dict[tuple[object, ...], int] = {}
    final: dict[tuple[object, ...], int] = {}
    keys: list[tuple[tuple[Key, str], ...]] = []

    def add_series(i: int, metrics: tuple[tuple[str, str], ...], labels: Labels, micro_step: int) -> None:
        whole, part = (metrics, labels), (metrics, labels, micro_step)
        if whole not in final:
            final[whole] = len(keys)
            keys.append(tuple(((metric, labels), statistic) for metric, statistic in metrics))
        if part not in groups:
            groups[part] = len(merged)
            merged.append(final[whole])
        samples.append(i)
        group.append(groups[part])

    for i in range(len(layout.names)):
        sample = layout.source(frame, i)
        if isinstance(sample, Sample) and (metrics := _METRICS.get((sample.family, _column(sample)))) is not None:
            labels = _labels(sample)
            if sample.family in _PHASE:
                add_series(i, (("local_grad_norm", "norm"),), labels[1:], sample.micro_step)
            if by_layer:
                add_series(i, metrics, labels, sample.micro_step)
    if not samples:
        return None
    return _Groups(np.array(samples, np.intp), np.array(group, np.intp), np.array(merged, np.intp), keys)


def _column(sample: Sample) -> str:
    return str(sample.extra.get("column") or (sample.extra.get("tag", "") if sample.family == "other" else ""))


def _labels(sample: Sample) -> Labels:
    layer = ("layer", layer_of(sample.name, sample.vpp_stage))
    if sample.family in _PHASE:
        return (layer, ("phase", sample.phase or _PHASE[sample.family]))
    if sample.family in ("actv", "actv_grad"):
        return (layer, ("point", _point(sample.name)))
    return (layer,)


def _point(name: str) -> str:
    for word in reversed(name.split(".")):
        for point in ("input", "output"):
            if word == point or word.startswith(f"{point}_"):
                return point
    return "other"
