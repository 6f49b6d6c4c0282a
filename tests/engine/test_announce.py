"""Alerts on the console."""

import pytest

from msprobe_engine.announce import Announcer
from msprobe_engine.rules.base import Alert


def alerts(step: int, n: int) -> list[Alert]:
    return [Alert("nan_inf", "critical", "activation", f"a{i}", step, 0, 1.0, "finite", f"nan_inf: a{i} step {step}") for i in range(n)]


def test_a_flood_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand alerts in each of three hundred steps print a handful of lines, and say how many were left out."""
    announcer = Announcer()
    for step in range(300):
        announcer.say(alerts(step, 1000))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) < 15
    assert any("and 997 more" in line for line in lines)


def test_a_pause_starts_anew(capsys: pytest.CaptureFixture[str]) -> None:
    """After a step without alerts the next one is shown in full again."""
    announcer = Announcer()
    for step in range(10):
        announcer.say(alerts(step, 1))
    capsys.readouterr()
    announcer.say([])
    announcer.say(alerts(11, 1))
    assert "a0 step 11" in capsys.readouterr().err
