"""Task ``grad_probe`` of the existing ``config.json``, and what holds for the section ``grad_probe`` wherever it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msprobe_engine.core.settings.existing.config_json import DUMP_KEYS, convert_redact
from msprobe_engine.core.settings.schema import TASKS, GradProbeSettings, ProbeSettings
from msprobe_engine.core.settings.tree import BAD, Report, convert, format_value, join, keys_of

TASK = "grad_probe"
_KEYS = {key.name: key for key in keys_of(GradProbeSettings)}
_TOP = ("dump_path", "rank", "step")
"""Keys of the section that ``config.json`` has at the top."""
_INT64 = (-(2**63), 2**63 - 1)


def is_grad_probe(node: Any, given: Mapping[str, Any]) -> bool:
    """Is the task of this ``config.json`` grad_probe? An argument `given` to the constructor wins over the file."""
    return bool(given.get("task", node.get("task") if isinstance(node, Mapping) else None) == TASK)


def other_task(node: Any, given: Mapping[str, Any]) -> Any:
    """The file of a gradient probe whose task the constructor was given another one for: the file's task is not looked at."""
    if isinstance(node, Mapping) and node.get("task") == TASK:
        return {**node, "task": given["task"] if given["task"] in TASKS else "statistics"}
    return node


def grad_probe_settings(node: Any, report: Report) -> ProbeSettings:
    """``config.json`` with task grad_probe as `ProbeSettings` with a ``grad_probe`` section. Keys of other tasks are left alone."""
    if not isinstance(node, Mapping):
        report.wrong("the file", node, "a mapping with the keys " + ", ".join(DUMP_KEYS))
        return ProbeSettings()
    values: dict[str, Any] = {}
    for name, value in node.items():
        if name in _TOP:
            values[name] = convert(_KEYS[name], value, name, report)
        elif name not in DUMP_KEYS:
            report.unknown("", name, DUMP_KEYS)
    section = node.get(TASK, {})
    if not isinstance(section, Mapping):
        report.wrong(TASK, section, "a mapping")
        section = {}
    for name, value in section.items():
        if name in _KEYS and name not in _TOP:
            values[name] = convert(_KEYS[name], value, join(TASK, name), report)
        else:
            report.unknown(TASK, name, [key for key in _KEYS if key not in _TOP])
    bounds = section.get("bounds")
    if isinstance(bounds, list) and values.get("bounds", BAD) is not BAD:
        values["bounds"] = tuple(bounds)  # column names show -1 and -1.0 as they were written
    gradients = GradProbeSettings(**{k: v for k, v in values.items() if v is not BAD})
    return ProbeSettings(grad_probe=gradients, redact=convert_redact(node, report))


def override(settings: GradProbeSettings, given: Mapping[str, Any], report: Report) -> GradProbeSettings:
    """The section with the arguments of the debugger's constructor; a level is of no concern here."""
    arguments = Report("argument")
    for name, value in given.items():
        if name in _TOP and (value := convert(_KEYS[name], value, name, arguments)) is not BAD:
            settings = replace(settings, **{name: value})
    report.errors += arguments.errors
    return settings


def check(settings: GradProbeSettings, report: Report) -> None:
    """The bounds ascend, each once, within 64 bits; parameter names are names."""
    before: float | None = None
    for i, bound in enumerate(settings.bounds):
        place = f"{TASK}.bounds[{i}]"
        if not _INT64[0] <= bound <= _INT64[1]:
            report.error(place, f"{format_value(bound)} is not allowed; allowed: a number of the 64-bit integer range")
        elif before is not None and bound <= before:
            report.error(place, f"{format_value(bound)} is not above {format_value(before)}; bounds ascend, each once")
        before = bound
    for i, name in enumerate(settings.param_list):
        if not name:
            report.error(f"{TASK}.param_list[{i}]", "is empty; allowed: the exact name of a parameter")
