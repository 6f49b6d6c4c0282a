"""Rule ``written_parameter``: a parameter is not what the last update has left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import FINER_COPY, Frame
from msprobe_engine.core.statistics.rows import COUNT, DIGEST, FLAGS, HAS_DIGEST, MAX, MIN, SUM, SUMSQ, ZEROS, as_int64, read_row
from msprobe_engine.probe.rules.alert_factory import alert_at, is_excluded, note_rest, number
from msprobe_engine.probe.rules.arguments import CommonArgs
from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.layout import Layout
from msprobe_engine.probe.rules.stateful_rule import kind_of

_BITS = (COUNT, ZEROS, MIN, MAX, SUM, SUMSQ)
_MOST = 0.5
"""Part of the parameters; more of them are weights that were loaded, or gathered only in the forward pass, and no fault of one."""
Words = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WrittenParameterArgs(CommonArgs):
    """Arguments of the rule."""


class _Places(NamedTuple):
    """Parameter -> where its statistics are in a layout, before and after the update; and its kind: those whose names differ in numbers."""

    before: dict[str, int]
    after: dict[str, int]
    kinds: dict[str, str]


class WrittenParameterRule(Rule):
    """Warnings for parameters whose statistics before an update are not those after the update of the step before (family ``parameters``
    of both, ``interval: 1``), once for each. What a program writes by its recipe is no fault: most of the parameters (weights that are
    loaded or swapped); all of a kind, that is in all layers (adapters that are merged, a teacher that follows, pruning); one whose smallest
    elements become zero (pruning); or one that it writes in every step, also from the first one on (masks, clipped weights). A parameter of
    which the optimizer updates a finer copy is not judged: it may be gathered late."""

    name = "written_parameter"
    fires = (
        "a parameter is not what the update of the step before has left; said once, and not where the program writes it in every step, "
        "writes all of its kind (adapters, a teacher) or most parameters at once, or sets its smallest elements to zero"
    )
    meaning = "Something other than the optimizer has written into it: a fault of the memory, a bad restore, an edit of single weights."
    next = "look for code that writes into parameters between two updates; where there is none, doctor the device"
    all_kinds = ("param",)
    args_type = WrittenParameterArgs
    args: WrittenParameterArgs

    def setup(self) -> None:
        self._places: dict[int, _Places] = {}
        self._last: dict[str, Words] = {}
        self._step = -2
        self._written: set[str] | None = None
        self._said: set[str] = set()
        self._held: dict[str, Alert] = {}

    def check(self, frame: Frame) -> list[Alert]:
        layout = self.layouts.of(frame)
        places = self._places_of(frame, layout)
        table = layout.order_rows(frame)
        ints = as_int64(table)
        alerts: list[Alert] = []
        if frame.step == self._step + 1 and frame.complete:
            known = [name for name in places.before if name in self._last]
            written = {name for name in known if _differ(self._last[name], ints[places.before[name]])}
            alerts = [alert for name, alert in self._held.items() if name in known and name not in written]
            faults = [] if _is_recipe(known, written, places.kinds) else self._find_faults(known, written, ints, places)
            found = {name: self._alert(frame, layout, table, name, places.before[name]) for name in faults}
            # A write before the first update that was seen may be one of every step: the next step tells.
            self._held = found if self._written is None else {}
            alerts += [] if self._written is None else found.values()
            self._said.update(found)
            self._written = written
        if places.after:
            self._step = frame.step
            self._last = {name: ints[row].copy() for name, row in places.after.items()}
        return note_rest(alerts[: self.args.max_alerts], len(alerts))

    def _find_faults(self, known: Sequence[str], written: set[str], ints: Words, places: _Places) -> list[str]:
        """Parameters that were written for the first time, in the order of `known`."""
        new = written - self._said - (self._written or set())
        return [name for name in known if name in new and not _is_pruned(self._last[name], ints[places.before[name]])]

    def _alert(self, frame: Frame, layout: Layout, table: npt.NDArray[np.float64], name: str, row: int) -> Alert:
        norm, before = _norm(table[row]), _norm(self._last[name].view(np.float64))
        seen = f"norm {number(norm)}, {number(before)} after the update of step {frame.step - 1}"
        if number(norm) == number(before):
            seen += "; its elements are others"
        return alert_at(frame, layout, row, rule=self, value=norm, expected="what the update has left", seen=seen)

    def _places_of(self, frame: Frame, layout: Layout) -> _Places:
        places = self._places.get(layout.number)
        if places is None:
            places = _Places({}, {}, {})
            entries = len(frame.entries)
            for i, order in enumerate(layout.order.tolist()):
                if order < entries:
                    continue
                sample = frame.samples[order - entries]
                side = {"param_origin": places.before, "param_updated": places.after}.get(sample.family)
                if side is not None and FINER_COPY not in sample.extra and not is_excluded(sample.name, self.args.exclude):
                    name = f"{sample.vpp_stage} {sample.name}"
                    side[name] = i
                    places.kinds[name] = f"{sample.vpp_stage} {kind_of(sample.name)} {len(sample.ref.description.shape)}"
            if len(self._places) > 4:
                self._places.clear()
            self._places[layout.number] = places
        return places


def _is_recipe(known: Collection[str], written: Collection[str], kinds: Mapping[str, str]) -> bool:
    """Are these most of the parameters, or, of each kind that has several, all?"""
    if len(written) > _MOST * len(known):
        return True
    size, part = Counter(kinds[name] for name in known), Counter(kinds[name] for name in written)
    several = [kind for kind in part if size[kind] > 1]
    return bool(several) and all(part[kind] == size[kind] for kind in several)


def _is_pruned(before: Words, after: Words) -> bool:
    """Have its smallest elements become zero, and no others? They hold less of the sum of squares than their share."""
    share = (int(after[ZEROS]) - int(before[ZEROS])) / max(int(after[COUNT]), 1)
    squares, left = (float(words.view(np.float64)[SUMSQ]) for words in (before, after))
    return share > 0.0 and squares * (1.0 - 0.5 * share) <= left <= squares


def _differ(before: Words, after: Words) -> bool:
    digests = bool(before[FLAGS] & after[FLAGS] & HAS_DIGEST)
    words = [COUNT, DIGEST] if digests else list(_BITS)
    return bool((before[words] != after[words]).any())


def _norm(row: npt.NDArray[np.float64]) -> float:
    return float(read_row(row).norm or 0.0)
