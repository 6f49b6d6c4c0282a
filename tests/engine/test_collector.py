"""The garbage collector inside a captured step."""

import gc
from collections.abc import Iterator

import pytest

from msprobe_engine.core.process.garbage_collection import THRESHOLD, StepCollection


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_thresholds_come_back() -> None:
    """Raised inside the step, as before after it, also when a step begins twice."""
    gc.set_threshold(700, 10, 10)
    step = StepCollection()
    step.raise_threshold()
    step.raise_threshold()
    assert gc.get_threshold() == (THRESHOLD, 10, 10)
    step.restore_threshold()
    assert gc.get_threshold() == (700, 10, 10)
    step.restore_threshold()
    assert gc.get_threshold() == (700, 10, 10)


def test_the_users_choice_stays() -> None:
    """A collector that is off, tuned higher, or changed inside the step is not touched."""
    step = StepCollection()
    gc.set_threshold(10 * THRESHOLD, 5, 5)
    step.raise_threshold()
    assert gc.get_threshold() == (10 * THRESHOLD, 5, 5)
    gc.set_threshold(700, 10, 10)
    step.raise_threshold()
    gc.set_threshold(123, 4, 5)
    step.restore_threshold()
    assert gc.get_threshold() == (123, 4, 5)
    gc.set_threshold(0)
    step.raise_threshold()
    assert gc.get_threshold()[0] == 0
