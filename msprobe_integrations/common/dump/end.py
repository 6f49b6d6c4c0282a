"""The last line of a dump: what it has written, or why it has written nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msprobe_engine.core.errors import NothingCapturedError
from msprobe_engine.core.guard import Faults
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.settings.schema import DumpSettings
from msprobe_engine.core.settings.tree import format_value
from msprobe_engine.formats.dump.writing.tally import Steps
from msprobe_integrations.common.dump.files import DumpFiles, RankedBackend

_log = get_logger()


@dataclass
class Story:
    """What happened to the calls of a run, as far as it explains an empty dump.

    Attributes:
        starts, saves: calls of ``start()`` and ``save()``.
        steps: numbers of the steps that ended.
        off: steps that ended while ``dump_enable`` was false.
        begun: steps that were wanted and begun.
        forwards: most forward calls that were counted for a ``token_range`` that was not reached; -1: there was none.
        elsewhere: steps in which the request of ``request_id`` was not scheduled.
    """

    starts: int = 0
    saves: int = 0
    steps: Steps = field(default_factory=Steps)
    off: int = 0
    begun: int = 0
    records: int = 0
    forwards: int = -1
    elsewhere: int = 0


def is_rank_dumped(dump: DumpSettings, rank: int | None, world: int) -> bool:
    """Was anything wanted of this process? A process of a job that ``rank`` leaves out has nothing to say."""
    return not dump.rank or (rank or 0) in dump.rank or (world <= 1 and not any(r < world for r in dump.rank))


def why_nothing(story: Story, dump: DumpSettings, rank: int | None, framework: str) -> str:
    """Why a dump can be empty, most likely reason first, with what to do."""
    ran = f"steps {story.steps} ran" if story.steps.count else "no step was ended with step()"
    if dump.level == "debug" and not story.saves:
        return "PrecisionDebugger.save() was never called, and level debug writes what it is given"
    if dump.level != "debug" and not story.starts:
        return "PrecisionDebugger.start() was never called; it belongs before the forward pass, stop() and step() behind the optimizer"
    if story.off and story.off >= story.steps.count:
        return f"dump_enable was false all the time ({ran}); set it to true in the file"
    if dump.rank and (rank or 0) not in dump.rank:
        what = "is rank" if rank is not None else "has no rank, which counts as rank"
        return f"'rank' is {format_value(list(dump.rank))} and this process {what} {rank or 0}; leave 'rank' empty for all"
    if story.elsewhere and not story.begun:
        return f"request_id '{dump.request_id}' was in none of the {story.elsewhere} batches that start() was given"
    if not story.begun:
        return f"'step' is {format_value(list(dump.step))} and {ran}; the run was too short, or step() was not called once per step"
    if story.forwards >= 0:
        return f"token_range was not reached: the model was called {story.forwards} times between start() and stop()"
    if dump.level == "L2":
        return (
            f"no kernel came that 'list' {format_value(list(dump.list))} wants: {framework} dumps compiled graphs only (GRAPH_MODE, jit), "
            f"and {format_value(list(dump.step))} of 'step' count the runs of each graph, from 0"
            if dump.step or dump.list
            else f"no kernel came: {framework} dumps compiled graphs only (GRAPH_MODE, jit)"
        )
    filters = [f"{key} {format_value(list(getattr(dump, key)))}" for key in ("scope", "list") if getattr(dump, key)]
    if filters:
        return f"no call between start() and stop() has a name that {' and '.join(filters)} wants; dump once without it to see the names"
    if dump.level == "L0":
        return (
            "no module inside the model given to start() was called between start() and stop() (the model itself is no record, only "
            "what it holds: give start() a module around it)"
        )
    return f"no {framework} function was called on this thread between start() and stop()"


class LastWords:
    """The last line of a dump, said once."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._steps = 0  # that were begun when it was last said
        self._empty = False

    def report_end(self, story: Story, dump: DumpSettings, files: DumpFiles, backend: RankedBackend) -> None:
        """Say what was written, or why nothing was.

        Raises:
            NothingCapturedError: nothing was, in strict mode.
        """
        rank = backend.rank()
        if story.records:
            if story.begun == self._steps:
                return
            self._steps = story.begun
            bad = files.tally.lost or files.tally.cut_off.count or files.writer.lost or self._faults.disabled
            how = ", but not everything is there" if bad else " successfully"
            (_log.warning if bad else _log.info)("msprobe ends%s. %s", how, files.summary())
            if story.starts > 1 and not story.steps.count:
                _log.warning("step() was never called: what %d calls of start() began is one step; call it after each", story.starts)
        elif not self._empty and is_rank_dumped(dump, rank, backend.world_size()):
            self._empty = True
            off = "" if self._faults.is_enabled("dump") else "a fault switched it off, see the message above"
            error = NothingCapturedError(f"the dump in {files.root} is empty: {off or why_nothing(story, dump, rank, backend.name)}")
            _log.error("%s", error)
            if self._faults.strict:
                raise error


def differences(before: DumpSettings, after: DumpSettings) -> list[str]:
    """``key old -> new`` for every key that differs."""
    names: Any = before.__dataclass_fields__
    pairs = [(key, getattr(before, key), getattr(after, key)) for key in names]
    return [f"{key} {_format_setting(old)} -> {_format_setting(new)}" for key, old, new in pairs if old != new]


def _format_setting(value: Any) -> str:
    return format_value(list(value)) if isinstance(value, tuple) else format_value(value)
