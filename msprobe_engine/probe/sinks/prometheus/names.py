"""Every metric that is exported: name, type, labels, meaning, and how one series of a node is made of those of its ranks.

The exporter takes names and help texts from here and knows no others; `document` makes ``docs/reference/metrics.md`` of it:
``python -m msprobe_engine.probe.sinks.prometheus.names > docs/reference/metrics.md``.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

PREFIX = "msprobe_"


class Metric(NamedTuple):
    """One metric family.

    Attributes:
        type: gauge, counter or histogram.
        labels: labels besides ``rank``.
        over_node: with ``aggregate: node``, what one series of a node is: ``sum``, ``max`` or ``min`` of its ranks, or ``each``: the
            ranks keep their series (there are few, and which rank it is matters).
        level: ``rank`` or ``layer``; the latter go with ``layers: false``.
    """

    type: str
    labels: tuple[str, ...]
    help: str
    over_node: str
    level: str = "rank"


def _gauge(help: str, *labels: str, node: str = "max") -> Metric:
    return Metric("gauge", labels, help, node)


def _counter(help: str, *labels: str, node: str = "sum") -> Metric:
    return Metric("counter", labels, help, node)


def _layer(help: str, *labels: str, node: str = "max") -> Metric:
    return Metric("gauge", ("layer", *labels), help, node, "layer")


METRICS: dict[str, Metric] = {
    "rank_info": _gauge("Constant 1; the labels say which rank this is.", "local_rank", "dp", "tp", "pp", "cp", "ep", node="each"),
    "step": _gauge("Last step seen.", node="min"),
    "steps": _counter("Steps seen by the probe.", node="max"),
    "steps_skipped": _counter("Optimizer updates that were skipped because of an overflow.", node="max"),
    "incomplete_steps": _counter("Steps that were cut off."),
    "start_time_seconds": _gauge("When the probe started.", node="min"),
    "last_step_timestamp_seconds": _gauge("When the last step was seen, or the probe started.", node="min"),
    "step_duration_seconds": Metric("histogram", (), "Wall-clock time of a step.", "sum"),
    "probe_seconds": _counter("Time that the training thread spent at step boundaries of the probe."),
    "loss": _gauge("Last finite loss."),
    "grad_norm": _gauge("Global gradient norm before clipping, last finite value."),
    "learning_rate": _gauge("Learning rate."),
    "loss_scale": _gauge("Loss scale.", node="min"),
    "param_norm": _gauge("Global norm of the parameters after the optimizer step."),
    "update_norm": _gauge("Global norm of the update, without the learning rate."),
    "scalar": _gauge("Any other number of the step, last finite value.", "name"),
    "local_grad_norm": _gauge("L2 norm of all gradients that this rank holds.", "phase"),
    "nonfinite_elements": _counter("NaN and Inf elements seen; -Inf in activations (attention masks) left out.", "kind", node="each"),
    "first_nonfinite_step": _gauge("First step with NaN or Inf.", "kind", node="min"),
    "collective_calls": _counter("Calls of collectives that the monitor saw.", "op"),
    "collective_bytes": _counter("Bytes of their outputs on this rank.", "op"),
    "anomalies": _counter("Alerts raised.", "rule", "kind", node="each"),
    "last_anomaly_step": _gauge("Step of the last alert.", "rule", "kind", node="each"),
    "alert_active": _gauge("1 when the rule fired at the last step, else 0.", "rule", "kind", "severity", node="each"),
    "last_incident_step": _gauge("Step of the last critical alert.", node="each"),
    "last_incident_timestamp_seconds": _gauge("When the last critical alert was raised.", node="each"),
    "records_lost": _counter("What was observed but could not be kept.", "reason"),
    "integration_missing": _gauge("Constant 1 per name of the framework that this version lacks; the part named is off.", "name", "part"),
    "write_errors": _counter("Frames that a sink or its queue lost.", "sink"),
    "series_over_limit": _gauge("Series cut at the last step because of max_series.", node="sum"),
    "series_dropped": _counter("Values not exported because of max_series."),
    "snapshot_age_seconds": _gauge("Age of what another rank of this node left; grows when the rank is dead.", node="each"),
    "snapshots_missing": _gauge("Ranks of this node that left nothing; no label rank.", node="each"),
    "snapshots_unreadable": _gauge("Ranks of this node whose snapshot is damaged; no label rank.", node="each"),
    "snapshot_samples_invalid": _gauge("Samples in snapshots of this node that are left out; no label rank.", node="each"),
    "layer_grad_norm": _layer("L2 norm of the gradients.", "phase"),
    "layer_grad_absmax": _layer("Largest absolute gradient.", "phase"),
    "layer_grad_zero_ratio": _layer("Share of exact zeros in the gradients.", "phase"),
    "layer_activation_norm": _layer("L2 norm of module inputs or outputs.", "point"),
    "layer_activation_absmax": _layer("Largest absolute value of module inputs or outputs.", "point"),
    "layer_activation_grad_norm": _layer("L2 norm of the gradients of module inputs or outputs.", "point"),
    "layer_param_norm": _layer("L2 norm of the parameters, after the update."),
    "layer_exp_avg_norm": _layer("L2 norm of the first moments."),
    "layer_exp_avg_sq_norm": _layer("L2 norm of the second moments."),
    "layer_update_norm": _layer("L2 norm of the update, without the learning rate."),
    "layer_momentum_agreement_ratio": _layer("Share of elements whose gradient has the sign of the first moment.", node="min"),
    "layer_attention_entropy_nats": _layer("Mean entropy of the attention weights.", node="min"),
    "layer_attention_max_weight_ratio": _layer("Mean of the largest attention weight of every row."),
    "layer_weight_spectral_norm": _layer("Largest singular value of the weight matrices."),
    "layer_weight_stable_rank": _layer("Mean stable rank of the weights.", node="min"),
    "layer_router_similarity_ratio": _layer("Mean cosine similarity of the weight vectors of the experts."),
    "layer_router_entropy_nats": _layer("Mean entropy of the routing probabilities per token.", node="min"),
    "layer_router_dead_experts": _layer("Experts that no token went to."),
}
"""Name without prefix (counters without ``_total``) to what it is."""

_SUFFIX = {"counter": "_total", "gauge": "", "histogram": ""}

_HEAD = """\
# Every metric

How they get out: [Prometheus and Grafana](../guide/prometheus.md). This page is made from the code:
`python -m msprobe_engine.probe.sinks.prometheus.names > docs/reference/metrics.md`.

Every series has the label `rank` (but where the text says it has none). Names that end in `_total` are counters, `_duration_seconds` is a
histogram, all others are gauges; further labels stand in braces. With `aggregate: node` the label is `node` (its first rank) instead, and
the word in brackets says what the one series of the node is; `each` keeps one series per rank.
"""

_TAIL = """
* `kind` is one of `activation`, `activation_grad`, `grad`, `param`, `opt_state`, `update`, `feature`, `collective`, `loss`, `step`.
* `phase` is where a gradient was taken: `local`, `accumulated`, `reduced`, `unscaled`, `clipped`. The clip ratio
  is `msprobe_local_grad_norm{phase="clipped"} / ignoring (phase) msprobe_local_grad_norm{phase="unscaled"}`.
* `layer` is the name of the tensor up to its first number (`decoder.layers.3`), else the first two words of its module.
* A gauge is never NaN: it keeps its last finite value and the counters count.
* Within a layer norms are added in quadrature and the largest micro step counts; ratios and entropies are means.
"""


def format_exported_name(name: str) -> str:
    """The name that a scrape shows: ``steps`` -> ``msprobe_steps_total``."""
    return PREFIX + name + _SUFFIX[METRICS[name].type]


def document() -> str:
    """The page ``docs/reference/metrics.md``."""
    lines = [_HEAD]
    for level, title in (("rank", "One series per rank"), ("layer", "One series per rank and layer (`layers: true`)")):
        lines.append(f"## {title}\n")
        for name, metric in METRICS.items():
            if metric.level == level:
                labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
                lines.append(f"* `{format_exported_name(name)}{labels}` ({metric.over_node}): {metric.help}")
        lines.append("")
    return "\n".join(lines) + _TAIL


if __name__ == "__main__":
    sys.stdout.write(document())
