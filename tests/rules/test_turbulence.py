"""Rule turbulence."""

from __future__ import annotations

import math
import random

from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.alerts import Alert
from msprobe_engine.probe.rules.builtin.values.turbulence import TurbulenceArgs, TurbulenceRule

NAN = math.nan


def feed(rule: TurbulenceRule, values: list[float], name: str = "w") -> list[list[Alert]]:
    return [rule.check(frame_of({name: [v]}, step=i)) for i, v in enumerate(values)]


def test_fires_above_the_threshold_only_after_warm_up() -> None:
    """A value above (1 + threshold) times the running mean fires, but not before `warmup` healthy values."""
    rule = TurbulenceRule(TurbulenceArgs(threshold=1.0, warmup=3))
    fired = feed(rule, [1.0, 100.0])
    assert fired == [[], []]
    rule = TurbulenceRule(TurbulenceArgs(threshold=1.0, warmup=3))
    fired = feed(rule, [1.0, 1.0, 1.0, 2.0, 2.6])
    assert [len(f) for f in fired] == [0, 0, 0, 0, 1]
    (alert,) = fired[-1]
    assert alert.severity == "warning"
    assert alert.message.startswith("turbulence: w (grad_reduced, reduced), rank 0 step 4: norm 2.6, 2.08 times its running mean 1.25")


@given(st.lists(st.sampled_from([NAN, math.inf, -math.inf]), min_size=1, max_size=20))
def test_nan_and_inf_never_enter_the_history(bad: list[float]) -> None:
    """After any number of values that are not finite the rule judges as if they had not been there."""
    args = TurbulenceArgs(threshold=1.0, warmup=2)
    clean, dirty = TurbulenceRule(args), TurbulenceRule(args)
    feed(clean, [1.0, 1.0, 3.0])
    assert all(f == [] for f in feed(dirty, [1.0, *bad, 1.0]))
    feed(dirty, [3.0])
    last_clean, last_dirty = feed(clean, [50.0])[0], feed(dirty, [50.0])[0]
    assert [a.extra["running_mean"] for a in last_clean] == [a.extra["running_mean"] for a in last_dirty]


def test_a_lasting_change_of_level_is_accepted_after_some_steps() -> None:
    """A level ten times higher alarms for some steps, not for a hundred."""
    rule = TurbulenceRule()
    feed(rule, [1.0] * 20)
    count = sum(len(f) for f in feed(rule, [10.0] * 60))
    assert 1 <= count <= 10


def test_one_spike_does_not_hide_the_next() -> None:
    """An outlier enters the running mean with no more than its limit."""
    rule = TurbulenceRule()
    feed(rule, [1.0] * 20)
    assert [len(f) for f in feed(rule, [1e6, 1.0, 1e6])] == [1, 0, 1]


def test_two_sided_sees_a_collapse() -> None:
    """Only with two_sided does a collapse fire."""
    for two_sided, count in ((False, 0), (True, 1)):
        rule = TurbulenceRule(TurbulenceArgs(two_sided=two_sided))
        feed(rule, [1.0] * 15)
        (found,) = feed(rule, [0.0])
        assert len(found) == count


def test_healthy_noise_does_not_fire() -> None:
    """Gradient norms that vary by a factor of two around their mean are healthy for the default threshold."""
    rng = random.Random(1)
    rule = TurbulenceRule()
    assert sum(len(f) for f in feed(rule, [math.exp(rng.gauss(0.0, 0.3)) for _ in range(1000)])) == 0


def test_history_follows_a_record() -> None:
    """Records that come and go do not mix up or restart the history of others."""
    rule = TurbulenceRule(TurbulenceArgs(warmup=3))
    for _ in range(5):
        rule.check(frame_of({"a": [1.0], "b": [1000.0]}))
    assert rule.check(frame_of({"new": [5000.0], "b": [1000.0], "a": [1.0]})) == []
    assert [x.name for x in rule.check(frame_of({"b": [1000.0], "a": [1000.0]}))] == ["a"]


def test_mean_is_watched_on_request_and_floor_is_noise() -> None:
    """`mean` adds the mean; values at or below the floor never fire."""
    rule = TurbulenceRule(TurbulenceArgs(mean=True, threshold=1.0))
    for _ in range(12):
        rule.check(frame_of({"a": [3.0, -2.9]}))
    assert [x.extra["op"] for x in rule.check(frame_of({"a": [3.0, 2.9]}))] == ["mean"]
    quiet = TurbulenceRule(TurbulenceArgs(floor=1e-3))
    feed(quiet, [1e-9] * 12)
    assert feed(quiet, [1e-4]) == [[]]


def test_scalars() -> None:
    """The loss and the gradient norm are watched like tensors; the learning rate is not."""
    rule = TurbulenceRule()
    for i in range(12):
        assert rule.check(frame_of(scalars={"loss": 2.0 + 0.01 * i, "learning_rate": 10.0**i})) == []
    (alert,) = rule.check(frame_of(scalars={"loss": 20.0, "learning_rate": 1e20}))
    assert (alert.name, alert.kind) == ("loss", "loss")


def test_partial_steps_are_not_judged() -> None:
    """A step that was cut off neither fires nor enters the history."""
    rule = TurbulenceRule()
    feed(rule, [1.0] * 12)
    assert rule.check(frame_of({"w": [1e9]}, complete=False)) == []
    assert len(rule.check(frame_of({"w": [10.0]}))) == 1


def test_no_more_than_asked_for() -> None:
    """At most max_alerts alerts, with the count of the rest."""
    rule = TurbulenceRule(TurbulenceArgs(max_alerts=2))
    for _ in range(12):
        rule.check(frame_of({f"p{i}": [1.0] for i in range(6)}))
    alerts = rule.check(frame_of({f"p{i}": [100.0] for i in range(6)}))
    assert [a.name for a in alerts] == ["p0", "p1"]
    assert alerts[-1].extra["more"] == 4


def test_calls_are_watched_on_demand_only() -> None:
    """A call kept for incidents does not fire unless `calls` is set; what the monitor watches fires either way."""
    for calls, names in ((False, ["w"]), (True, ["Torch.mul.0.forward.output.0", "w"])):
        rule = TurbulenceRule(TurbulenceArgs(calls=calls, warmup=3))
        for step, value in enumerate([1.0, 1.0, 1.0, 1.0]):
            assert rule.check(frame_of({"w": [value]}, entries={"Torch.mul.0.forward": [value]}, step=step)) == []
        assert [a.name for a in rule.check(frame_of({"w": [50.0]}, entries={"Torch.mul.0.forward": [50.0]}, step=4))] == names
