"""A rank that stalls is told of by every rank that waits for it, while it lasts, and with where each of them is."""

from __future__ import annotations

import time

import pytest
from forkpool import run_ranks
from replica_cases import Step, train

from msprobe_engine.core.settings.schema import RuleSettings

pytestmark = pytest.mark.framework
STALL = 10


def where_the_time_goes() -> None:
    time.sleep(4)


def one_rank(stalls: bool) -> list[tuple[int, bool, bool]]:
    def fault(step: Step) -> None:
        if stalls and step.number == STALL and step.rank == 1:
            where_the_time_goes()

    rule = RuleSettings(rule="stalled", args={"minimum": 1.5 if stalls else 60.0})
    ears, _ = train("ddp", STALL + 3, after_backward=fault, rules=[rule], gradients=True)
    return [(alert.step, bool(alert.extra.get("over")), "where_the_time_goes" in str(alert.extra)) for _, alert in ears.alerts]


def test_a_rank_that_stalls() -> None:
    """One rank sleeps in step 10 for much more than ten times the usual time: both ranks say so, the one that sleeps with the line where
    it does, and say that it is over."""
    waiting, asleep = run_ranks(2, one_rank, True)
    assert [over for _, over, _ in waiting] == [over for _, over, _ in asleep] == [False, True]
    assert abs(waiting[0][0] - STALL) <= 1
    assert (waiting[0][2], asleep[0][2]) == (False, True)


def test_no_rank_stalls() -> None:
    """The same training without the sleep says nothing."""
    assert run_ranks(2, one_rank, False) == [[], []]
