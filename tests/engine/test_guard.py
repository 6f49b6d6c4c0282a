"""What is the program's own passes the guard of the probe, and a fault that cannot be told of does not reach the training."""

from __future__ import annotations

import functools
import signal
import sys
import time
import types

import pytest

from msprobe_engine.core.guard import Faults, is_of_training, of_training


class Preempted(Exception):
    """What a program raises to leave its training."""


class _Object:
    """A handler that is no function."""

    def __call__(self, _number: int, _frame: object) -> None:
        raise Preempted

    def method(self, *_given: object) -> None:
        raise Preempted


def _leave(_number: int, _frame: object) -> None:
    raise Preempted


def _partial(_mine: str, _number: int, _frame: object) -> None:
    raise Preempted


def _once(*_given: object) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise Preempted


HANDLERS = {
    "function": _leave,
    "partial": functools.partial(_partial, "x"),
    "object": _Object(),
    "method": _Object().method,
    "leaves its place": _once,
}


@pytest.mark.parametrize("handler", HANDLERS)
def test_an_exception_of_a_signal_handler_reaches_the_program(handler: str) -> None:
    """A handler may be called while code of the probe runs: its exception is no fault of the probe."""
    before = signal.signal(signal.SIGALRM, HANDLERS[handler])
    faults = Faults()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Preempted), faults.guard("part"):
            time.sleep(10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert faults.is_enabled("part")


def test_a_fault_in_a_function_that_is_given_a_frame_is_one_of_the_probe() -> None:
    """Our functions are given frames too; they are no handlers."""

    def look(_number: int, frame: object) -> None:
        raise RuntimeError(str(frame)[:0])

    code = types.FunctionType(look.__code__, {"__name__": "msprobe_engine.core.statistics.rows", "str": str, "RuntimeError": RuntimeError})
    faults = Faults()
    with faults.guard("part"):
        code(2, sys._getframe())
    assert not faults.is_enabled("part")
    assert not is_of_training(RuntimeError())


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
    assert not faults.is_enabled("part")


def test_an_error_of_the_training_passes_every_guard() -> None:
    """It is raised as it is, whatever the settings, and the part of the probe goes on working."""
    faults = Faults()
    error = of_training(RuntimeError("kernel failed"))
    assert is_of_training(error)
    for guard in (faults.guard("dump"), faults.outward("dump")):
        with pytest.raises(RuntimeError, match="kernel failed"), guard:
            raise error
    with pytest.raises(RuntimeError, match="kernel failed"):
        faults.fail("dump", error)
    assert faults.is_enabled("dump")
    assert faults.counts == {}
