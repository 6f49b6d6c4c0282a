"""The existing ``config.json``, accepted as it is: it becomes the same tree as every other settings file.

Keys whose feature is not built give one remark when they are set to anything but their old default; unknown keys are mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msprobe_engine.core.settings.existing import online
from msprobe_engine.core.settings.schema import DumpSettings, FreeBenchmarkSettings, ProbeSettings
from msprobe_engine.core.settings.tree import BAD, Key, Report, convert, format_value, join, keys_of, nearest

_UNBUILT = "is accepted, but what it asks for is not built yet; it has no effect"

OTHER_TASKS = ("run_ut", "grad_probe", "acc_check", "nan_check", "exception_dump", "diff_check")
"""Tasks of the existing tool that are other features; their sections are left alone."""

_INSTEAD = {
    "run_ut": "`msprobe acc_check -config` reads its section; for a dump to check, use task 'tensor' or 'statistics' with level 'L1'",
    "acc_check": "`msprobe acc_check -config` reads its section; for a dump to check, use task 'tensor' or 'statistics' with level 'L1'",
    "nan_check": "NaN and Inf are counted in every dump of task statistics; `msprobe nan_analyze` finds where they begin",
    "exception_dump": "TorchProbe writes an incident directory when a critical alert is raised",
    "diff_check": "use task 'tensor' with tensor.bench_path",
}
_DUMP = {key.name: key for key in keys_of(DumpSettings)}
_REDACT = next(key for key in keys_of(ProbeSettings) if key.name == "redact")
_TENSOR_FILES = ("tensor_format", "max_disk_gb", "memory_budget_mb")
_TOP = (
    "task", "dump_path", "rank", "step", "level", "async_dump", "extra_info", "dump_enable", "risk_level", "load", "perturb",
    "perturb_seed",
)  # fmt: skip


def make_key(name: str, kind: str, default: Any, **rule: Any) -> Key:
    """A key of the old file that has no counterpart of its own in the tree."""
    many, ranges = rule.pop("many", False), rule.pop("ranges", False)
    choices, low, high = rule.pop("choices", ()), rule.pop("minimum", None), rule.pop("maximum", None)
    return Key(name, kind, many, default, False, None, choices, low, high, ranges, "")


_TOP_UNBUILT: dict[str, tuple[Any, ...]] = {
    "enable_dataloader": (False,),
    "precision": ("low", "high"),  # statistics are always taken in float64
}
_WITHOUT_EFFECT = ("custom_op_namespaces",)
"""Keys whose purpose is served without them: calls of every ``torch.ops`` namespace are seen."""
_OLD = {
    "enable_dataloader": make_key("enable_dataloader", "bool", False),
    "precision": make_key("precision", "str", "low", choices=("low", "high")),
    "custom_op_namespaces": make_key("custom_op_namespaces", "str", (), many=True),
    "device": make_key("device", "str", "host", choices=("host", "device")),
    "file_format": make_key("file_format", "str", "npy", choices=("npy", "bin")),
}
"""Keys that have a rule although they have no effect."""
_SECTIONS = {
    "statistics": ("scope", "list", "tensor_list", "data_mode", "summary_mode", "slice", "request_id", *_TENSOR_FILES),
    "tensor": ("scope", "list", "data_mode", "summary_mode", "slice", "request_id", "bench_path", "diff_nums", *_TENSOR_FILES, *online.OLD),
    "structure": ("scope", "list", "data_mode"),
    "overflow_check": ("overflow_nums", "check_mode", "scope", "list", "data_mode", "slice", *_TENSOR_FILES),
    "free_benchmark": ("scope", "list", *(key.name for key in keys_of(FreeBenchmarkSettings))),
}
_FREE_BENCHMARK = frozenset(key.name for key in keys_of(FreeBenchmarkSettings))
_SECTION_UNBUILT: dict[str, dict[str, tuple[Any, ...]]] = {
    "statistics": {"device": ("host", "device"), "precision": ("low", "high")},
    "tensor": {
        "tensor_list": ([],),
        "file_format": ("npy",),
    },
    "structure": {"summary_mode": ("statistics", "md5", "xor")},  # there are no numbers to summarise
    "overflow_check": {},
    "free_benchmark": {},
}
DUMP_KEYS = (*_TOP, "redact", *_TOP_UNBUILT, *_WITHOUT_EFFECT, *_SECTIONS, *OTHER_TASKS)
"""Top-level keys of ``config.json``."""


def _unbuilt(path: str, value: Any, silent: tuple[Any, ...], report: Report) -> None:
    if not any(type(value) is type(s) and value == s for s in silent):
        report.warning(path, f"{format_value(value)} {_UNBUILT}")


def convert_task(value: Any, path: str, report: Report) -> Any:
    """The task; those that are other features say so instead of looking like a typing mistake."""
    if isinstance(value, str) and value in OTHER_TASKS:
        instead = f" ({_INSTEAD[value]})" if value in _INSTEAD else ""
        allowed = ", ".join(_DUMP["task"].choices)
        return report.error(path, f"task '{value}' of the existing tool is no task here{instead}; allowed: {allowed}")
    return convert(_DUMP["task"], value, path, report)


def dump_settings(node: Any, report: Report) -> ProbeSettings:
    """``config.json`` as `ProbeSettings` with a ``dump`` section and nothing else switched on."""
    if not isinstance(node, Mapping):
        report.wrong("the file", node, "a mapping with the keys " + ", ".join(DUMP_KEYS))
        return ProbeSettings()
    values: dict[str, Any] = {}
    for name, value in node.items():
        if name == "task":
            values[name] = convert_task(value, name, report)
        elif name in _TOP:
            values[name] = convert(_DUMP[name], value, name, report)
        elif name == "redact":
            pass
        elif name in _OLD:
            if convert(_OLD[name], value, name, report) is not BAD and name in _TOP_UNBUILT:
                _unbuilt(name, value, _TOP_UNBUILT[name], report)
        elif name not in DUMP_KEYS:
            _unknown(name, str(node.get("task", "statistics")), report)
    task = values.get("task", "statistics")
    for section in _SECTIONS:
        if section in node:
            values.update(_dump_section(section, node[section], section == task, report))
    _not_read(node, task, values, report)
    return ProbeSettings(dump=DumpSettings(**{k: v for k, v in values.items() if v is not BAD}), redact=convert_redact(node, report))


def convert_redact(node: Mapping[str, Any], report: Report) -> tuple[str, ...]:
    """The key ``redact``, which the existing tool does not have."""
    words = convert(_REDACT, node["redact"], "redact", report) if "redact" in node else ()
    return () if words is BAD else tuple(words)


def _unknown(name: Any, task: str, report: Report) -> None:
    """A key that is not known at the top; often it is one of the task's section."""
    options = _SECTIONS.get(task, _SECTIONS["statistics"])
    near = name if name in options else nearest(name, options) if nearest(name, DUMP_KEYS) is None else None
    if near is None:
        report.unknown("", name, DUMP_KEYS)
    else:
        section = task if task in _SECTIONS else "statistics"
        report.error(join("", name), f"unknown key here; '{near}' belongs in the section '{section}'")


def _not_read(node: Mapping[str, Any], task: Any, values: Mapping[str, Any], report: Report) -> None:
    """A selection in the section of another task narrows nothing: the dump is of everything, which may be very large."""
    if task not in _SECTIONS:
        return
    for section in _SECTIONS:
        for name in ("scope", "list"):
            if section != task and isinstance(node.get(section), Mapping) and node[section].get(name) and not values.get(name):
                report.warning(join(section, name), f"has no effect: task '{task}' reads the section '{task}'; write it there")


def unread_sections(node: Mapping[str, Any]) -> list[str]:
    """Sections that are filled in and belong to another task than that of the file, one line each: they have no part in what it means."""
    task = node.get("task", "statistics")
    out = []
    for name in (*_SECTIONS, *OTHER_TASKS):
        if name != task and node.get(name):
            out.append(f"{name}: is the section of another task than '{task}'" + (f"; {_INSTEAD[name]}" if name in _INSTEAD else ""))
    return out


def _dump_section(section: str, node: Any, selected: bool, report: Report) -> dict[str, Any]:
    """Options of one task. Names are checked in every section, values only in that of the task that runs."""
    if not isinstance(node, Mapping):
        report.wrong(section, node, "a mapping")
        return {}
    values: dict[str, Any] = {}
    unbuilt = _SECTION_UNBUILT[section]
    if section == "free_benchmark" and selected:
        # an empty value stands for the default there
        own = {name: value for name, value in node.items() if name in _FREE_BENCHMARK and value not in ("", None)}
        values["free_benchmark"] = convert(_DUMP["free_benchmark"], own, "free_benchmark", report)
        node = {name: value for name, value in node.items() if name not in _FREE_BENCHMARK}
    if section == "tensor" and selected:
        values["online"] = online.convert(node, section, report)
        node = {name: value for name, value in node.items() if name not in online.OLD}
    for name, value in node.items():
        if name not in _SECTIONS[section] and name not in unbuilt:
            report.unknown(section, name, (*_SECTIONS[section], *unbuilt))
        elif selected and name in unbuilt:
            if name not in _OLD or convert(_OLD[name], value, join(section, name), report) is not BAD:
                _unbuilt(join(section, name), value, unbuilt[name], report)
        elif selected and name == "summary_mode" and _columns(value):
            report.warning(
                join(section, name), f"{format_value(value)} chooses numbers of MindSpore's static graphs; all four are always written"
            )
        elif selected:
            values[name] = convert(_DUMP[name], value, join(section, name), report)
    return values


def _columns(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(v in ("max", "min", "mean", "l2norm") for v in value)
