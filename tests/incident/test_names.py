"""Names of the user's models in the files of an incident."""

from __future__ import annotations

from typing import Any

from msprobe_engine.probe.incident.merge import combine, summary

EVIL = "Module.a`|x\n# Heading<script>"


def test_names_stay_in_their_cells() -> None:
    """A record name with Markdown in it changes neither the lines nor the columns of summary.md."""
    statistics = {"count": 1, "nans": 1, "infs": 0, "max": None, "min": None, "norm": None}

    def shown(name: str) -> list[str]:
        worst = {"step": 0, "name": name, "statistics": statistics}
        event = {"id": "x", "step": 0, "rule": "nan_inf", "rank": 0, "capture_step": 2, "message": name}
        alert = {"rank": 0, "step": 0, "rule": "nan_inf", "severity": "critical", "message": name, "order": 0}
        piece: dict[str, Any] = {"event": event, "state": "complete", "first_nonfinite": worst, "worst": [worst], "alerts": [alert]}
        return summary(combine({0: piece}), "x").splitlines()

    plain, evil = shown("Module.a"), shown(EVIL)
    assert len(plain) == len(evil)
    for a, b in zip(plain, evil):
        assert a.count("|") == b.count("|")
        assert a.count("`") == b.count("`")
        assert "<" not in b
