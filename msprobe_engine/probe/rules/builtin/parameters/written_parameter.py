"""Rule ``written_parameter``: a parameter is not what the last update has left."""

from __future__ import annotations

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

_BITS = (COUNT, ZEROS, MIN, MAX, SUM, SUMSQ)
_MOST = 0.5
"""Part of the parameters; more of them are weights that were loaded, or gathered only in the forward pass, and no fault of one."""


@dataclass(frozen=True, kw_only=True)
class WrittenParameterArgs(CommonArgs):
    """Arguments of the rule."""


class _Places(NamedTuple):
    """Parameter -> where its statistics are in a layout, before and after the update."""

    before: dict[str, int]
    after: dict[str, int]


class WrittenParameterRule(Rule):
    """Warnings for parameters whose statistics before an update are not those after the update of the step before (family ``parameters``
    of both, ``interval: 1``). Where most of them have changed, weights were loaded or swapped, and nothing is said. A parameter of which
    the optimizer updates a finer copy is not judged: it may be gathered late."""

    name = "written_parameter"
    fires = "a parameter is not what the update of the step before has left"
    meaning = "Something other than the optimizer has written into it: a fault of the memory, a bad restore, an edit of single weights."
    next = "look for code that writes into parameters between two updates; where there is none, doctor the device"
    all_kinds = ("param",)
    args_type = WrittenParameterArgs
    args: WrittenParameterArgs

    def setup(self) -> None:
        self._places: dict[int, _Places] = {}
        self._last: dict[str, npt.NDArray[np.int64]] = {}
        self._norms: dict[str, float] = {}
        self._step = -2

    def check(self, frame: Frame) -> list[Alert]:
        layout = self.layouts.of(frame)
        places = self._places_of(frame, layout)
        table = layout.order_rows(frame)
        ints = as_int64(table)
        alerts: list[Alert] = []
        if frame.step == self._step + 1 and frame.complete:
            known = [(name, row) for name, row in places.before.items() if name in self._last]
            other = [(name, row) for name, row in known if _differ(self._last[name], ints[row])]
            if len(other) <= _MOST * len(known):
                alerts = [self._alert(frame, layout, table, name, row) for name, row in other[: self.args.max_alerts]]
                note_rest(alerts, len(other))
        if places.after:
            self._step = frame.step
            self._last = {name: ints[row].copy() for name, row in places.after.items()}
            self._norms = {name: _norm(table[row]) for name, row in places.after.items()}
        return alerts

    def _alert(self, frame: Frame, layout: Layout, table: npt.NDArray[np.float64], name: str, row: int) -> Alert:
        norm, before = _norm(table[row]), self._norms[name]
        seen = f"norm {number(norm)}, {number(before)} after the update of step {frame.step - 1}"
        if number(norm) == number(before):
            seen += "; its elements are others"
        return alert_at(frame, layout, row, rule=self, value=norm, expected="what the update has left", seen=seen)

    def _places_of(self, frame: Frame, layout: Layout) -> _Places:
        places = self._places.get(layout.number)
        if places is None:
            places = _Places({}, {})
            entries = len(frame.entries)
            for i, order in enumerate(layout.order.tolist()):
                if order < entries:
                    continue
                sample = frame.samples[order - entries]
                side = {"param_origin": places.before, "param_updated": places.after}.get(sample.family)
                if side is not None and FINER_COPY not in sample.extra and not is_excluded(sample.name, self.args.exclude):
                    side[f"{sample.vpp_stage} {sample.name}"] = i
            if len(self._places) > 4:
                self._places.clear()
            self._places[layout.number] = places
        return places


def _differ(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> bool:
    digests = bool(before[FLAGS] & after[FLAGS] & HAS_DIGEST)
    words = [COUNT, DIGEST] if digests else list(_BITS)
    return bool((before[words] != after[words]).any())


def _norm(row: npt.NDArray[np.float64]) -> float:
    return float(read_row(row).norm or 0.0)
