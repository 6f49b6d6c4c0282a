"""From settings to rules."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.schema import ProbeSettings, RuleSettings
from msprobe_engine.probe.rules.arguments import parse_args
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.builtin.values.condition import ConditionRule
from msprobe_engine.probe.rules.layout import LayoutCache
from msprobe_engine.probe.rules.registry import RECOMMENDED, RULES
from msprobe_engine.probe.rules.tensor_kinds import KINDS


def build_rules(settings: ProbeSettings) -> list[Rule]:
    """The rules of `settings.rules` in their order. Where none is given and frames are taken all the time: ``nan_inf``.

    Raises:
        SettingsError: unknown rule, unknown or wrong argument, a kind that the rule does not look at; one line per rule that is wrong.
    """
    wanted = settings.rules
    if not wanted and (settings.monitor is not None or settings.incident.level):
        wanted = (RuleSettings(rule="nan_inf"),)
    layouts = LayoutCache()
    named = {rule.rule for rule in wanted}
    rules: list[Rule] = []
    mistakes: list[str] = []
    for rule in wanted:
        try:
            rules += _build_recommended(rule, named, layouts) if rule.rule == RECOMMENDED else [_build(rule, layouts)]
        except SettingsError as error:
            mistakes.append(str(error))
    names = [rule.name for rule in rules if isinstance(rule, ConditionRule)]
    for name in sorted({name for name in names if names.count(name) > 1}):
        mistakes.append(f"rules: two conditions have the name {name!r}; give each its own")
    mistakes += [f"rules: condition.name = {name!r}: is the name of a rule; take another one" for name in names if name in RULES]
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return rules


def _build(rule: RuleSettings, layouts: LayoutCache) -> Rule:
    made = RULES.get(rule.rule)
    if made is None:
        near = difflib.get_close_matches(rule.rule, [*RULES, RECOMMENDED], 1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise SettingsError(f"rules: rule = {rule.rule!r}: {hint}expected one of {RECOMMENDED}, {', '.join(RULES)}")
    return made(parse_args(made.args_type, rule.rule, rule.args), severity=rule.severity, kinds=rule.kinds, layouts=layouts)


def _build_recommended(rule: RuleSettings, named: set[str], layouts: LayoutCache) -> list[Rule]:
    """The set, without rules that the settings name themselves. Its `args` are by rule: ``{loss_spike: {window: 50}}``.

    Raises:
        SettingsError: an argument for a rule that is not in the set; severity or kinds, which no two rules share.
    """
    names = [name for name, made in RULES.items() if made.recommended and name not in named]
    if rule.severity or rule.kinds:
        raise SettingsError(f"rules: {RECOMMENDED} takes neither severity nor kinds; name the rule that shall have them besides it")
    for name, args in rule.args.items():
        if name not in RULES or not RULES[name].recommended:
            raise SettingsError(f"rules: {RECOMMENDED} has no rule '{name}'. Allowed: {', '.join(names)}")
        if name in named:
            raise SettingsError(f"rules: {RECOMMENDED}.{name}: the settings name this rule themselves; give its arguments there")
        if not isinstance(args, Mapping):
            raise SettingsError(f"rules: {RECOMMENDED}.{name} = {args!r}: expected the arguments of this rule")
    # A loss that is not finite is the business of a rule of its own in this set.
    kinds = {"nan_inf": tuple(kind for kind in KINDS if kind != "loss")}
    return [_build(RuleSettings(rule=name, kinds=kinds.get(name, ()), args=rule.args.get(name, {})), layouts) for name in names]
