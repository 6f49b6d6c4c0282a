"""What is the program's own passes the guard of the probe, and a fault that cannot be told of does not reach the training."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from msprobe_engine.guard import Faults


class Preempted(Exception):
    """What a program raises to leave its training."""


def test_an_exception_of_a_signal_handler_reaches_the_program() -> None:
    """A handler may be called while code of the probe runs: its exception is no fault of the probe."""

    def leave(_number: int, _frame: object) -> None:
        raise Preempted

    before = signal.signal(signal.SIGALRM, leave)
    faults = Faults()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Preempted), faults.guard("part"):
            time.sleep(10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert faults.enabled("part")


def _calls_left(calls: int = 0) -> int:
    try:
        return _calls_left(calls + 1)
    except RecursionError:
        return calls


def test_a_fault_at_the_limit_of_recursion_does_not_reach_the_training() -> None:
    """Where no call is left to say it, the part is off all the same, and nothing is raised."""
    faults = Faults()

    def descend(left: int) -> None:
        """Down to the limit, and from `left` calls above it the fault is handed over, which is too few to write a message."""
        if left:
            return descend(left - 1)
        try:
            overflow()
        except RecursionError as error:
            faults.fail("part", error)
        return None

    def overflow() -> None:
        overflow()

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        descend(_calls_left() - 8)
    finally:
        sys.setrecursionlimit(limit)
    assert not faults.enabled("part")
