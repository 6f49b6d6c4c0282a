"""Rule stalled: no step for too long."""

from __future__ import annotations

import threading
import time

from frames_of_lists import frame_of

from msprobe_engine.core.alerts import Alert
from msprobe_engine.probe.rules.builtin.progress.stalled import StalledArgs, StalledRule


def test_overdue_is_said_once_and_steps_go_on() -> None:
    """After the warm-up, and longer than `factor` medians and `minimum`, there is one alert; the next step says that it is over."""
    rule = StalledRule(StalledArgs(minimum=50.0, warmup=3))
    assert rule.overdue(time.monotonic() + 1e6) is None
    for step in range(4):
        assert rule.check(frame_of(step=step, rank=2)) == []
    now = time.monotonic()
    assert rule.overdue(now + 40.0) is None
    alert = rule.overdue(now + 60.0)
    assert alert is not None
    assert (alert.rule, alert.severity, alert.step, alert.rank) == ("stalled", "warning", 4, 2)
    assert alert.extra["meaning"]
    assert rule.overdue(now + 70.0) is None
    (over,) = rule.check(frame_of(step=4, rank=2))
    assert over.extra["over"] is True
    assert rule.check(frame_of(step=5)) == []


def test_the_median_decides() -> None:
    """Slow steps make the limit longer."""
    rule = StalledRule(StalledArgs(minimum=0.001, warmup=2))
    for step in range(5):
        rule.check(frame_of(step=step))
        time.sleep(0.05)
    rule.check(frame_of(step=5))
    assert rule.overdue(time.monotonic() + 0.3) is None
    assert rule.overdue(time.monotonic() + 30.0) is not None


def test_an_evaluation_is_no_stall() -> None:
    """While evaluation holds the rule nothing is overdue; afterwards the time begins anew."""
    rule = StalledRule(StalledArgs(minimum=50.0, warmup=2))
    for step in range(4):
        rule.check(frame_of(step=step))
    rule.hold(True)
    assert rule.overdue(time.monotonic() + 1e6) is None
    rule.hold(False)
    assert rule.overdue(time.monotonic() + 40.0) is None
    assert rule.overdue(time.monotonic() + 60.0) is not None


def test_the_thread_says_it_with_the_stack_of_the_training() -> None:
    """The alert comes while the training waits, with the place it waits in; the thread ends with close."""
    said = threading.Event()
    alerts: list[Alert] = []
    rule = StalledRule(StalledArgs(minimum=0.1, warmup=2))
    rule.bind(lambda alert: (alerts.append(alert), said.set()))
    try:
        for step in range(3):
            rule.check(frame_of(step=step))
        wait_for_a_neighbour(said)
        assert len(alerts) == 1
        assert any("wait_for_a_neighbour" in line for line in alerts[0].extra["stack"])
    finally:
        rule.close()
    assert not [t for t in threading.enumerate() if t.name == "msprobe-stalled"]


def wait_for_a_neighbour(said: threading.Event) -> None:
    assert said.wait(60.0)
