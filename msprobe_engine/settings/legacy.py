"""The existing configuration files, accepted as they are: ``config.json`` and ``monitor_config.json`` become the same tree.

Keys whose feature is not built give one remark when they are set to anything but their old default; unknown keys are mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msprobe_engine.settings.schema import (
    CsvSettings,
    DumpSettings,
    IncidentSettings,
    MonitorSettings,
    ProbeSettings,
    RuleSettings,
    SinkSettings,
    TensorBoardSettings,
)
from msprobe_engine.settings.tree import BAD, Key, Report, convert, join, keys_of, nearest, show

_UNBUILT = "is accepted, but what it asks for is not built yet; it has no effect"

OTHER_TASKS = ("overflow_check", "free_benchmark", "run_ut", "grad_probe", "acc_check", "nan_check", "exception_dump", "diff_check")
"""Tasks of the existing tool that are other features; their sections are left alone."""

_INSTEAD = {
    "grad_probe": "gradients are watched by TorchProbe, section monitor with gradients: true",
    "overflow_check": "NaN and Inf are found by TorchProbe (rule nan_inf) and by `msprobe nan_analyze` in a dump of task statistics",
    "nan_check": "NaN and Inf are counted in every dump of task statistics; `msprobe nan_analyze` finds where they begin",
    "exception_dump": "TorchProbe writes an incident directory when a critical alert is raised",
    "diff_check": "use task 'tensor' with tensor.bench_path",
}
_DUMP = {key.name: key for key in keys_of(DumpSettings)}
_TENSOR_FILES = ("tensor_format", "max_disk_gb", "memory_budget_mb")
_TOP = ("task", "dump_path", "rank", "step", "level", "async_dump", "extra_info", "dump_enable", "risk_level", "load")


def _ask(name: str, kind: str, default: Any, **rule: Any) -> Key:
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
    "enable_dataloader": _ask("enable_dataloader", "bool", False),
    "precision": _ask("precision", "str", "low", choices=("low", "high")),
    "custom_op_namespaces": _ask("custom_op_namespaces", "str", (), many=True),
    "device": _ask("device", "str", "host", choices=("host", "device")),
    "file_format": _ask("file_format", "str", "npy", choices=("npy", "bin")),
}
"""Keys that have a rule although they have no effect."""
_SECTIONS = {
    "statistics": ("scope", "list", "tensor_list", "data_mode", "summary_mode", "slice", "request_id", *_TENSOR_FILES),
    "tensor": ("scope", "list", "data_mode", "summary_mode", "slice", "request_id", "bench_path", "diff_nums", *_TENSOR_FILES),
    "structure": ("scope", "list", "data_mode"),
}
_SECTION_UNBUILT: dict[str, dict[str, tuple[Any, ...]]] = {
    "statistics": {"device": ("host", "device"), "precision": ("low", "high")},
    "tensor": {
        "tensor_list": ([],),
        "file_format": ("npy",),
        "online_run_ut": (False,),
        "nfs_path": ("", None),
        "host": ("", None),
        "port": (-1, None),
        "tls_path": ("", "./", None),
        "online_run_ut_recompute": (False,),
    },
    "structure": {"summary_mode": ("statistics", "md5", "xor")},  # there are no numbers to summarise
}
DUMP_KEYS = (*_TOP, *_TOP_UNBUILT, *_WITHOUT_EFFECT, *_SECTIONS, *OTHER_TASKS)
"""Top-level keys of ``config.json``."""

_MONITOR_UNBUILT: dict[str, tuple[Any, ...]] = {
    "all_xy": (False,),
    "ur_distribution": (False,),
    "mg_direction": (False,),
    "mg_distribution": (False,),
    "stack_info": (False,),
    "print_struct": (False,),
    "recording_l2_features": (False,),
    "l2_targets": ({},),
    "sa_order": ("s,b,h,d", "b,s,h,d"),
    "dynamic_on": (False,),
    "eps": (1e-8,),  # `zeros` counts exact zeros
    "append_output": ([],),
    "squash_name": (False, True),
}
_NO_DIGITS = "has no effect: files always hold all digits"
MONITOR_KEYS = (
    *("targets", "xy_distribution", "forward_only", "backward_only", "wg_distribution", "monitor_mbs_grad", "param_distribution"),
    *("mv_distribution", "cc_distribution", "module_ranks", "start_step", "step_interval", "collect_times", "ops", "ndigits"),
    *("format", "step_count_per_record", "alert", *_MONITOR_UNBUILT),
)
"""Top-level keys of ``monitor_config.json``."""


def _unbuilt(path: str, value: Any, silent: tuple[Any, ...], report: Report) -> None:
    if not any(type(value) is type(s) and value == s for s in silent):
        report.warning(path, f"{show(value)} {_UNBUILT}")


def convert_task(value: Any, path: str, report: Report) -> Any:
    """The task; those that are other features say so instead of looking like a typing mistake."""
    if isinstance(value, str) and value in OTHER_TASKS:
        instead = f" ({_INSTEAD[value]})" if value in _INSTEAD else ""
        return report.error(path, f"task '{value}' of the existing tool is not built{instead}; allowed: {', '.join(_DUMP['task'].choices)}")
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
    return ProbeSettings(dump=DumpSettings(**{k: v for k, v in values.items() if v is not BAD}))


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


def _dump_section(section: str, node: Any, selected: bool, report: Report) -> dict[str, Any]:
    """Options of one task. Names are checked in every section, values only in that of the task that runs."""
    if not isinstance(node, Mapping):
        report.wrong(section, node, "a mapping")
        return {}
    values: dict[str, Any] = {}
    unbuilt = _SECTION_UNBUILT[section]
    for name, value in node.items():
        if name not in _SECTIONS[section] and name not in unbuilt:
            report.unknown(section, name, (*_SECTIONS[section], *unbuilt))
        elif selected and name in unbuilt:
            if name not in _OLD or convert(_OLD[name], value, join(section, name), report) is not BAD:
                _unbuilt(join(section, name), value, unbuilt[name], report)
        elif selected:
            values[name] = convert(_DUMP[name], value, join(section, name), report)
    return values


class _Old:
    """Typed access to the keys of an old mapping; a mistake is reported and reads as the default."""

    def __init__(self, node: Mapping[str, Any], path: str, report: Report) -> None:
        self.node, self.path, self.report = node, path, report

    def get(self, name: str, kind: str, default: Any, **rule: Any) -> Any:
        if name not in self.node:
            return default
        value = convert(_ask(name, kind, default, **rule), self.node[name], join(self.path, name), self.report)
        return default if value is BAD else value

    def flag(self, name: str) -> bool:
        return bool(self.get(name, "bool", False))


def monitor_settings(node: Any, report: Report) -> ProbeSettings:
    """``monitor_config.json`` as `ProbeSettings`: monitor, sinks by ``format``, rules by ``alert``."""
    if not isinstance(node, Mapping):
        report.wrong("the file", node, "a mapping with the keys " + ", ".join(MONITOR_KEYS))
        return ProbeSettings()
    for name, value in node.items():
        if name not in MONITOR_KEYS:
            report.unknown("", name, MONITOR_KEYS)
        elif name in _MONITOR_UNBUILT:
            _unbuilt(name, value, _MONITOR_UNBUILT[name], report)
    old = _Old(node, "", report)
    if "ndigits" in node and old.get("ndigits", "int", 6, minimum=0, maximum=20) != 6:
        report.warning("ndigits", _NO_DIGITS)
    rules, dump = _alert(node.get("alert"), report)
    return ProbeSettings(
        monitor=_monitor(old),
        sinks=_sinks(old),
        rules=rules,
        # The old tool records an anomaly and goes on; capturing tensors after it is something nobody asked for in such a file.
        incident=IncidentSettings(enabled=dump, capture_level=""),
    )


def _monitor(old: _Old) -> MonitorSettings:
    both, forward, backward = (old.flag(name) for name in ("xy_distribution", "forward_only", "backward_only"))
    if both and forward and backward:
        old.report.warning("forward_only", "together with backward_only leaves nothing of xy_distribution")
    gradients, every = old.flag("wg_distribution"), old.flag("monitor_mbs_grad")
    if every and not gradients:
        old.report.warning("monitor_mbs_grad", "has no effect without wg_distribution")
    ops = old.get("ops", "str", (), many=True, choices=(*_ops().choices, "id"))
    shown = tuple(dict.fromkeys(op for op in ops if op != "id")) or ("norm",)
    return MonitorSettings(
        targets=_targets(old.node.get("targets"), old.report),
        activations=both and not backward,
        activation_gradients=both and not forward,
        gradients=gradients,
        unreduced_gradients=gradients,
        micro_batch_gradients=gradients and every,
        parameters=old.flag("param_distribution"),
        optimizer_states=old.flag("mv_distribution"),
        collectives=_collectives(old.node.get("cc_distribution"), old.report),
        start_step=old.get("start_step", "int", 0, minimum=0),
        interval=old.get("step_interval", "int", 1, minimum=1),
        collect_times=_times(old),
        rank=old.get("module_ranks", "int", (), ranges=True, many=True, minimum=0, maximum=1_000_000),
        ops=(*shown, *(op for op in ("shape", "dtype") if op not in shown)),
    )


def _ops() -> Key:
    return next(key for key in keys_of(MonitorSettings) if key.name == "ops")


def _times(old: _Old) -> int:
    value = old.node.get("collect_times")
    if isinstance(value, float) and value.is_integer():  # the published examples write 1e8
        return int(value)
    return int(old.get("collect_times", "int", 100_000_000, minimum=0))


def _targets(node: Any, report: Report) -> tuple[str, ...]:
    """Names of the ``targets`` object. The inner objects (``{"input": "tuple[2]:0"}``) never had an effect."""
    if node is None:
        return ()
    if not isinstance(node, Mapping) or not all(isinstance(name, str) and isinstance(inner, Mapping) for name, inner in node.items()):
        report.wrong("targets", node, "an object from module or parameter names to objects, like {'layers.0': {}}")
        return ()
    return tuple(node)


def _collectives(node: Any, report: Report) -> bool:
    silent: dict[str, tuple[Any, ...]] = {"cc_codeline": ([],), "cc_pre_hook": (False, True), "cc_log_only": (False,)}
    if node is None:
        return False
    if not isinstance(node, Mapping):
        report.wrong("cc_distribution", node, "an object with the keys enable, " + ", ".join(silent))
        return False
    for name, value in node.items():
        if name in silent:
            _unbuilt(join("cc_distribution", name), value, silent[name], report)
        elif name != "enable":
            report.unknown("cc_distribution", name, ("enable", *silent))
    return _Old(node, "cc_distribution", report).flag("enable")


def _sinks(old: _Old) -> SinkSettings:
    form = old.get("format", "str", "csv", choices=("csv", "tensorboard", "api"))
    steps = old.get("step_count_per_record", "int", 1, minimum=1, maximum=1_000_000)
    return SinkSettings(
        csv=CsvSettings(enabled=form == "csv", path="", steps_per_file=steps),
        tensorboard=TensorBoardSettings(enabled=form == "tensorboard"),
        memory=form == "api",
    )


def _turbulence(args: Mapping[str, Any]) -> list[RuleSettings]:
    return [RuleSettings(rule="turbulence", args={"threshold": args["threshold"]})]


def _nan(args: Mapping[str, Any]) -> list[RuleSettings]:
    rules = [RuleSettings(rule="nan_inf")]
    if "threshold" in args:
        rules.append(RuleSettings(rule="extreme_value", args={"threshold": args["threshold"]}))
    return rules


_RULES: dict[str, tuple[bool, Callable[[Mapping[str, Any]], list[RuleSettings]]]] = {
    "AnomalyTurbulence": (True, _turbulence),
    "AnomalyNan": (False, _nan),
}
"""Old rule name to (threshold is required, its rules here)."""


def _alert(node: Any, report: Report) -> tuple[tuple[RuleSettings, ...], bool]:
    if node is None:
        return (), False
    if not isinstance(node, Mapping) or not isinstance(node.get("rules", []), list):
        report.wrong("alert", node, "an object with a list 'rules' and true or false 'dump'")
        return (), False
    for name in node:
        if name not in ("rules", "dump"):
            report.unknown("alert", name, ("rules", "dump"))
    out: list[RuleSettings] = []
    for i, rule in enumerate(node.get("rules", [])):
        out += _one_rule(rule, f"alert.rules[{i}]", report)
    return tuple(out), _Old(node, "alert", report).flag("dump")


def _one_rule(node: Any, path: str, report: Report) -> list[RuleSettings]:
    if not isinstance(node, Mapping):
        report.wrong(path, node, "an object with rule_name and args")
        return []
    for name in node:
        if name not in ("rule_name", "args"):
            report.unknown(path, name, ("rule_name", "args"))
    name, args = node.get("rule_name"), node.get("args", {})
    if not isinstance(name, str) or name not in _RULES:
        report.unknown(join(path, "rule_name"), name, _RULES, "rule")
        return []
    if not isinstance(args, Mapping):
        report.wrong(join(path, "args"), args, "an object with the key threshold")
        return []
    for key in args:
        if key != "threshold":
            report.unknown(join(path, "args"), key, ("threshold",))
    required, make = _RULES[name]
    if "threshold" not in args:
        if required:
            report.error(join(path, "args"), f"{name} needs a 'threshold'; allowed: a number >= 0")
        return [] if required else make({})
    threshold = _Old(args, join(path, "args"), report).get("threshold", "float", None, minimum=0)
    return [] if threshold is None else make({"threshold": threshold})
