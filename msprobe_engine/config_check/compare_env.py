"""Variables of the environment of two runs, by what they do to the numbers (``env_rules.yaml``)."""

from __future__ import annotations

from collections.abc import Mapping

from msprobe_engine.config_check import by_rank
from msprobe_engine.config_check.difference import ENV, Difference, Sheet, merged
from msprobe_engine.config_check.env_rules import OF_PROCESS, Rule, environment_rules, same_value
from msprobe_engine.config_check.secrets import HIDDEN, masked, secret_variable
from msprobe_engine.config_check.severity import ERROR, HARMLESS

Variables = Mapping[str, str]
_NPU = "ASCEND"
"""A side is one of NPUs when a variable has this in its name, as the existing tool tells it."""
ONLY_BENCH_HAS, ONLY_CMP_HAS = "only bench has this env", "only cmp has this env"


def compare_env(bench: Mapping[int, Variables], cmp: Mapping[int, Variables]) -> Sheet:
    """Compare variables rank by rank (`by_rank.NO_RANK`: one for all ranks). Secrets are left out."""
    sheet = Sheet(ENV)
    found: list[tuple[tuple[int, ...], Difference]] = []
    for ranks, mine, theirs in by_rank.pairs(bench, cmp, of_job):
        a, b = of_job(mine), of_job(theirs)
        sheet.compared = max(sheet.compared, len(set(a) | set(b)))
        found += [(ranks, one) for one in _differences(a, b)]
    sheet.differences = merged(found, tuple(set(bench) & set(cmp)))
    return sheet


def of_job(variables: Variables) -> dict[str, str]:
    """Without secrets, and without what differs from rank to rank in every job."""
    return {
        name: masked(str(value))
        for name, value in variables.items()
        if name not in OF_PROCESS and not secret_variable(name) and value != HIDDEN
    }


def _differences(a: Variables, b: Variables) -> list[Difference]:
    rules, found = environment_rules(), []
    done: set[str] = set()
    kinds = _is_npu(a), _is_npu(b)
    for name in sorted(set(a) | set(b)):
        if name in done:
            continue
        rule = rules.of(name)
        x, y, other = a.get(name), b.get(name), name
        if kinds[0] != kinds[1] and rule.partner and (x is None or y is None):
            other, done = rule.partner, done | {rule.partner}
            x, y = (x, b.get(other)) if x is not None else (a.get(other), y)
        if same_value(rule, x, y):
            continue
        names = (name, other) if name in a else (other, name)
        found.append(_difference(rule, names, x, y))
    return found


def _difference(rule: Rule, names: tuple[str, str], x: str | None, y: str | None) -> Difference:
    if names[0] == names[1] and rule.severity != HARMLESS and not rule.default and (x is None or y is None):
        one = f"not set on the {'bench' if x is None else 'cmp'} side, where the library decides"
        return Difference(ENV, *names, _shown(rule, x), _shown(rule, y), rule.severity, f"{rule.why}; {one}", level=ERROR)
    verdict = "" if rule.severity == HARMLESS else ERROR
    return Difference(ENV, *names, _shown(rule, x), _shown(rule, y), rule.severity, rule.why, level=verdict)


def _shown(rule: Rule, value: str | None) -> str:
    if value is not None:
        return value
    return rule.default[0] if rule.default else "not set"


def _is_npu(variables: Variables) -> bool:
    return any(_NPU in name for name in variables)
