"""How long other ranks are waited for when a training ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from msprobe_engine.core.settings.schema import CsvSettings, MonitorSettings, ProbeSettings, SinkSettings
from msprobe_engine.probe.pending_steps import RowsEdit
from msprobe_engine.probe.pipeline import CLOSE_PATIENCE
from msprobe_integrations.common.ranks.shutdown_deadline import CUT_PATIENCE, LEAST
from msprobe_integrations.torch.training.loop import LoopObserver


class Clock:
    """Time that only passes where something waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        patch.setattr(time, "monotonic", lambda: self.now)


class Rows(RowsEdit):
    """Rows of another rank that come after so many seconds of waiting."""

    def __init__(self, clock: Clock, after: float) -> None:
        self.clock, self.after, self.asked, self.used = clock, after, 0.0, False

    def ready(self) -> bool:
        return self.after <= 0

    def wait(self, seconds: float) -> None:
        self.asked = min(seconds, max(0.0, self.after))
        self.clock.now += self.asked
        self.after -= self.asked

    def apply(self, _rows: Any) -> None:
        self.used = True


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopObserver:
    """Follows a model; no exception has ended anything yet."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    sinks = SinkSettings(csv=CsvSettings(enabled=False), memory=True)
    observer = LoopObserver(ProbeSettings(output_dir=str(tmp_path), strict=True, monitor=MonitorSettings(), sinks=sinks))
    observer.setup(nn.Linear(2, 2))
    return observer


def steps(observer: LoopObserver, clock: Clock, seconds: list[float]) -> list[Rows]:
    """One step for each, whose rows want so long."""
    rows = [Rows(clock, after) for after in seconds]
    assert observer.probe is not None
    for step, each in enumerate(rows):
        observer.begin(step)
        observer.probe.pipeline.edit_rows(each)
        observer.add_scalars({"loss": 1.0})
        observer.end()
    return rows


def test_a_training_that_raised_waits_briefly_once(made: LoopObserver, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps together have `CUT_PATIENCE`, the end that comes after it none of its own; every step is handed on all the same."""
    clock = Clock(monkeypatch)
    began = clock.now
    rows = steps(made, clock, [100.0, 100.0, 100.0])
    assert made.probe is not None
    probe = made.probe
    with pytest.raises(KeyboardInterrupt), made.driven():
        raise KeyboardInterrupt
    assert [each.used for each in rows] == [True, True, True]
    assert sum(each.asked for each in rows) == pytest.approx(CUT_PATIENCE)
    assert [(frame.step, frame.complete) for frame in probe.frames] == [(0, True), (1, True), (2, True), (3, False)]
    made.close()
    assert clock.now - began < CUT_PATIENCE + 4 * LEAST


def test_a_training_that_goes_on_has_its_patience_back(made: LoopObserver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop may catch the exception of a step; its end is one like any other."""
    clock = Clock(monkeypatch)
    steps(made, clock, [100.0])
    with pytest.raises(RuntimeError), made.driven():
        raise RuntimeError("out of memory")
    (late,) = steps(made, clock, [100.0])
    made.close()
    assert late.asked == pytest.approx(CLOSE_PATIENCE)


def test_rows_that_come_are_waited_for(made: LoopObserver, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a regular end each step has the whole patience as long as rows come; after one that did not, the others have none."""
    clock = Clock(monkeypatch)
    rows = steps(made, clock, [0.9 * CLOSE_PATIENCE, 0.8 * CLOSE_PATIENCE, 100.0, 100.0])
    made.close()
    asked = [each.asked / CLOSE_PATIENCE for each in rows]
    assert asked == pytest.approx([0.9, 0.8, 1.0, 0.0], abs=0.01)
    assert all(each.used for each in rows)


def test_an_exception_that_ended_the_program(made: LoopObserver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised between two steps it is seen at the interpreter's end, and waits are brief there, too."""
    clock = Clock(monkeypatch)
    (late,) = steps(made, clock, [100.0])
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    made.close()
    assert 0 < late.asked <= CUT_PATIENCE
