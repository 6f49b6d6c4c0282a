"""Alerts on the console."""

import dataclasses

import pytest

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.load import load_settings
from msprobe_engine.core.statistics.rows import empty
from msprobe_engine.probe.closing_words import ClosingWords
from msprobe_engine.probe.pipeline import Announcer


def alerts(step: int, n: int, rule: str = "nan_inf") -> list[Alert]:
    return [Alert(rule, "critical", "activation", f"a{i}", step, 0, 1.0, "finite", f"nan_inf: a{i} step {step}") for i in range(n)]


def test_a_flood_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A NaN with a thousand alerts of two rules in each of three hundred steps: one line with the first in the order of execution, then
    one for every hundred steps."""
    announcer = Announcer()
    for step in range(300):
        born = dataclasses.replace(alerts(step, 1)[0], order=7, message=f"nan_inf: born step {step}")
        announcer.report_alerts([*alerts(step, 1, "loss_not_finite"), *alerts(step, 998), born])
    lines = [line.partition("ALERT ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == "nan_inf: born step 0 (and 999 more in step 0)"
    again = "nan_inf goes on (every 100 steps): nan_inf: born step"
    assert lines[1:] == [f"{again} {step} (and 999 more in step {step})" for step in (100, 200)]


def test_alerts_that_are_counted_only(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of which no alert is written count, on the console as in the closing words; what a message says itself is not said twice."""
    announcer, closing = Announcer(), ClosingWords(load_settings({"monitor": True}), 1)
    many = alerts(3, 20)
    many[-1] = dataclasses.replace(many[-1], extra={"more": 40})
    for step in (3, 4):
        of_step = [dataclasses.replace(alert, step=step) for alert in many]
        announcer.report_alerts(of_step)
        closing.on_frame(Frame(step, 0, empty(0), scalars={}), of_step)
    assert capsys.readouterr().err.splitlines()[-1].endswith("(and 59 more in step 3)")
    assert "120 in 2 steps (nan_inf 120), 40 of them written by name" in closing.text([], {})
    alone = dataclasses.replace(alerts(9, 1, "loss_spike")[0], message="a (and 7 more)", extra={"more": 7})
    announcer.report_alerts([alone])
    assert capsys.readouterr().err.splitlines()[-1].endswith("ALERT a (and 7 more)")


@pytest.mark.parametrize(("rule", "pause", "anew"), [("loss_spike", 1, True), ("nan_inf", 10, False), ("nan_inf", 21, True)])
def test_a_pause_starts_anew(rule: str, pause: int, anew: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """After a step without alerts the next one is shown in full again; of a NaN, which is looked at every few steps, after more of them."""
    announcer = Announcer()
    for step in range(10):
        announcer.report_alerts(alerts(step, 1, rule))
    capsys.readouterr()
    for _ in range(pause):
        announcer.report_alerts([])
    announcer.report_alerts(alerts(10 + pause, 1, rule))
    assert (f"a0 step {10 + pause}" in capsys.readouterr().err) is anew


def test_what_is_over_does_not_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    """The alert that says so is shown as it is, also while its rule is not forgotten yet."""
    announcer = Announcer()
    announcer.report_alerts(alerts(0, 1, "loss_not_finite"))
    over = Alert("loss_not_finite", "warning", "scalar", "loss", 1, 0, 1.0, "", "loss_not_finite: loss, step 1: over", extra={"over": True})
    announcer.report_alerts([over])
    assert capsys.readouterr().err.splitlines()[-1].endswith("ALERT loss_not_finite: loss, step 1: over")
