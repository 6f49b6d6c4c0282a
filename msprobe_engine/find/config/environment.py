"""Variables of the environment of two runs, by what they do to the numbers (``config/environment/rules.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msprobe_engine.config.environment.rules import OF_PROCESS, Rule, environment_rules, same_value
from msprobe_engine.config.environment.variables import Environment
from msprobe_engine.config.secrets.names import names_secret
from msprobe_engine.config.severity import ERROR, HARMLESS
from msprobe_engine.core.process.user_key import KEY
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.find.config import difference
from msprobe_engine.find.config.difference import ENV, SIDES, Difference, Sheet, merge_ranks

_NPU = "ASCEND"
"""A side is one of NPUs when a variable has this in its name, as the existing tool tells it."""
ONLY_BENCH_HAS, ONLY_CMP_HAS = "only bench has this env", "only cmp has this env"
NOT_SHOWN = "set, not shown"
_BY_DIGEST = Sentence("the digests of the values are others")
_MOST_NAMES = 6


def compare_env(bench: Mapping[int, Environment], cmp: Mapping[int, Environment]) -> Sheet:
    """Compare variables rank by rank (`difference.NO_RANK`: one for all ranks).

    Values that are not in the packs are compared by their digests. Where there are none, or of different keys, they are not compared: one
    note has their number, and the names of those that are known to change numbers are in `Sheet.unknown` (a name that says it is a secret
    is none of them).
    """
    sheet = Sheet(ENV)
    by_rank: list[tuple[tuple[int, ...], Difference]] = []
    unknown: set[str] = set()
    keys: set[bool] = set()
    for ranks, golden_environment, target_environment in difference.pairs(bench, cmp, of_job):
        golden, target = _without_process(golden_environment), _without_process(target_environment)
        differences, without = _differences(golden, target)
        by_rank += [(ranks, variable) for variable in differences]
        sheet.compared = max(sheet.compared, len({*golden.values, *golden.withheld, *target.values, *target.withheld} - without))
        unknown |= without
        keys.add(bool(golden_environment.key and target_environment.key))
    sheet.differences = merge_ranks(by_rank, tuple(set(bench) & set(cmp)))
    rules = environment_rules()
    sheet.unknown = tuple(sorted(name for name in unknown if rules.may_change(name) and not names_secret(name)))
    sheet.not_shown = len(unknown)
    if unknown:
        sheet.notes.append(_describe_unknown_variables(unknown, both_keys=all(keys)))
    return sheet


def _describe_unknown_variables(unknown: set[str], *, both_keys: bool) -> str:
    names = sorted(unknown)
    shown = ", ".join(names[:_MOST_NAMES]) + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
    why = Sentence("the packs were made with different keys") if both_keys else Sentence("not both packs were made with a key ({0})", KEY)
    if len(names) == 1:
        return Sentence("1 variable of the environment cannot be compared, because the packs have no value of it: {0}; {1}", shown, why)
    template = "{0} variables of the environment cannot be compared, because the packs have no values of them: {1}; {2}"
    return Sentence(template, len(names), shown, why)


def of_job(environment: Environment) -> dict[str, Any]:
    """What is compared, JSON-ready: without what differs from rank to rank in every job."""
    values: dict[str, Any] = dict(_without_process(environment).values)
    for name, hidden in _without_process(environment).withheld.items():
        values[name] = (
            f"{values[name]} ({hidden.digest})" if name in values else f"{NOT_SHOWN}{f' ({hidden.digest})' if hidden.digest else ''}"
        )
    return values


def _without_process(environment: Environment) -> Environment:
    values = {name: value for name, value in environment.values.items() if name not in OF_PROCESS}
    withheld = {name: one for name, one in environment.withheld.items() if name not in OF_PROCESS}
    return Environment(values, withheld, environment.key)


def _differences(golden: Environment, target: Environment) -> tuple[list[Difference], set[str]]:
    """Differences, and names of variables that cannot be compared."""
    rules, differences = environment_rules(), []
    done: set[str] = set()
    unknown: set[str] = set()
    kinds = _is_npu(golden), _is_npu(target)
    for name in sorted({*golden.values, *target.values, *golden.withheld, *target.withheld}):
        if name in done:
            continue
        rule = rules.of(name)
        if name in golden.withheld or name in target.withheld:
            other = _by_digest(rule, name, golden, target)
            if other is None:
                unknown.add(name)
            elif other:
                differences.append(other[0])
            continue
        golden_value, target_value, other_name = golden.values.get(name), target.values.get(name), name
        if kinds[0] != kinds[1] and rule.partner and (golden_value is None or target_value is None):
            other_name, done = rule.partner, done | {rule.partner}
            golden_value, target_value = (
                (golden_value, target.values.get(other_name)) if golden_value is not None else (golden.values.get(other_name), target_value)
            )
        if same_value(rule, golden_value, target_value):
            continue
        names = (name, other_name) if name in golden.values else (other_name, name)
        differences.append(_difference(rule, names, golden_value, target_value))
    return differences, unknown


def _by_digest(rule: Rule, name: str, golden: Environment, target: Environment) -> list[Difference] | None:
    """Of a value that a side does not have, or not whole; None: it cannot be compared."""
    shown = [side.values.get(name, NOT_SHOWN if name in side.withheld else None) for side in (golden, target)]
    if None in shown:
        return [_difference(rule, (name, name), *shown)]
    if name in golden.values and name in target.values and shown[0] != shown[1]:
        return [_difference(rule, (name, name), *shown)]
    digests = [side.withheld[name].digest if name in side.withheld else "" for side in (golden, target)]
    if not all(digests) or golden.key != target.key:
        return None
    if digests[0] == digests[1]:
        return []
    level = "" if rule.severity == HARMLESS else ERROR
    texts = [text if text is not None else "" for text in shown]
    return [Difference(ENV, name, name, texts[0], texts[1], rule.severity, Sentence("{0}; {1}", rule.why, _BY_DIGEST), level=level)]


def _difference(rule: Rule, names: tuple[str, str], golden_value: str | None, target_value: str | None) -> Difference:
    if (
        names[0] == names[1]
        and rule.severity != HARMLESS
        and not rule.default
        and not rule.by_name
        and (golden_value is None or target_value is None)
    ):
        where_unset = Sentence("not set on the {0} side, where the library decides", SIDES["bench" if golden_value is None else "cmp"])
        return Difference(
            ENV,
            *names,
            _format_value(rule, golden_value),
            _format_value(rule, target_value),
            rule.severity,
            Sentence("{0}; {1}", rule.why, where_unset),
            level=ERROR,
        )
    verdict = "" if rule.severity == HARMLESS else ERROR
    return Difference(
        ENV, *names, _format_value(rule, golden_value), _format_value(rule, target_value), rule.severity, rule.why, level=verdict
    )


def _format_value(rule: Rule, value: str | None) -> str:
    if value is not None:
        return value
    return rule.default[0] if rule.default else "not set"


def _is_npu(environment: Environment) -> bool:
    return any(_NPU in name for name in environment.values)
