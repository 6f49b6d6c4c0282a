"""What a probe has in memory of a training that a test has driven itself, and settings that switch everything on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.run import plain
from msprobe_integrations.torch.training import owner

MONITOR = {"activations": True, "gradients": True, "parameters": True, "optimizer_states": True}


def everything(**more: Any) -> dict[str, Any]:
    """Sections with files: a dump of step 1, collectives, replicas, gradient probe, an incident at step 0, which has the next step
    captured."""
    return {
        "monitor": {**MONITOR, "collectives": True, "replica_check": {"interval": 1}},
        "dump": {"step": [1], "level": "mix"},
        "grad_probe": {"grad_level": "L1"},
        "rules": [{"rule": "extreme_value", "severity": "critical", "args": {"threshold": 1e-30}}],
        "incident": {"level": "L0", "capture_level": "mix", "max_incidents": 1},
        **more,
    }


def files(folder: Path) -> dict[str, bool]:
    """Which of the things that `everything` asks for were written."""
    out = folder / "probe"
    return {
        "dump": bool(list(out.glob("dump/step1/*/dump.json"))),
        "grad_probe": bool(list(out.glob("grad_probe/**/*.csv"))),
        "incident": bool(list(out.glob("incidents/*/**/dump.json"))),
    }


def seen(observer: Any = None) -> dict[str, Any]:
    """What the observer that follows now has in memory, by step; closes it."""
    observer = observer or owner.current()
    if observer is None or observer.probe is None:
        return {}
    probe = observer.probe
    observer.close()
    found: dict[str, Any] = {"steps": [f.step for f in probe.frames], "norms": {}, "micro": {}}
    found["scalars"] = {frame.step: dict(frame.scalars) for frame in probe.frames}
    found["complete"] = {frame.step: frame.complete for frame in probe.frames}
    found["entries"] = {frame.step: [entry.name for entry in frame.entries] for frame in probe.frames}
    for frame in probe.frames:
        for record in frame.records():
            if hasattr(record.source, "family"):
                found["norms"].setdefault((record.source.family, frame.step, plain(record.name)), record.statistics.norm)
                found["micro"].setdefault((record.source.family, frame.step), set()).add(record.source.micro_step)
    found["faults"] = sorted(probe.faults.disabled) if hasattr(probe.faults, "disabled") else []
    return found
