"""The existing ``monitor_config.json``, accepted as it is: monitor, sinks by ``format``, rules by ``alert``.

Every key has its meaning. Where the meaning here is another one than in the existing tool, one remark says so. Unknown keys are mistakes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from msprobe_engine.core.settings.existing.config_json import convert_redact, make_key
from msprobe_engine.core.settings.schema import (
    CsvSettings,
    IncidentSettings,
    LayerFeatureSettings,
    MonitorSettings,
    ProbeSettings,
    RuleSettings,
    SinkSettings,
    TensorBoardSettings,
)
from msprobe_engine.core.settings.tree import BAD, Key, Report, convert, format_value, join, keys_of

MONITOR_KEYS = (
    *("targets", "xy_distribution", "all_xy", "forward_only", "backward_only", "wg_distribution", "monitor_mbs_grad"),
    *("param_distribution", "mv_distribution", "ur_distribution", "mg_direction", "mg_distribution", "cc_distribution", "stack_info"),
    *("print_struct", "recording_l2_features", "l2_targets", "sa_order", "module_ranks", "start_step", "step_interval", "collect_times"),
    *("dynamic_on", "ops", "eps", "ndigits", "format", "step_count_per_record", "append_output", "squash_name", "alert", "redact"),
)
"""Top-level keys of ``monitor_config.json``."""

DEFAULT_DIRECTORY = "./monitor_output"
"""Where files go unless ``MONITOR_OUTPUT_DIR`` says otherwise."""

_EPS = 1e-8
_L2 = ("attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook")
_LAYOUTS = ("s,b,h,d", "b,s,h,d")
_ALL_DIGITS = "files hold all digits of every number; round where they are read"
_GOES_ON = "the training is not stopped: the files are there after the first monitored step"


class Old:
    """Typed access to the keys of an old mapping; a mistake is reported and reads as the default."""

    def __init__(self, node: Mapping[str, Any], path: str, report: Report) -> None:
        self.node, self.path, self.report = node, path, report

    def get(self, name: str, kind: str, default: Any, **rule: Any) -> Any:
        """The value of `name`; `rule` as for `config_json.make_key`."""
        if name not in self.node:
            return default
        value = convert(make_key(name, kind, default, **rule), self.node[name], join(self.path, name), self.report)
        return default if value is BAD else value

    def flag(self, name: str) -> bool:
        """True or false; false when it is absent."""
        return bool(self.get(name, "bool", False))


def dynamic_from_environment() -> bool:
    """Does ``DYNAMIC_MONITOR`` ask for a monitor that follows its file while the training runs?"""
    return os.environ.get("DYNAMIC_MONITOR", "").strip().lower() == "true"


def monitor_settings(node: Any, report: Report) -> ProbeSettings:
    """``monitor_config.json`` as `ProbeSettings`."""
    if not isinstance(node, Mapping):
        report.wrong("the file", node, "a mapping with the keys " + ", ".join(MONITOR_KEYS))
        return ProbeSettings()
    for name in node:
        if name not in MONITOR_KEYS:
            report.unknown("", name, MONITOR_KEYS)
    old = Old(node, "", report)
    if "ndigits" in node:
        old.get("ndigits", "int", 6, minimum=0, maximum=20)
        report.warning("ndigits", _ALL_DIGITS)
    rules, dump = _alert_rules(node.get("alert"), report)
    directory = os.environ.get("MONITOR_OUTPUT_DIR") or DEFAULT_DIRECTORY
    monitor = _monitor(old)
    return ProbeSettings(
        output_dir=directory,
        redact=convert_redact(node, report),
        monitor=monitor,
        sinks=_sinks(old, directory, dump, monitor.ops),
        rules=rules,
        # The old tool records an anomaly and goes on; capturing tensors after it is something nobody asked for in such a file.
        incident=IncidentSettings(enabled=dump, capture_level=""),
    )


def _monitor(old: Old) -> MonitorSettings:
    activations, backward = _activations(old)
    gradients, every = old.flag("wg_distribution"), old.flag("monitor_mbs_grad")
    if every and not gradients:
        old.report.warning("monitor_mbs_grad", "has no effect without wg_distribution")
    ops = old.get("ops", "str", (), many=True, choices=(*_ops().choices, "id"))
    shown = tuple(dict.fromkeys(op for op in ops if op != "id")) or ("norm",)
    updates = old.flag("ur_distribution")
    if old.flag("print_struct"):
        old.report.warning("print_struct", _GOES_ON)
    hot = dynamic_from_environment()
    start = old.get("start_step", "int", 0, minimum=0)
    if hot and start:
        old.report.warning("start_step", "has no effect with DYNAMIC_MONITOR: the first step is the one after dynamic_on was seen")
    targets = _targets(old)
    return MonitorSettings(
        enabled=old.flag("dynamic_on") or not hot,
        hot=hot,
        targets=targets,
        activation_targets=() if not targets else ("*",) if old.flag("all_xy") else targets,
        activations=activations,
        activation_gradients=backward,
        gradients=gradients,
        unreduced_gradients=gradients and not every,
        micro_batch_gradients=gradients and every,
        parameters=old.flag("param_distribution"),
        optimizer_states=old.flag("mv_distribution"),
        states_when="before",
        updates=updates,
        histograms=("update", "ratio") if updates else (),
        # The old tool reads one name and checks the type of the other.
        momentum_agreement=old.flag("mg_direction") or old.flag("mg_distribution"),
        layer_features=_features(old),
        stack_info=old.flag("stack_info"),
        print_struct=old.flag("print_struct"),
        squash_name=old.flag("squash_name"),
        start_step=0 if hot else start,
        interval=old.get("step_interval", "int", 1, minimum=1),
        collect_times=_times(old),
        rank=_ranks(old),
        ops=(*shown, *(op for op in ("shape", "dtype") if op not in shown)),
        eps=old.get("eps", "float", 0.0 if "underflow" in shown else _EPS, minimum=0),
        **_collectives(old),
    )


def _activations(old: Old) -> tuple[bool, bool]:
    in_and_out, forward, backward = (old.flag(name) for name in ("xy_distribution", "forward_only", "backward_only"))
    if in_and_out and forward and backward:
        old.report.warning("forward_only", "together with backward_only leaves nothing of xy_distribution")
    if old.flag("all_xy") and not in_and_out:
        old.report.warning("all_xy", "has no effect without xy_distribution")
    return in_and_out and not backward, in_and_out and not forward


def _ops() -> Key:
    return next(key for key in keys_of(MonitorSettings) if key.name == "ops")


def _times(old: Old) -> int:
    value = old.node.get("collect_times")
    if isinstance(value, float) and value.is_integer():  # the published examples write 1e8
        return int(value)
    return int(old.get("collect_times", "int", 100_000_000, minimum=0))


def _ranks(old: Old) -> Any:
    """A list; a string of numbers, as one published example has it, is understood."""
    node, rule = dict(old.node), {"ranges": True, "many": True, "minimum": 0, "maximum": 1_000_000}
    value = node.get("module_ranks")
    if isinstance(value, str):
        node["module_ranks"] = [part for part in value.split(",") if part.strip()]
        old.report.warning("module_ranks", f"{format_value(value)} is read as {format_value(node['module_ranks'])}; write a list")
    return Old(node, old.path, old.report).get("module_ranks", "int", (), **rule)


def _targets(old: Old) -> tuple[str, ...]:
    """Names of the ``targets`` object. The inner objects (``{"input": "tuple[2]:0"}``) never had an effect."""
    node = old.node.get("targets")
    if node is None:
        return ()
    if not isinstance(node, Mapping) or not all(isinstance(name, str) and isinstance(inner, Mapping) for name, inner in node.items()):
        old.report.wrong("targets", node, "an object from module or parameter names to objects, like {'layers.0': {}}")
        return ()
    return tuple(node)


def _features(old: Old) -> LayerFeatureSettings | None:
    layout = str(old.node.get("sa_order", _LAYOUTS[0])).replace(" ", "")
    if layout not in _LAYOUTS:
        old.report.wrong("sa_order", old.node["sa_order"], "one of 's,b,h,d', 'b,s,h,d'")
        layout = _LAYOUTS[0]
    node = old.node.get("l2_targets", {})
    if not isinstance(node, Mapping):
        old.report.wrong("l2_targets", node, "an object from " + ", ".join(_L2) + " to lists of module names")
        return None
    for name in node:
        if name not in _L2:
            old.report.unknown("l2_targets", name, _L2)
    inner = Old(node, "l2_targets", old.report)
    attention, linear, weights, logits = (tuple(inner.get(name, "str", (), many=True)) for name in _L2)
    if not old.flag("recording_l2_features"):
        if node:
            old.report.warning("l2_targets", "has no effect without recording_l2_features")
        return None
    return LayerFeatureSettings(
        attention=attention,
        attention_layout=layout,
        linear=linear or (("*",) if "linear_hook" in node else ()),  # an empty list is every linear layer, in this one only
        router_weights=weights,
        router_logits=logits,
    )


def _collectives(old: Old) -> dict[str, Any]:
    node = old.node.get("cc_distribution")
    if node is None:
        return {}
    keys = ("enable", "cc_codeline", "cc_pre_hook", "cc_log_only")
    if not isinstance(node, Mapping):
        old.report.wrong("cc_distribution", node, "an object with the keys " + ", ".join(keys))
        return {}
    for name in node:
        if name not in keys:
            old.report.unknown("cc_distribution", name, keys)
    inner = Old(node, "cc_distribution", old.report)
    enable, inputs, stacks = (inner.flag(name) for name in ("enable", "cc_pre_hook", "cc_log_only"))
    sites = tuple(inner.get("cc_codeline", "str", (), many=True))
    if enable and stacks:
        old.report.warning("cc_distribution.cc_log_only", _GOES_ON)
    return {
        "collectives": enable,
        "collective_inputs": enable and inputs,
        "collective_sites": sites if enable else (),
        "collective_stacks": enable and stacks,
    }


def _sinks(old: Old, directory: str, anomalies: bool, ops: tuple[str, ...]) -> SinkSettings:
    form = old.get("format", "str", "csv", choices=("csv", "tensorboard", "api"))
    steps = old.get("step_count_per_record", "int", 1, minimum=1, maximum=1_000_000)
    between = tuple(old.get("append_output", "str", (), many=True))
    return SinkSettings(
        csv=CsvSettings(enabled=form == "csv", path=directory, steps_per_file=steps, append_output=between),
        tensorboard=TensorBoardSettings(
            enabled=form == "tensorboard", ops=tuple(op for op in ops if op not in ("shape", "dtype", "digest"))
        ),
        memory=form == "api",
        anomalies=anomalies,
    )


# The section ``alert`` of the existing ``monitor_config.json`` as rules.
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


def _alert_rules(node: Any, report: Report) -> tuple[tuple[RuleSettings, ...], bool]:
    """The rules, and whether alerts are written to ``anomaly.json``."""
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
    dump = convert(make_key("dump", "bool", False), node.get("dump", False), "alert.dump", report)
    return tuple(out), dump is True


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
    threshold = convert(make_key("threshold", "float", None, minimum=0), args["threshold"], join(path, "args.threshold"), report)
    return [] if threshold is BAD else make({"threshold": threshold})
