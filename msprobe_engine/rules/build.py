"""From settings to rules."""

from __future__ import annotations

from msprobe_engine.errors import SettingsError
from msprobe_engine.rules.args import parse_args
from msprobe_engine.rules.base import Rule
from msprobe_engine.rules.extreme_value import ExtremeValueArgs, ExtremeValueRule
from msprobe_engine.rules.layout import LayoutCache
from msprobe_engine.rules.nan_inf import NanInfArgs, NanInfRule
from msprobe_engine.rules.no_progress import NoProgressArgs, NoProgressRule
from msprobe_engine.rules.turbulence import TurbulenceArgs, TurbulenceRule
from msprobe_engine.settings.schema import ProbeSettings, RuleSettings


def build_rules(settings: ProbeSettings) -> list[Rule]:
    """The rules of `settings.rules` in their order. Where none is given and frames are taken all the time: ``nan_inf``.

    Raises:
        SettingsError: unknown rule, unknown or wrong argument, a kind that the rule does not look at.
    """
    wanted = settings.rules
    if not wanted and (settings.monitor is not None or settings.incident.level):
        wanted = (RuleSettings(rule="nan_inf"),)
    layouts = LayoutCache()
    return [_build(rule, layouts) for rule in wanted]


def _build(rule: RuleSettings, layouts: LayoutCache) -> Rule:
    severity, kinds = rule.severity, rule.kinds
    if rule.rule == "nan_inf":
        return NanInfRule(parse_args(NanInfArgs, rule.rule, rule.args), severity=severity, kinds=kinds, layouts=layouts)
    if rule.rule == "turbulence":
        return TurbulenceRule(parse_args(TurbulenceArgs, rule.rule, rule.args), severity=severity, kinds=kinds, layouts=layouts)
    if rule.rule == "extreme_value":
        return ExtremeValueRule(parse_args(ExtremeValueArgs, rule.rule, rule.args), severity=severity, kinds=kinds, layouts=layouts)
    if rule.rule == "no_progress":
        return NoProgressRule(parse_args(NoProgressArgs, rule.rule, rule.args), severity=severity, kinds=kinds, layouts=layouts)
    raise SettingsError(f"rules: rule = {rule.rule!r}: expected one of nan_inf, turbulence, extreme_value, no_progress")
