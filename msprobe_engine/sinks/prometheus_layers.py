"""Per-layer gauges: thousands of tensors become a few numbers per layer.

Within one layer (and one phase or point) norms are added in quadrature, the largest absolute value is the maximum, and the share
of zeros is over all elements. Micro steps are not added up: the largest of them counts, because an accumulated gradient holds
those before it. A group with NaN or Inf gives no new number; the gauge keeps the last finite one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.columns import absmax
from msprobe_engine.records import Frame, Sample
from msprobe_engine.rows import COUNT, SUMSQ, ZEROS, as_int64, nonfinite
from msprobe_engine.rules.layout import Layout

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]
"""Metric name without prefix, labels without rank."""

_GRADIENT = ("layer_grad_norm", "layer_grad_absmax", "layer_grad_zero_ratio")
_STATISTICS = ("norm", "absmax", "zero_ratio")
_METRICS = {
    "grad_unreduced": _GRADIENT,
    "grad_reduced": _GRADIENT,
    "actv": ("layer_activation_norm", "layer_activation_absmax"),
    "actv_grad": ("layer_activation_grad_norm",),
    "param_updated": ("layer_param_norm",),
    "exp_avg": ("layer_exp_avg_norm",),
    "exp_avg_sq": ("layer_exp_avg_sq_norm",),
}
_PHASE = {"grad_unreduced": "accumulated", "grad_reduced": "reduced"}

HELP = {
    "local_grad_norm": "L2 norm of all gradients that this rank holds (its own shards), by phase.",
    "layer_grad_norm": "L2 norm of the gradients of one layer on this rank.",
    "layer_grad_absmax": "Largest absolute gradient of one layer on this rank.",
    "layer_grad_zero_ratio": "Share of exact zeros in the gradients of one layer on this rank.",
    "layer_activation_norm": "L2 norm of the module inputs or outputs of one layer on this rank, largest micro step.",
    "layer_activation_absmax": "Largest absolute value of the module inputs or outputs of one layer on this rank.",
    "layer_activation_grad_norm": "L2 norm of the gradients of module inputs or outputs of one layer on this rank.",
    "layer_param_norm": "L2 norm of the parameters of one layer on this rank, after the optimizer step.",
    "layer_exp_avg_norm": "L2 norm of the first moments of one layer on this rank.",
    "layer_exp_avg_sq_norm": "L2 norm of the second moments of one layer on this rank.",
}


class _Groups(NamedTuple):
    samples: npt.NDArray[np.intp]  # tensors of the layout that belong to a group, [m]
    group: npt.NDArray[np.intp]  # group of each of them, micro steps apart, [m]
    merged: npt.NDArray[np.intp]  # group without micro step of each group, [groups]
    keys: list[tuple[Key, ...]]  # one key per statistic, for each merged group


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
            zero = np.bincount(groups.group, ints[:, ZEROS], n) / np.bincount(groups.group, ints[:, COUNT], n)
        columns = []
        for column in (norm, top, zero):
            best = np.full(merged, -1.0)
            np.maximum.at(best, groups.merged, np.where(bad | ~np.isfinite(column), -1.0, column))
            columns.append(best.tolist())
        return [(key, column[i]) for i, keys in enumerate(groups.keys) for key, column in zip(keys, columns) if column[i] >= 0.0]


def _group(frame: Frame, layout: Layout, by_layer: bool) -> _Groups | None:
    samples: list[int] = []
    group: list[int] = []
    merged: list[int] = []
    groups: dict[tuple[object, ...], int] = {}
    final: dict[tuple[object, ...], int] = {}
    keys: list[tuple[Key, ...]] = []

    def put(i: int, metrics: tuple[str, ...], labels: Labels, micro_step: int) -> None:
        whole, part = (metrics, labels), (metrics, labels, micro_step)
        if whole not in final:
            final[whole] = len(keys)
            keys.append(tuple((metric, labels) for metric in metrics))
        if part not in groups:
            groups[part] = len(merged)
            merged.append(final[whole])
        samples.append(i)
        group.append(groups[part])

    for i in range(len(layout.names)):
        sample = layout.source(frame, i)
        if isinstance(sample, Sample) and sample.family in _METRICS:
            labels = _labels(sample)
            if sample.family in _PHASE:
                put(i, ("local_grad_norm",), labels[1:], sample.micro_step)
            if by_layer:
                put(i, _METRICS[sample.family], labels, sample.micro_step)
    if not samples:
        return None
    return _Groups(np.array(samples, np.intp), np.array(group, np.intp), np.array(merged, np.intp), keys)


def _labels(sample: Sample) -> Labels:
    layer = ("layer", layer_of(sample.name, sample.vpp_stage))
    if sample.family in _PHASE:
        return (layer, ("phase", sample.phase or _PHASE[sample.family]))
    if sample.family in ("actv", "actv_grad"):
        return (layer, ("point", _point(sample.name)))
    return (layer,)


def layer_of(name: str, vpp_stage: int = 0) -> str:
    """The layer that a tensor belongs to: its name up to the first number; without a number the first two words of its module.

    ``decoder.layers.3.mlp.linear_fc1.weight`` -> ``decoder.layers.3``, ``embedding.word_embeddings.weight`` ->
    ``embedding.word_embeddings``. Leading ``module.`` words are wrappers and left out; chunk v > 0 gives ``v:`` in front.
    """
    words = name.split(".")
    while len(words) > 1 and words[0] in ("module", "_fsdp_wrapped_module", "_orig_mod", ""):
        words = words[1:]
    number = next((i for i, word in enumerate(words) if word.isdigit()), None)
    if number is not None and number > 0:
        layer = ".".join(words[: number + 1])
    else:
        layer = ".".join(words[:-1][:2]) or words[0] or "root"
    return f"{vpp_stage}:{layer}" if vpp_stage > 0 else layer


def _point(name: str) -> str:
    for word in reversed(name.split(".")):
        for point in ("input", "output"):
            if word == point or word.startswith(f"{point}_"):
                return point
    return "other"
