"""When and where something is wanted: ranks, steps, interval, number of times."""

from __future__ import annotations

from collections.abc import Sequence

from msprobe_engine.core.settings.schema import MonitorSettings


class Window:
    """A set of steps on a set of ranks.

    Args:
        ranks: ranks that take part, empty is all. A run without ranks counts as rank 0.
        steps: listed steps, empty is all.
        start: first step.
        interval: every so many steps from `start`.
        first: so many steps are wanted, whatever the interval, from the first one that is asked for and not before `start`: a training
            that goes on from a checkpoint begins at a later step, and has first steps as any other.
        times: stop after so many wanted steps that were counted (`count_step`).
    """

    def __init__(
        self,
        ranks: Sequence[int] = (),
        steps: Sequence[int] = (),
        *,
        start: int = 0,
        interval: int = 1,
        first: int = 0,
        times: int | None = None,
    ) -> None:
        self._ranks = frozenset(ranks)
        self._steps = frozenset(steps)
        self._last = max(self._steps) if self._steps else None
        self._start = start
        self._interval = interval
        self._first = first
        self._times = times
        self._taken = 0
        self._begun: int | None = None

    def is_wanted(self, step: int, rank: int | None) -> bool:
        first = self.is_first(step)
        if self._ranks and (rank or 0) not in self._ranks:
            return False
        if self._times is not None and self._taken >= self._times:
            return False
        if self._steps:
            return step in self._steps
        since = step - self._start
        return since >= 0 and (first or since % self._interval == 0)

    def is_first(self, step: int) -> bool:
        """Is this one of the first steps? Steps are asked for in order."""
        if self._begun is None and step >= self._start:
            self._begun = step
        return self._begun is not None and 0 <= step - self._begun < self._first

    def count_step(self) -> None:
        """Count a step that was captured, for `times`."""
        self._taken += 1

    def over(self, step: int) -> bool:
        """True when no step from `step` on can be wanted."""
        if self._times is not None and self._taken >= self._times:
            return True
        return self._last is not None and step > self._last


def of_monitor(monitor: MonitorSettings, ranks: Sequence[int] = ()) -> Window:
    """The steps that the monitor looks at, on these ranks."""
    return Window(ranks, (), start=monitor.start_step, interval=monitor.interval, first=monitor.first_steps, times=monitor.collect_times)
