"""From settings to rules."""

from __future__ import annotations

import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.schema import IncidentSettings, MonitorSettings, ProbeSettings, RuleSettings
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.build import build_rules


def test_default() -> None:
    """With a monitor or an always-on capture there is nan_inf; without anything to look at there is no rule."""
    assert [r.name for r in build_rules(ProbeSettings(monitor=MonitorSettings()))] == ["nan_inf"]
    assert [r.name for r in build_rules(ProbeSettings(incident=IncidentSettings(level="L0")))] == ["nan_inf"]
    assert build_rules(ProbeSettings()) == []


def test_every_rule_with_its_arguments() -> None:
    """All rules can be built, keep their order, and are rules; severity and arguments reach them."""
    rules = build_rules(
        ProbeSettings(
            rules=(
                RuleSettings(rule="extreme_value", severity="critical", args={"threshold": 5}),
                RuleSettings(rule="turbulence", kinds=("grad",), args={"threshold": 0, "two_sided": True}),
                RuleSettings(rule="no_progress", args={"patience": 3}),
                RuleSettings(rule="nan_inf", args={"exclude": ["router"]}),
            )
        )
    )
    assert [r.name for r in rules] == ["extreme_value", "turbulence", "no_progress", "nan_inf"]
    assert all(isinstance(r, Rule) for r in rules)
    (alert,) = rules[0].check(frame_of({"w": [6.0]}))
    assert alert.severity == "critical"


@pytest.mark.parametrize(
    ("rule", "args", "text"),
    [
        ("turbulence", {"treshold": 1.0}, "did you mean 'threshold'"),
        ("turbulence", {"threshold": -1.0}, "0.0 or more"),
        ("turbulence", {"threshold": float("nan")}, "expected a number"),
        ("turbulence", {"warmup": 1.5}, "whole number"),
        ("turbulence", {"two_sided": 1}, "true or false"),
        ("nan_inf", {"exclude": "router"}, "list of names"),
        ("extreme_value", {"threshold": 0}, "above 0.0"),
        ("no_progress", {"patience": True}, "whole number"),
    ],
)
def test_wrong_arguments(rule: str, args: dict[str, object], text: str) -> None:
    """A wrong argument is an error that names rule, key, value and what is allowed."""
    with pytest.raises(SettingsError, match=text) as error:
        build_rules(ProbeSettings(rules=(RuleSettings(rule=rule, args=args),)))
    assert rule in str(error.value)


def test_wrong_kind() -> None:
    """A kind that the rule does not look at is an error."""
    with pytest.raises(SettingsError, match="loss, grad, param"):
        build_rules(ProbeSettings(rules=(RuleSettings(rule="no_progress", kinds=("collective",)),)))
