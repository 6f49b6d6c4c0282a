"""Alerts on the console."""

import pytest

from msprobe_engine.core.alerts import Alert
from msprobe_engine.probe.pipeline import Announcer


def alerts(step: int, n: int, rule: str = "nan_inf") -> list[Alert]:
    return [Alert(rule, "critical", "activation", f"a{i}", step, 0, 1.0, "finite", f"nan_inf: a{i} step {step}") for i in range(n)]


def test_a_flood_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand alerts in each of three hundred steps: three lines and how many more in the first, one in the next, then one for every
    hundred steps."""
    announcer = Announcer()
    for step in range(300):
        announcer.report_alerts(alerts(step, 1000))
    lines = [line.partition("ALERT ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[:4] == [*(f"nan_inf: a{i} step 0" for i in range(3)), "nan_inf: and 997 more lines like these in step 0"]
    assert [line.partition(" (")[0] for line in lines[4:]] == [f"nan_inf goes on, 1000 in step {step}" for step in (1, 101, 201)]


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
