"""The section ``alert`` of the existing ``monitor_config.json`` as rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msprobe_engine.core.settings.existing.config_json import ask
from msprobe_engine.core.settings.schema import RuleSettings
from msprobe_engine.core.settings.tree import BAD, Report, convert, join


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


def alert_rules(node: Any, report: Report) -> tuple[tuple[RuleSettings, ...], bool]:
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
    dump = convert(ask("dump", "bool", False), node.get("dump", False), "alert.dump", report)
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
    threshold = convert(ask("threshold", "float", None, minimum=0), args["threshold"], join(path, "args.threshold"), report)
    return [] if threshold is BAD else make({"threshold": threshold})
