"""Settings of a run with all sinks, or with one."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    JsonLinesSettings,
    MonitorSettings,
    ProbeSettings,
    PrometheusSettings,
    RuleSettings,
    SinkSettings,
    SqliteSettings,
    TensorBoardSettings,
)


def settings(root: Path, sink: str = "") -> ProbeSettings:
    """All sinks, or the one that `sink` names; an alert in every step."""
    return ProbeSettings(
        output_dir=str(root),
        monitor=MonitorSettings(),
        rules=(RuleSettings(rule="condition", severity="critical", args={"name": "always", "when": "loss > 0", "recovery": 1}),),
        incident=IncidentSettings(capture_level="", cooldown_steps=0, enabled=sink in ("", "incidents")),
        sinks=SinkSettings(
            csv=CsvSettings(
                enabled=sink in ("", "monitor"), append_output=("Dec01_00-00-00", "Dec01_00-00-01") if sink == "monitor" else ()
            ),
            tensorboard=TensorBoardSettings(enabled=sink in ("", "tensorboard")),
            jsonl=JsonLinesSettings(enabled=sink in ("", "jsonl")),
            sqlite=SqliteSettings(enabled=sink in ("", "trend")),
            prometheus=PrometheusSettings(enabled=sink in ("", "prom"), mode="textfile", textfile_dir=str(root / "prom")),
            anomalies=sink in ("", "anomaly_detected"),
        ),
    )
