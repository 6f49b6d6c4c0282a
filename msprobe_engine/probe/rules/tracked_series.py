"""What rules with a memory share: which tensors are looked at, what is usual for each, and how long something has been wrong.

Everything is a column over the tensors (or layers) of a rule. Each has a slot, a number of its own that stays when others come and
go, also over steps in which nothing is due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.records import Frame, Sample
from msprobe_engine.core.statistics.columns import Column
from msprobe_engine.probe.rules.layout import LayoutCache, Table

Mask = npt.NDArray[np.bool_]
Slots = npt.NDArray[np.intp]

MAX_SLOTS = 200_000
"""A run with more names than this makes them up as it goes; the memory then begins anew."""
OCTAVE = float(np.log(2.0))


class View(NamedTuple):
    """The tensors of one frame that a rule looks at.

    Attributes:
        table: columns of the whole frame.
        places: their positions in the table, [m].
        slots: their slots, [m]; equal numbers where several tensors share one (the tensors of a layer).
        size: slots in use so far, over all frames.
        seen: slots of this frame, ascending, each once.
    """

    table: Table
    places: Slots
    slots: Slots
    size: int
    seen: Slots

    def spread(self, values: npt.NDArray[Any], fill: float = 0.0) -> Column:
        """A column of the table by slot, [size]; `fill` where a slot has no tensor in this frame."""
        out = np.full(self.size, fill)
        out[self.slots] = values[self.places]
        return out

    def total(self, values: npt.NDArray[Any]) -> Column:
        """Sum of a column of the table over the tensors of each slot, [size]."""
        out: Column = np.bincount(self.slots, values[self.places], self.size).astype(np.float64, copy=False)
        return out


class Watch:
    """The tensors of one rule.

    Args:
        layouts: shared by all rules.
        key: the slot's name for a sample; None when the rule does not look at it. Asked once per layout.
    """

    def __init__(self, layouts: LayoutCache, key: Callable[[Sample], str | None]) -> None:
        self._layouts = layouts
        self._key = key
        self._slots: dict[str, int] = {}
        self._views: dict[int, tuple[Slots, Slots, Slots]] = {}
        self.names: list[str] = []
        self.first: list[int] = []
        """Position in the layout of each slot's first tensor, as of the last new layout that held it."""
        self.generation = 0
        """Raised when all slots are given out anew."""

    def of(self, frame: Frame) -> View | None:
        """What the rule looks at in this frame, None when there is nothing."""
        if not frame.samples:
            return None
        table = self._layouts.table(frame)
        known = self._views.get(table.layout.number)
        if known is None:
            if len(self._slots) > MAX_SLOTS:
                self._slots, self._views, self.names, self.first = {}, {}, [], []
                self.generation += 1
            known = self._find_slots(frame, table)
            if len(self._views) > LayoutCache.SIZES:
                self._views.clear()
            self._views[table.layout.number] = known
        index, slots, seen = known
        return View(table, index, slots, len(self.names), seen) if len(index) else None

    def _find_slots(self, frame: Frame, table: Table) -> tuple[Slots, Slots, Slots]:
        entries = len(frame.entries)
        index: list[int] = []
        slots: list[int] = []
        present: set[int] = set()
        for i, order in enumerate(table.layout.order.tolist()):
            key = self._key(frame.samples[order - entries]) if order >= entries else None
            if key is None:
                continue
            slot = self._slots.get(key)
            if slot is None:
                slot = self._slots[key] = len(self.names)
                self.names.append(key)
                self.first.append(i)
            elif slot not in present:
                self.first[slot] = i
            present.add(slot)
            index.append(i)
            slots.append(slot)
        of = np.array(slots, np.intp)
        return np.array(index, np.intp), of, np.unique(of)


class Distance(NamedTuple):
    """Logarithms of value / level, [m] each.

    Attributes:
        raw: also while the level is young.
        away: NaN where the level is not known yet or the value does not count.
        scatter: usual absolute value of it.
    """

    raw: Column
    away: Column
    scatter: Column


class Level:
    """What is usual for each slot: a running mean of the logarithm, into which no value enters with more than one octave of distance,
    so that neither an outlier nor a start from far away spoils it, and its mean deviation.

    Args:
        window: steps that the mean looks back.
        warmup: values before the level counts as known.
    """

    def __init__(self, window: int, warmup: int) -> None:
        self._weight = 2.0 / (window + 1.0)
        self._warmup = warmup
        self._mean: Column = np.zeros(0)
        self._scatter: Column = np.zeros(0)
        self._seen: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def measure(self, x: Column, slots: Slots, healthy: Mask) -> Distance:
        """How far values are from their levels.

        Args:
            x: positive values, [m].
            slots: their slots, [m], each at most once.
            healthy: False for values that do not count (not finite, zero), [m].
        """
        size = int(slots.max()) + 1 if len(slots) else 0
        if size > len(self._mean):
            more = max(size, 2 * len(self._mean)) - len(self._mean)
            self._mean = np.append(self._mean, np.zeros(more))
            self._scatter = np.append(self._scatter, np.zeros(more))
            self._seen = np.append(self._seen, np.zeros(more, np.int64))
        away = np.log(np.where(healthy, x, 1.0)) - self._mean[slots]
        known = healthy & (self._seen[slots] >= self._warmup)
        return Distance(away, np.where(known, away, np.nan), self._scatter[slots])

    def add(self, distance: Distance, slots: Slots, healthy: Mask) -> None:
        """Take values in that were measured just before; `healthy` False leaves one out."""
        seen = self._seen[slots]
        young = seen == 0
        step = np.where(young, distance.raw, np.clip(distance.raw, -OCTAVE, OCTAVE))
        weight = np.where(healthy, np.maximum(1.0 / (seen + 1.0), self._weight), 0.0)
        self._mean[slots] += weight * step
        self._scatter[slots] += np.where(young, 0.0, weight) * (np.abs(step) - distance.scatter)
        self._seen[slots] = seen + healthy

    def value(self, slot: int) -> float:
        return float(np.exp(self._mean[slot]))


class RunningMedian:
    """What is usual for each slot: the median of the logarithm over the last `window` values, and 1.25 times their median deviation,
    which is the mean deviation where values scatter normally. Worked out anew every `EVERY` steps. For some hundred slots; `Level` is
    for thousands.

    Args:
        window: steps that the median looks back.
        warmup: values before it counts as known.
    """

    EVERY = 4

    def __init__(self, window: int, warmup: int) -> None:
        self._window = window
        self._warmup = min(warmup, window)
        self._past: Column = np.full((0, window), np.nan)
        self._median: Column = np.zeros(0)
        self._scatter: Column = np.zeros(0)
        self._known: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._steps = 0

    def measure(self, x: Column, slots: Slots, healthy: Mask) -> Distance:
        """As `Level.measure`."""
        size = int(slots.max()) + 1 if len(slots) else 0
        if size > len(self._past):
            size = max(size, 2 * len(self._past))
            self._past = np.concatenate([self._past, np.full((size - len(self._past), self._window), np.nan)])
            self._refresh()
        elif self._steps % self.EVERY == 0:
            self._refresh()
        away = np.log(np.where(healthy, x, 1.0)) - self._median[slots]
        known = healthy & (self._known[slots] >= self._warmup)
        return Distance(away, np.where(known, away, np.nan), self._scatter[slots])

    def add(self, distance: Distance, slots: Slots, healthy: Mask) -> None:
        """As `Level.add`. A step in which nothing is healthy does not move the window."""
        if healthy.any():
            column = np.full(len(self._past), np.nan)
            column[slots] = np.where(healthy, distance.raw + self._median[slots], np.nan)
            self._past[:, self._steps % self._window] = column
            self._steps += 1

    def is_highest(self, distance: Distance, slots: Slots) -> Mask:
        """Are values that were measured just before higher than all of the last half of their windows? [m] What a run begins with is no
        measure of it for long."""
        recent = (self._steps - 1 - np.arange(self._window // 2)) % self._window
        higher: Mask = self._past[np.ix_(slots, recent)] >= (distance.raw + self._median[slots])[:, None]
        return ~np.asarray(higher.any(axis=1))

    def forget(self, slots: Slots) -> None:
        """What is usual for these slots is not known any more."""
        slots = slots[slots < len(self._past)]
        self._past[slots], self._known[slots] = np.nan, 0

    def value(self, slot: int) -> float:
        return float(np.exp(self._median[slot]))

    def _refresh(self) -> None:
        self._known = (~np.isnan(self._past)).sum(1)
        self._median = _middle(self._past, self._known)
        self._scatter = 1.25 * _middle(np.abs(self._past - self._median[:, None]), self._known)


def _middle(values: Column, known: npt.NDArray[np.int64]) -> Column:
    """Median of each row over what is not NaN (the upper one of two), 0 where there is nothing. [rows]"""
    ordered = np.sort(values, 1)
    out: Column = np.take_along_axis(ordered, np.maximum(known // 2, 0)[:, None].clip(max=values.shape[1] - 1), 1)[:, 0]
    return np.where(known > 0, out, 0.0)


class Episode(NamedTuple):
    """Begin or end of something that lasts.

    Attributes:
        steps: how many judged steps it has lasted.
        over: True when it has ended.
    """

    slot: int
    steps: int
    over: bool


class Episodes:
    """Says a lasting condition once when it has held for `patience` judged steps, and once when it has been gone for `recovery`.

    What comes and goes within `recovery` steps is one episode.
    """

    def __init__(self, patience: int, recovery: int) -> None:
        self._patience = patience
        self._recovery = recovery
        self._run: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._fine: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._length: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._open: Mask = np.zeros(0, np.bool_)
        self._quiet = True

    def update(self, bad: Mask, slots: Slots) -> list[Episode]:
        """What began and what ended with this step.

        Args:
            bad: where the condition holds, [m].
            slots: the slots that were judged, [m], each at most once. Others stay as they are.
        """
        if self._quiet and not bad.any():
            return []
        size = int(slots.max()) + 1 if len(slots) else 0
        if size > len(self._run):
            more = max(size, 2 * len(self._run)) - len(self._run)
            self._run, self._fine, self._length = (np.append(c, np.zeros(more, np.int64)) for c in (self._run, self._fine, self._length))
            self._open = np.append(self._open, np.zeros(more, np.bool_))
        run = np.where(bad, self._run[slots] + 1, 0)
        opened = self._open[slots]
        fine = np.where(bad, 0, self._fine[slots] + 1)
        length = np.where(opened, self._length[slots] + 1, run)
        begins = ~opened & (run >= self._patience)
        ends = opened & (fine >= self._recovery)
        self._run[slots], self._fine[slots], self._length[slots] = run, fine, length
        self._open[slots] = (opened | begins) & ~ends
        self._quiet = not (self._run.any() or self._open.any())
        begun = [Episode(int(slots[i]), int(run[i]), False) for i in np.flatnonzero(begins).tolist()]
        return begun + [Episode(int(slots[i]), int(length[i] - fine[i]), True) for i in np.flatnonzero(ends).tolist()]
