"""Rules outlier_rank and replica_mismatch: what other ranks say."""

from __future__ import annotations

import numpy as np
from frames_of_lists import frame_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.probe.rules.builtin.ranks.outlier_rank import OutlierRankArgs, OutlierRankRule, RankNumbers
from msprobe_engine.probe.rules.builtin.ranks.replica_mismatch import Mismatch, ReplicaMismatchArgs, ReplicaMismatchRule, replica_rule


def numbers(step: int, losses: list[float]) -> RankNumbers:
    return RankNumbers(step, range(len(losses)), ("loss",), np.array(losses)[:, None])


@given(st.integers(3, 16), st.integers(0, 1000), st.data())
def test_each_rank_says_it_about_itself(n: int, seed: int, data: st.DataObject) -> None:
    """The rank that differs for `patience` steps raises the alert, and no other."""
    rng = np.random.default_rng(seed)
    odd = data.draw(st.integers(0, n - 1))
    rules = [OutlierRankRule(OutlierRankArgs(patience=3)) for _ in range(n)]
    found = {rank: [] for rank in range(n)}
    for step in range(5):
        losses = 2.0 + 0.01 * rng.normal(size=n)
        losses[odd] = 9.0
        for rank, rule in enumerate(rules):
            rule.submit(numbers(step, losses.tolist()))
            found[rank] += [a.extra["of_step"] for a in rule.check(frame_of(step=step + 3, rank=rank))]
    assert found == {rank: [2] if rank == odd else [] for rank in range(n)}


def test_two_ranks_and_missing_numbers_say_nothing() -> None:
    """With two ranks nobody can say who differs; a rank without the number is no outlier; a NaN among numbers is one."""
    for losses, count in (([1.0, 9.0], 0), ([np.nan, 1.0, 1.0, 1.0], 0), ([np.inf, 1.0, 1.0, 1.0], 1)):
        rule = OutlierRankRule(OutlierRankArgs(patience=1))
        rule.submit(numbers(0, losses))
        assert len(rule.check(frame_of(rank=0))) == count


def test_mismatch_once_with_ranks_and_its_end() -> None:
    """A replica that differs is said once, critically, with the ranks in the minority; the end is said; exclusion holds."""
    rule = ReplicaMismatchRule(ReplicaMismatchArgs(exclude=("router",)))
    bad = Mismatch("layers.0.norm.weight", "param", "tp", range(8), [5], facts={"digests": ["a"]})
    (alert,) = rule.report(10, 0, [bad, bad._replace(name="router.weight")])
    assert (alert.severity, alert.name, alert.kind) == ("critical", "layers.0.norm.weight", "param")
    assert alert.message == (
        "replica_mismatch: parameter layers.0.norm.weight, step 10: rank 5 of 0-7 (tp) differs from the others; "
        "expected the same bits on all of them"
    )
    assert (alert.extra["minority"], alert.extra["digests"], bool(alert.extra["meaning"])) == ([5], ["a"], True)
    assert rule.report(20, 0, [bad]) == []
    assert rule.report(25, 0, [], kinds=("grad",)) == []
    (over,) = rule.report(30, 0, [])
    assert (over.extra["over"], over.severity, over.value) == (True, "warning", 2.0)
    assert len(rule.report(40, 0, [bad])) == 1


def test_mismatch_limits_and_patience() -> None:
    """At most max_alerts, the rest is counted; patience counts checks in a row."""
    many = [Mismatch(f"w{i}", "param", "dp", [0, 1], [0, 1]) for i in range(30)]
    alerts = ReplicaMismatchRule(ReplicaMismatchArgs(max_alerts=2)).report(0, 0, many)
    assert len(alerts) == 2
    assert alerts[-1].extra["more"] == 28
    assert "ranks 0 and 1 (dp) differ; which one is wrong cannot be told" in alerts[0].message
    rule = ReplicaMismatchRule(ReplicaMismatchArgs(patience=2))
    assert [len(rule.report(i, 0, found)) for i, found in enumerate([many[:1], [], many[:1], many[:1]])] == [0, 0, 0, 1]


def test_the_rule_of_the_settings_or_a_default_one() -> None:
    """A check that was asked for reports even when the settings do not name the rule."""
    rule = ReplicaMismatchRule(severity="warning")
    assert replica_rule([rule]) is rule
    assert isinstance(replica_rule([]), ReplicaMismatchRule)
