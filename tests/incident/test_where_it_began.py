"""Where it began, over all stages of a pipeline; and which alerts start an incident."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.settings.schema import IncidentSettings
from msprobe_engine.probe.incident.event import Event
from msprobe_engine.probe.incident.manager import IncidentManager
from msprobe_engine.probe.incident.notify import SilentNotifier
from msprobe_engine.probe.incident.writer import write_incident

EVENT = Event("step5-nan_inf", 5, "nan_inf", 0, 7, "NaN")


def alert(rank: int, family: str, name: str, order: int, **more: Any) -> Alert:
    kind = {"actv": "activation", "actv_grad": "activation_grad"}.get(family, "grad")
    extra = {"family": family, **more}
    return Alert("nan_inf", "critical", kind, name, 5, rank, 1.0, "none", f"{name} on rank {rank}", 0, order, extra)


CASES = {
    "forward": ({0: [("actv", "layers.1.output", 7)], 1: [("actv", "layers.0.output", 1)]}, "layers.1.output", 0),
    "backward": ({0: [("actv_grad", "layers.1.output", 1)], 1: [("actv_grad", "layers.0.output", 9)]}, "layers.0.output", 1),
    "both": ({0: [("actv_grad", "layers.1.input", 1)], 1: [("actv", "layers.9.output", 50)]}, "layers.9.output", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_the_earliest_over_the_stages(case: str, frame: Any, tmp_path: Path) -> None:
    """Forward the first stage comes first, backward the last one, and forward before backward; call numbers of a rank say nothing about
    another rank's. The summary names tensor, rank and stage."""
    said, name, stage = CASES[case]
    for rank, entries in said.items():
        alerts = [alert(rank, *entry) for entry in entries]
        info = {"pp": rank, "dp": 0, "tp": 0}
        write_incident(tmp_path, [frame(5, rank)], alerts, event=EVENT, rank=rank, world_size=2, rank_info=info)
    incident = json.loads((tmp_path / "incident.json").read_text())
    began = incident["began"]
    assert (began["name"], began["ranks"], began["pp_stage"], began["step"]) == (name, [stage], stage, 5)
    assert incident["alerts"][0]["name"] == name
    assert f"Earliest in the order of execution: `{name}` (nan_inf), rank {stage}" in (tmp_path / "summary.md").read_text()


def test_no_alert_no_beginning(frame: Any, tmp_path: Path) -> None:
    """Rank files without alerts, of ranks that joined, have no beginning; the end of a condition is none either."""
    over = replace(alert(0, "actv", "a", 1), extra={"over": True})
    write_incident(tmp_path, [frame(5, 0)], [over], event=EVENT, rank=0, world_size=1)
    incident = json.loads((tmp_path / "incident.json").read_text())
    assert incident["began"] is None
    assert len(incident["alerts"]) == 1


@pytest.mark.parametrize(("severity", "begins"), [("critical", [False, True, False]), ("warning", [True, True, False])])
def test_which_alerts_start_one(severity: str, begins: list[bool], frame: Any, tmp_path: Path) -> None:
    """With `incident.severity: warning` any rule starts an incident, but never the end of a lasting condition."""
    critical = alert(0, "actv", "a", 1)
    warning, over = replace(critical, severity="warning"), replace(critical, severity="warning", extra={"over": True})
    for one, expected in zip((warning, critical, over), begins):
        settings = IncidentSettings(severity=severity, path=str(tmp_path / f"{one.severity}{len(one.extra)}{one.extra.get('over')}"))
        manager = IncidentManager(settings, output_dir=tmp_path, rank=0, world_size=1, notifier=SilentNotifier())
        assert (manager.on_frame(frame(5, 0), [one]) is not None) == expected
