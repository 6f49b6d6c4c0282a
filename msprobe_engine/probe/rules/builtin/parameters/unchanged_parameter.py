"""Rule ``unchanged_parameter``: the optimizer steps and one parameter stays what it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import FINER_COPY, NO_OPTIMIZER, Frame, Sample
from msprobe_engine.core.statistics.rows import COUNT, DIGEST, FLAGS, HAS_DIGEST, MAX, MIN, SUM, SUMSQ, ZEROS
from msprobe_engine.probe.rules.alert_factory import alert_at
from msprobe_engine.probe.rules.arguments import LastingArgs, arg
from msprobe_engine.probe.rules.layout import Table
from msprobe_engine.probe.rules.stateful_rule import LastingRule
from msprobe_engine.probe.rules.tracked_series import Episode, Mask, Slots, View, Watch

_BITS = (COUNT, ZEROS, MIN, MAX, SUM, SUMSQ)
_ROUNDOFF = 1e-6
"""Part of the median gradient; less is what round-off leaves of one that cancels out, as that of a bias before a batch norm."""
Words = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class UnchangedParameterArgs(LastingArgs):
    patience: int = arg(3, "monitored steps in a row before the rule fires", minimum=1)
    frozen: bool = arg(False, "also name parameters that have no gradient, or one of exact zeros")


class _Partners(NamedTuple):
    """For each parameter of a layout the position of the same parameter before the step and of its gradient, -1: none. [m]"""

    before: Slots
    gradient: Slots
    any_gradient: bool


class UnchangedParameterRule(LastingRule[UnchangedParameterArgs]):
    """Warnings for parameters whose row (the digest, or where none is taken six of its words) is the same before and after the step, or
    as in the last monitored step where only one of both is taken.

    Judged are parameters with a finite gradient that is more than round-off; where no gradients are monitored, all. Steps with learning
    rate 0 and skipped steps say nothing. A parameter of which the optimizer updates a finer copy is not judged: in bfloat16 it moves when
    many small updates have come together.
    """

    name = "unchanged_parameter"
    fires = "a parameter with a gradient (more than round-off) is the same after the optimizer step although the learning rate is not 0"
    meaning = (
        "The optimizer does not own this parameter, its update is lost (a stale copy, a wrong shard), or the update is smaller than "
        "the parameter's number format can hold."
    )
    next = "check that the parameter is in a group of the optimizer with a learning rate; for half-precision parameters keep float32 copies"
    all_kinds = ("param",)
    args_type = UnchangedParameterArgs

    def setup(self) -> None:
        self._watch = Watch(self.layouts, self._key)
        self._generation = 0
        self._partners: dict[int, _Partners] = {}
        self._last: Words = np.zeros((0, 8), np.int64)

    def _key(self, sample: Sample) -> str | None:
        if sample.family != "param_updated" or FINER_COPY in sample.extra or self.left_out(sample.name):
            return None
        return f"{sample.vpp_stage} {sample.name}"

    def check(self, frame: Frame) -> list[Alert]:
        view = self._watch.of(frame) if frame.complete else None
        if view is None:
            return []
        if self._generation != self._watch.generation:
            self._generation, self._last = self._watch.generation, np.zeros((0, 8), np.int64)
        partners = self._partners_of(frame, view)
        table, index = view.table, view.places
        now = _words(table, index)
        paired = partners.before >= 0
        then = self._read_last_words(view.slots)
        if paired.any():
            then = np.where(paired[:, None], _words(table, np.maximum(partners.before, 0)), then)
        self._last[view.slots] = now
        same = np.asarray((now == then).all(1) & (now[:, 0] > 0))
        if frame.scalars.get("learning_rate") == 0.0 or frame.skipped:
            return []
        has = self._gradients(table, partners)
        judged = has if not self.args.frozen else has | self._idle(table, partners)
        outside = {name for name, why in frame.untrained.items() if why == NO_OPTIMIZER}  # the business of untrained_parameter
        if outside:
            judged = judged & ~np.array([self._watch.names[slot].split(" ", 1)[1] in outside for slot in view.slots.tolist()])
        # Two samples of one parameter share a slot; the last one counts.
        bad = np.zeros(view.size, np.bool_)
        known = np.zeros(view.size, np.bool_)
        bad[view.slots], known[view.slots] = same & judged, judged
        slots = np.flatnonzero(known)
        episodes = self.episodes.update(bad[slots], slots)

        def describe(episode: Episode) -> Alert:
            place = self._watch.first[episode.slot]
            i = int(np.flatnonzero(view.slots == episode.slot)[-1])
            gradient = "not monitored" if not partners.any_gradient else "other than zero" if has[i] else "zero or missing"
            return alert_at(
                frame,
                table.layout,
                place,
                rule=self,
                value=float(episode.steps),
                expected="a parameter that changes with the optimizer step",
                seen=f"unchanged over {episode.steps} monitored optimizer steps, its gradient is {gradient}",
                extra={"gradient": gradient},
            )

        return self.build_alerts(frame, episodes, lambda slot: self._watch.names[slot].split(" ", 1)[1], describe)

    def _read_last_words(self, slots: Slots) -> Words:
        """Words of the last monitored step, all -1 where there was none."""
        size = int(slots.max()) + 1
        if size > len(self._last):
            more = np.full((max(size, 2 * len(self._last)) - len(self._last), 8), -1, np.int64)
            self._last = np.concatenate([self._last, more])
        return self._last[slots]

    def _gradients(self, table: Table, partners: _Partners) -> Mask:
        """Where there is a finite gradient that is more than round-off; everywhere when none is monitored."""
        if not partners.any_gradient:
            return np.ones(len(partners.gradient), np.bool_)
        rows = np.maximum(partners.gradient, 0)
        out: Mask = (partners.gradient >= 0) & table.finite[rows] & (table.zeros[rows] < table.count[rows])
        if out.any():
            mean_square = table.squares[rows] / np.maximum(table.count[rows], 1)
            out &= mean_square >= _ROUNDOFF**2 * np.median(mean_square[out])
        return out

    def _idle(self, table: Table, partners: _Partners) -> Mask:
        """Where there is no gradient, or one of exact zeros."""
        rows = np.maximum(partners.gradient, 0)
        out: Mask = (partners.gradient < 0) | (table.zeros[rows] == table.count[rows])
        return out

    def _partners_of(self, frame: Frame, view: View) -> _Partners:
        layout = view.table.layout
        known = self._partners.get(layout.number)
        if known is None:
            places: dict[tuple[str, int, str], int] = {}
            entries = len(frame.entries)
            for i, order in enumerate(layout.order.tolist()):
                if order >= entries:
                    sample = frame.samples[order - entries]
                    places[sample.family, sample.vpp_stage, sample.name] = i
            samples = [frame.samples[int(layout.order[i]) - entries] for i in view.places.tolist()]
            before = [places.get(("param_origin", s.vpp_stage, s.name), -1) for s in samples]
            gradient = [places.get(("grad_reduced", s.vpp_stage, s.name), -1) for s in samples]
            any_gradient = any(family == "grad_reduced" for family, _, _ in places)
            known = _Partners(np.array(before, np.intp), np.array(gradient, np.intp), any_gradient)
            if len(self._partners) > 4:
                self._partners.clear()
            self._partners[layout.number] = known
        return known


def _words(table: Table, index: Slots) -> Words:
    """What is compared: count, whether there is a digest, and the digest or six words. [m, 8]"""
    ints = table.ints[index]
    out = np.zeros((len(index), 8), np.int64)
    digest = (ints[:, FLAGS] & HAS_DIGEST) != 0
    out[:, 0], out[:, 1] = ints[:, COUNT], digest
    out[:, 2:] = ints[:, _BITS]
    if digest.any():
        out[digest, 2:] = ints[digest][:, (DIGEST,)]
    return out
