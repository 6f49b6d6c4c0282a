"""The table of rules: one place for classes, arguments, words and the page."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from frames_of_lists import frame_of

from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.settings.schema import ProbeSettings, RuleSettings
from msprobe_engine.probe.rules import builtin
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.build import build_rules
from msprobe_engine.probe.rules.document import page
from msprobe_engine.probe.rules.registry import RECOMMENDED, RULES

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "alerts.md"


def build(*rules: RuleSettings) -> list[Rule]:
    return build_rules(ProbeSettings(rules=rules))


def test_every_rule_is_there_with_its_words() -> None:
    """The registry has every rule that a file of `builtin` makes, under its name and with its words."""
    modules = (importlib.import_module(found.name) for found in pkgutil.walk_packages(builtin.__path__, f"{builtin.__name__}."))
    made = {value for module in modules for value in vars(module).values() if isinstance(value, type) and issubclass(value, Rule)}
    assert set(RULES.values()) == {rule for rule in made if "name" in vars(rule)}
    assert all(rule.name == name and rule.name != RECOMMENDED for name, rule in RULES.items())
    assert all(rule.severity in ("warning", "critical") and rule.fires and rule.meaning and rule.next for rule in RULES.values())


def test_page_is_up_to_date() -> None:
    """docs/guide/alerts.md holds the tables as the code has them: python -m msprobe_engine.probe.rules.document docs/guide/alerts.md."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


def test_recommended_is_the_set() -> None:
    """`recommended` stands for all rules marked so; one that is named besides it is built once, as it is named."""
    names = [rule.name for rule in build(RuleSettings(rule=RECOMMENDED))]
    assert names == [name for name, rule in RULES.items() if rule.recommended]
    both = build(RuleSettings(rule=RECOMMENDED), RuleSettings(rule="loss_spike", severity="critical"))
    assert [r.name for r in both].count("loss_spike") == 1


def test_recommended_says_a_loss_that_is_not_finite_once() -> None:
    """In the set nan_inf leaves the loss to the rule that is made for it."""
    alerts = [a for rule in build(RuleSettings(rule=RECOMMENDED)) for a in rule.check(frame_of(scalars={"loss": float("nan")}))]
    assert [a.rule for a in alerts] == ["loss_not_finite"]


def test_arguments_of_the_set_come_from_a_file(tmp_path: Path) -> None:
    """`args` of the set are by rule, and reach it from YAML."""
    path = tmp_path / "probe.yaml"
    path.write_text("monitor: {}\nrules:\n  - {rule: recommended, args: {loss_not_finite: {exclude: [lm]}}}\n")
    rules = build_rules(load_settings(path))
    assert not [a for rule in rules for a in rule.check(frame_of(scalars={"lm_loss": float("nan")}))]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (RuleSettings(rule=RECOMMENDED, args={"loss_spice": {}}), "has no rule 'loss_spice'"),
        (RuleSettings(rule=RECOMMENDED, args={"loss_spike": 3}), "expected the arguments"),
        (RuleSettings(rule=RECOMMENDED, args={"loss_spike": {"windov": 3}}), "did you mean 'window'"),
        (RuleSettings(rule=RECOMMENDED, severity="critical"), "neither severity nor kinds"),
        (RuleSettings(rule="exploding_gradients"), "did you mean 'exploding_gradient'"),
        (RuleSettings(rule="learned"), "file is missing"),
        (RuleSettings(rule="condition", args={"name": "a", "when": 3}), "expected a text"),
    ],
)
def test_mistakes(rule: RuleSettings, text: str) -> None:
    """A mistake is named, with what is allowed."""
    with pytest.raises(SettingsError, match=text):
        build(rule)


def test_a_rule_of_the_set_with_arguments_in_two_places() -> None:
    """Arguments for a rule that the settings name themselves are refused."""
    with pytest.raises(SettingsError, match="name this rule themselves"):
        build(RuleSettings(rule=RECOMMENDED, args={"loss_spike": {}}), RuleSettings(rule="loss_spike"))


def test_alerts_say_what_they_mean() -> None:
    """Alerts carry what they usually mean and what to run next."""
    (alert,) = build(RuleSettings(rule="extreme_value"))[0].check(frame_of({"w": [1e30]}))
    assert alert.extra["meaning"] == RULES["extreme_value"].meaning
    assert alert.extra["next"] == RULES["extreme_value"].next
