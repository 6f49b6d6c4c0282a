"""Settings for who has none: files that ``msprobe run`` uses without a settings file, and that ``msprobe init`` writes."""

from __future__ import annotations

from pathlib import Path

from msprobe_engine.core.settings.schema import ProbeSettings

PRESETS = {
    "watch": "loss and gradients with alert rules, cheap enough for a whole training",
    "nan": "the operators of the last steps are kept, so that the one where a NaN was born is named",
    "dump": "statistics of every module and operator of the first step, to be compared with another run",
}
"""Name to what it is for."""
DEFAULT = "watch"


def preset_file(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.yaml")


def describe(settings: ProbeSettings) -> str:
    """What settings watch, in a few words: for a preset whose keys may have been changed on the command line."""
    parts = []
    if (m := settings.monitor) is not None and m.enabled:
        switches = ("gradients", "parameters", "updates", "optimizer_states", "activations", "activation_gradients", "collectives")
        families = [name.replace("_", " ") for name in switches if getattr(m, name)]
        every = "every step" if m.interval == 1 else f"every {m.interval} steps"
        if m.first_steps and m.interval > 1:
            every = f"in each of the first {m.first_steps} steps and then {every}"
        parts.append(f"loss every step, {', '.join(families)} {every}" if families else "loss every step")
        if m.replica_check.interval:
            parts.append(f"copies of parameters on several ranks compared every {m.replica_check.interval} steps")
    if settings.dump is not None:
        steps = ", ".join(map(str, settings.dump.step[:5])) + (", ..." if len(settings.dump.step) > 5 else "")
        of = f"of step {steps}" if settings.dump.step else "of every step"
        parts.append(f"a dump {of} at level {settings.dump.level} (task {settings.dump.task})")
    if settings.rules:
        parts.append("rules " + ", ".join(rule.rule for rule in settings.rules))
    incident = settings.incident
    if settings.monitor is not None and incident.enabled and settings.rules:
        if incident.level:
            parts.append(
                f"the last {incident.ring_steps} steps at level {incident.level} kept for an alert (costs as much as a dump of every step)"
            )
        if incident.capture_level:
            parts.append(f"operators captured after a {incident.severity} alert")
    if settings.monitor is not None and settings.sinks.max_gb:
        parts.append(f"at most {settings.sinks.max_gb:g} GB of monitor files per rank")
    return "; ".join(parts) or "nothing"
