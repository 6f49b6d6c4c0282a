"""Typed settings, read from YAML or JSON; `load_settings` is the door."""

from __future__ import annotations

from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    DumpSettings,
    IncidentSettings,
    MonitorSettings,
    ProbeSettings,
    PrometheusSettings,
    RuleSettings,
    SinkSettings,
    TensorBoardSettings,
)

__all__ = [
    "CsvSettings", "DumpSettings", "IncidentSettings", "MonitorSettings", "ProbeSettings", "PrometheusSettings", "RuleSettings",
    "SinkSettings", "TensorBoardSettings", "load_settings",
]  # fmt: skip
