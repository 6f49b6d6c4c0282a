"""Steps that wait for rows of other ranks: saved by a thread as soon as these come, once, and made into one frame whoever is first."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from msprobe_engine.core.guard import Faults
from msprobe_engine.core.records import Frame
from msprobe_engine.core.statistics import rows
from msprobe_engine.probe import pending_steps
from msprobe_engine.probe.pending_steps import PendingStep, RowsEdit, StepSaver

BOUND = 20.0


class Rows:
    """Rows that are on the host at once."""

    def ready(self) -> bool:
        return True

    def rows(self) -> rows.Rows:
        return rows.empty(1)


class Edit(RowsEdit):
    """Rows of another rank, which come when `come` is set."""

    def __init__(self, fails: bool = False) -> None:
        self.come = threading.Event()
        self.fails = fails
        self.called_by: list[int] = []

    def ready(self) -> bool:
        return self.come.is_set()

    def apply(self, given: rows.Rows) -> None:
        self.called_by.append(threading.get_ident())
        if self.fails:
            raise OSError("planted")
        given[0, rows.SUM] = 7.0


class KnownInPart(Edit):
    """The same, and without them a row is not known."""

    def leave_out(self, given: rows.Rows) -> Mapping[int, str]:
        given[0, rows.SUM] = 0.0
        return {0: "of rank 1"}


def build(given: rows.Rows, unknown: Mapping[int, str]) -> Frame:
    return Frame(step=0, rank=0, rows=given, lost=dict.fromkeys(unknown.values(), 1))


def watched(edit: Edit, faults: Faults | None = None) -> tuple[StepSaver, PendingStep, list[Frame]]:
    """A step that waits for `edit`, watched, and what is saved of it."""
    saved: list[Frame] = []
    saver = StepSaver(faults or Faults())
    saver.saves.append(saved.append)
    step = PendingStep(Rows(), build, [edit])
    assert step.arrive(wait=False)
    saver.watch([step])
    saver.watch([step])
    return saver, step, saved


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_saved_when_rows_come() -> None:
    """No call on the training's thread is needed; the frame is made and saved once, and that one goes on."""
    edit = Edit()
    saver, step, saved = watched(edit)
    assert not saved
    edit.come.set()
    wait_for(lambda: step.frame)
    with step.lock:
        step.make_frame(Faults(), saver.saves)
    assert saved == [step.frame]
    assert saved[0].rows[0, rows.SUM] == 7.0
    assert len(edit.called_by) == 1
    assert edit.called_by != [threading.get_ident()]
    saver.close()


def test_saved_in_part_when_rows_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is saved, once, and says what is missing; the whole comes later. An edit that cannot say what is missing waits."""
    monkeypatch.setattr(pending_steps, "PATIENCE_SECONDS", 0.05)
    edit, cannot_tell = KnownInPart(), Edit()
    saver, _, saved = watched(edit)
    other, _, of_other = watched(cannot_tell)
    wait_for(lambda: saved)
    time.sleep(0.2)
    assert [frame.lost for frame in saved] == [{"of rank 1": 1}]
    edit.come.set()
    wait_for(lambda: len(saved) == 2)
    assert saved[1].lost == {}
    assert [frame.rows[0, rows.SUM] for frame in saved] == [0.0, 7.0]
    assert not of_other
    saver.close()
    other.close()


def test_strict_error_is_kept_for_the_training() -> None:
    """With strict settings a failing edit makes no frame; the thread goes on."""
    edit, next_edit = Edit(fails=True), Edit()
    saver, step, saved = watched(edit, Faults(strict=True))
    edit.come.set()
    wait_for(lambda: step.error)
    after = PendingStep(Rows(), build, [next_edit])
    after.arrive(wait=False)
    next_edit.come.set()
    saver.watch([after])
    wait_for(lambda: after.frame)
    assert isinstance(step.error, OSError)
    assert saved == [after.frame]
    saver.close()


def test_thread_only_where_it_is_needed() -> None:
    """Nothing to save: no thread. After `close` there is none."""

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "msprobe-step-saver"]

    wait_for(lambda: not threads())
    step = PendingStep(Rows(), build, [Edit()])
    step.arrive(wait=False)
    StepSaver(Faults()).watch([step])
    assert not threads()
    saver, _, _ = watched(Edit())
    assert len(threads()) == 1
    saver.close()
    wait_for(lambda: not threads())


def test_forked_child_has_its_own_thread() -> None:
    """A child saves its own steps, and not those that waited in its parent."""
    edit = Edit()
    saver, step, saved = watched(edit)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mine = PendingStep(Rows(), build, [Edit()])
            mine.edits[0].come.set()  # type: ignore[attr-defined]
            mine.arrive(wait=False)
            saver.watch([step, mine])
            wait_for(lambda: mine.frame)
            code = 0 if saved == [mine.frame] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    edit.come.set()
    wait_for(lambda: step.frame)
    saver.close()
