"""Makes the Grafana dashboard: ``python deploy/grafana/build.py > deploy/grafana/msprobe.json``.

Plain JSON of the dashboard model (schema version 39, Grafana 10 or newer); no library. A row has at most four panels, a panel at most
a few lines: where there are many layers or ranks, the worst five are shown.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHO = '{job=~"$job", rank=~"$rank"}'


class Panel(NamedTuple):
    """One panel: title, queries (expression, legend), unit, kind, and what it tells."""

    title: str
    queries: list[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    log: bool = False


def _m(name: str, more: str = "") -> str:
    return f'msprobe_{name}{{job=~"$job", rank=~"$rank"{", " + more if more else ""}}}'


def _worst(name: str, more: str = "", top: str = "topk") -> str:
    return f"{top}(5, {_m(name, more)})"


ROWS: dict[str, list[Panel]] = {
    "Is it healthy?": [
        Panel(
            "Alerts active now",
            [(f"sum by (rule, severity, rank) ({_m('alert_active')}) > 0", "{{rule}} ({{severity}}) rank {{rank}}")],
            kind="table",
            about="Rules that fired at the last step, with the rank.",
        ),
        Panel("Alerts per hour", [(f"sum by (rule) (increase({_m('anomalies_total')}[1h]))", "{{rule}}")]),
        Panel(
            "NaN and Inf elements",
            [(f"sum by (kind) (increase({_m('nonfinite_elements_total')}[5m]))", "{{kind}}")],
            about="By kind of tensor, in five minutes. -Inf alone in activations is a mask and not counted.",
        ),
        Panel(
            "Last incident, last alert, first NaN (step)",
            [
                (f"max({_m('last_incident_step')})", "incident"),
                (f"max by (rule) ({_m('last_anomaly_step')})", "{{rule}}"),
                (f"min by (kind) ({_m('first_nonfinite_step')})", "first NaN in {{kind}}"),
            ],
            kind="stat",
        ),
    ],
    "Pace": [
        Panel("Step", [(f"max({_m('step')})", "fastest"), (f"min({_m('step')})", "slowest")], kind="stat"),
        Panel(
            "Step time",
            [
                (f"histogram_quantile(0.5, sum by (le) (rate({_m('step_duration_seconds_bucket')}[5m])))", "median"),
                (f"histogram_quantile(0.99, sum by (le) (rate({_m('step_duration_seconds_bucket')}[5m])))", "99 %"),
            ],
            unit="s",
        ),
        Panel(
            "Steps per second, and skipped",
            [
                (f"max(rate({_m('steps_total')}[5m]))", "steps"),
                (f"max(rate({_m('steps_skipped_total')}[5m]))", "skipped (overflow)"),
                (f"sum(rate({_m('incomplete_steps_total')}[5m]))", "cut off"),
            ],
        ),
        Panel(
            "Seconds since the last step",
            [
                (f"topk(5, time() - {_m('last_step_timestamp_seconds')})", "rank {{rank}}"),
                (f"min(time() - {_m('start_time_seconds')})", "since start"),
            ],
            unit="s",
        ),
    ],
    "Optimization": [
        Panel("Loss", [(_m("loss"), "rank {{rank}}")], about="Last finite value."),
        Panel(
            "Gradient norm",
            [
                (f"max({_m('grad_norm')})", "as the framework says"),
                (f"max by (phase) ({_m('local_grad_norm')})", "{{phase}}, one rank's part"),
            ],
            log=True,
        ),
        Panel(
            "Update norm and parameter norm",
            [(f"max({_m('update_norm')})", "update"), (f"max({_m('param_norm')})", "parameters")],
            log=True,
            about="A doubling of the update norm is the earliest known sign of a loss spike.",
        ),
        Panel(
            "Learning rate, loss scale",
            [(f"max({_m('learning_rate')})", "learning rate"), (f"min({_m('loss_scale')})", "loss scale")],
            log=True,
        ),
    ],
    "Layers: gradients and updates (worst five)": [
        Panel("Gradient norm", [(_worst("layer_grad_norm"), "{{layer}} {{phase}} rank {{rank}}")], log=True),
        Panel("Largest gradient", [(_worst("layer_grad_absmax"), "{{layer}} {{phase}} rank {{rank}}")], log=True),
        Panel("Zeros in gradients", [(_worst("layer_grad_zero_ratio"), "{{layer}} {{phase}} rank {{rank}}")], unit="percentunit"),
        Panel("Update norm", [(_worst("layer_update_norm"), "{{layer}} rank {{rank}}")], log=True),
    ],
    "Layers: parameters and moments (worst five)": [
        Panel("Parameter norm", [(_worst("layer_param_norm"), "{{layer}} rank {{rank}}")]),
        Panel("First moment", [(_worst("layer_exp_avg_norm"), "{{layer}} rank {{rank}}")], log=True),
        Panel("Second moment", [(_worst("layer_exp_avg_sq_norm"), "{{layer}} rank {{rank}}")], log=True),
        Panel(
            "Gradient agrees with momentum (lowest)",
            [(_worst("layer_momentum_agreement_ratio", top="bottomk"), "{{layer}} rank {{rank}}")],
            unit="percentunit",
        ),
    ],
    "Layers: activations (worst five)": [
        Panel("Activation norm", [(_worst("layer_activation_norm"), "{{layer}} {{point}} rank {{rank}}")], log=True),
        Panel("Largest activation", [(_worst("layer_activation_absmax"), "{{layer}} {{point}} rank {{rank}}")], log=True),
        Panel("Gradient of activations", [(_worst("layer_activation_grad_norm"), "{{layer}} {{point}} rank {{rank}}")], log=True),
    ],
    "Attention, weights, routers (worst five)": [
        Panel(
            "Attention",
            [
                (_worst("layer_attention_entropy_nats", top="bottomk"), "entropy {{layer}}"),
                (_worst("layer_attention_max_weight_ratio"), "largest weight {{layer}}"),
            ],
            about="Entropy that collapses to 0 announces attention that looks at one token.",
        ),
        Panel(
            "Weights",
            [
                (_worst("layer_weight_spectral_norm"), "spectral norm {{layer}}"),
                (_worst("layer_weight_stable_rank", top="bottomk"), "stable rank {{layer}}"),
            ],
        ),
        Panel(
            "Routers",
            [
                (_worst("layer_router_entropy_nats", top="bottomk"), "entropy {{layer}}"),
                (_worst("layer_router_similarity_ratio"), "similarity {{layer}}"),
            ],
        ),
        Panel("Experts without tokens", [(_worst("layer_router_dead_experts"), "{{layer}} rank {{rank}}")]),
    ],
    "Collectives": [
        Panel("Calls per second", [(f"sum by (op) (rate({_m('collective_calls_total')}[5m]))", "{{op}}")]),
        Panel("Bytes per second", [(f"sum by (op) (rate({_m('collective_bytes_total')}[5m]))", "{{op}}")], unit="Bps"),
        Panel("Other numbers of the step", [(_worst("scalar"), "{{name}} rank {{rank}}")]),
    ],
    "The probe itself": [
        Panel("Time at step boundaries", [(f"max(rate({_m('probe_seconds_total')}[5m]))", "of one second")], unit="percentunit"),
        Panel(
            "Lost, or off because the framework has another name for something",
            [
                (f"sum by (reason) (increase({_m('records_lost_total')}[15m]))", "records: {{reason}}"),
                (f"sum by (sink) (increase({_m('write_errors_total')}[15m]))", "frames: {{sink}}"),
                (f"count by (name, part) ({_m('integration_missing')})", "off: {{part}}, without {{name}}"),
            ],
        ),
        Panel(
            "Series cut by max_series",
            [(f"max({_m('series_over_limit')})", "now"), (f"sum(increase({_m('series_dropped_total')}[15m]))", "values in 15 minutes")],
        ),
        Panel(
            "Ranks of a node",
            [
                (f"topk(5, {_m('snapshot_age_seconds')})", "age rank {{rank}}"),
                ('sum(msprobe_snapshots_missing{job=~"$job"})', "missing"),
                ('sum(msprobe_snapshots_unreadable{job=~"$job"})', "unreadable"),
                ('sum(msprobe_snapshot_samples_invalid{job=~"$job"})', "samples left out"),
            ],
            unit="s",
        ),
    ],
}


def panel(spec: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    """One panel of the dashboard model."""
    targets: list[dict[str, Any]] = []
    for i, (expression, legend) in enumerate(spec.queries):
        target: dict[str, Any] = {"refId": chr(65 + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
        if spec.kind == "table":
            target |= {"instant": True, "format": "table"}
        targets.append(target)
    custom: dict[str, Any] = {"scaleDistribution": {"type": "log", "log": 10}} if spec.log else {}
    return {
        "id": number,
        "type": spec.kind,
        "title": spec.title,
        "description": spec.about,
        "datasource": SOURCE,
        "gridPos": {"h": 8, "w": width, "x": x, "y": y},
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": spec.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if spec.kind == "timeseries" else {},
    }


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A list of label values to choose from."""
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": query, "definition": query, "refresh": 2,
        "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "sort": 3,
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, specs in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": y},
                "panels": [],
            }
        )
        width = 24 // len(specs)
        for i, spec in enumerate(specs):
            panels.append(panel(spec, len(panels) + 1, i * width, y + 1, width))
        y += 9
    return {
        "uid": "msprobe",
        "title": "msprobe: numbers of a training run",
        "description": "Made by deploy/grafana/build.py; metrics are described in docs/reference/metrics.md.",
        "tags": ["msprobe", "training"],
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                variable("job", "Job", "label_values(msprobe_rank_info, job)"),
                variable("rank", "Rank", 'label_values(msprobe_rank_info{job=~"$job"}, rank)'),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Incidents", "enable": True, "iconColor": "red", "datasource": SOURCE,
                    "expr": 'changes(msprobe_last_incident_timestamp_seconds{job=~"$job"}[1m]) > 0',
                    "titleFormat": "Incident on rank {{rank}}",
                }
            ]
        },
        "panels": panels,
    }  # fmt: skip


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    sys.stdout.write("\n")
