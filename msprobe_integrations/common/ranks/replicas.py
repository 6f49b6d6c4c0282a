"""Replica check: parameters and reduced gradients that have to be the same bits on several ranks, every so many steps.

In a step that is due every replicated tensor gets its 64-bit digest (one pass over the parameters, on the device, with the rows of the
step). When the rows are on the host, one small exchange per group of ranks begins (`Channel`), and its result becomes alerts at a later
step boundary: no frame and no step waits for it. What differs is reported by the lowest rank of the group.

=========  ==================================================================================================================
what       when
=========  ==================================================================================================================
``grad``   entry of the update: reduced gradients, those that every rank of the group has
``param``  after the update; parameters that are gathered by the next forward pass only (`Replicas.late`) at the entry of the
           update, as the last update left them
=========  ==================================================================================================================

Due are steps whose number is a multiple of the interval, and the first one: replicas that start apart are found at once. A step without
an update hands its check on to the next. Families and their interval have no influence.

What the models are called with has to differ between data-parallel ranks: where it is the same, rule ``repeated_batch`` hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.probe.pending_steps import RowsEdit
from msprobe_engine.probe.rules.builtin.progress.repeated_batch import repeated_batch_rule
from msprobe_engine.probe.rules.builtin.ranks.replica_mismatch import Mismatch, replica_rule
from msprobe_integrations.common.ranks.replica_channel import Channel, Difference, Mask, Ranks, Words

if TYPE_CHECKING:
    from msprobe_engine.core.alerts import Alert
    from msprobe_engine.core.settings.schema import ReplicaCheckSettings
    from msprobe_integrations.common.monitor.parts import ProbeBase
    from msprobe_integrations.common.parameters.gradients import Piece
    from msprobe_integrations.common.parameters.source import ParameterValues, Replicas

PART = "monitor.replica_check"
PARAM, GRAD = "param", "grad"
SHOWN = 8
"""Different values that an alert lists."""

_FACTS = {PARAM: {"family": "param_updated"}, GRAD: {"family": "grad_reduced", "phase": "reduced"}}
_NOT_TAKEN, _NONE = -1, -2
_log = get_logger()


@dataclass(frozen=True, eq=False)
class _Take:
    """One digest to take; several groups may compare it."""

    place: int
    source: ParameterValues
    piece: Piece
    kind: str
    part: bool
    before: bool

    def tensor(self) -> Any:
        """What it is of, now."""
        if self.kind == GRAD:
            return self.source.gradient(self.piece)
        return self.source.value(self.piece) if self.part else self.piece.parameter


@dataclass(eq=False)
class _Group:
    """What one group of ranks compares.

    Attributes:
        batch: place of the digest of its batches, which come last; -1: those of its ranks may be the same.
    """

    takes: list[_Take] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    batch: int = -1

    def contents(self) -> list[str]:
        """In words that are the same on all its ranks: tied embeddings have another name, and another place, on each stage."""
        return [_text(take, label) for take, label in zip(self.takes, self.labels)] + ["batch"] * (self.batch >= 0)

    def places(self) -> list[int]:
        return [take.place for take in self.takes] + [self.batch] * (self.batch >= 0)


def _text(take: _Take, label: str) -> str:
    piece = take.piece
    name = "" if label == "embedding" else f"{piece.vpp_stage} {piece.name}"
    return f"{take.kind} {label} {name} {list(piece.shape)} {take.part}"


class ReplicaCheck:
    """One per probe. What goes wrong switches the check off and nothing else.

    Args:
        probe: its settings say what is compared; alerts go to its pipeline.
    """

    def __init__(self, probe: ProbeBase, ranks: Ranks) -> None:
        self._probe = probe
        self._ranks = ranks
        self._settings: ReplicaCheckSettings | None = None
        self._start = 0
        self._first = True
        self._sources: list[ParameterValues] = []
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._channels: dict[tuple[int, ...], Channel] = {}
        self._takes: dict[tuple[ParameterValues, bool], list[_Take]] = {}
        self._count = 0
        self._pending: set[ParameterValues] = set()
        self._taken: set[ParameterValues] = set()
        self._rows: Words = np.zeros(0, np.int64)
        self._samples: Any = None
        self._said: set[tuple[int, ...]] = set()
        self._said_left_out: set[tuple[tuple[int, ...], str]] = set()
        self._idle = False
        self._rule = replica_rule(probe.pipeline.rules)
        self._batches = repeated_batch_rule(probe.pipeline.rules)

    def attach(self, sources: Sequence[ParameterValues]) -> None:
        """Compare what these sources give."""
        monitor = self._probe.monitor
        settings = monitor.replica_check if monitor is not None and monitor.enabled else None
        self._sources = []
        self._pending.clear()
        self._taken.clear()
        self._settings = settings if settings is not None and settings.interval and (settings.parameters or settings.gradients) else None
        rank = self._ranks.rank()
        if self._settings is None or monitor is None or rank is None:
            self._keep_channels({})
            return
        self._start = monitor.start_step
        self._first = True
        self._count = 0
        self._takes = {}
        groups: dict[tuple[int, ...], _Group] = {}
        for source in sources:
            for piece in source.pieces:
                takes: dict[tuple[str, bool, bool], _Take] = {}
                for replicas in source.find_replicas(piece):
                    ranks = tuple(sorted(self._ranks.members(replicas.group)))
                    if monitor.rank:
                        ranks = tuple(r for r in ranks if r in monitor.rank)
                    if len(ranks) < 2 or rank not in ranks or (monitor.targets and replicas.label == "embedding"):
                        continue  # with targets one of the names of an embedding may be chosen, the other not
                    for key in _list_comparisons(self._settings, piece, replicas):
                        if key not in takes:
                            takes[key] = self._add_take(source, piece, *key)
                        group = groups.setdefault(ranks, _Group())
                        group.takes.append(takes[key])
                        group.labels.append(replicas.label)
        if sources and not groups and rank == 0 and not self._idle:
            self._idle = True
            _log.warning("monitor.replica_check: rank 0 holds no parameter that another rank holds too; nothing is compared there")
        for group in groups.values():
            if self._batches is not None and "dp" in group.labels:
                group.batch = self._count
                self._count += 1
        self._keep_channels(groups)
        self._rows = np.full(self._count, _NOT_TAKEN, np.int64)
        if self._channels:
            self._sources = list(sources)

    def _add_take(self, source: ParameterValues, piece: Piece, kind: str, part: bool, before: bool) -> _Take:
        take = _Take(self._count, source, piece, kind, part, before)
        self._count += 1
        self._takes.setdefault((source, before), []).append(take)
        return take

    def _keep_channels(self, groups: dict[tuple[int, ...], _Group]) -> None:
        """Channels for these groups and no others; those that compare what they did stay."""
        for ranks, channel in list(self._channels.items()):
            if ranks not in groups or channel.failed or tuple(groups[ranks].contents()) != channel.contents:
                self._warn_missed(ranks, channel, "what is compared has changed before they ended")
                self._channels.pop(ranks).close()
        self._groups = groups
        for ranks in sorted(groups):
            if ranks not in self._channels:
                try:
                    self._channels[ranks] = self._ranks.channel(ranks, groups[ranks].contents())
                except Exception as error:
                    raise_of_training(error)
                    self._warn_once(ranks, str(error))

    # in a step

    def begin_step(self, step: int) -> None:
        if self._settings is None or not self._sources:
            return
        self.poll()
        if step >= self._start and (self._first or step % self._settings.interval == 0):
            self._first = False
            self._pending = set(self._sources)
        self.take_batch(_NOT_TAKEN)
        self._samples = self._probe.pipeline.samples

    def take_batch(self, row: int) -> None:
        """In row `row` of this step is the digest of what the models are called with."""
        for group in self._groups.values():
            if group.batch >= 0:
                self._rows[group.batch] = row

    def due(self, source: ParameterValues) -> bool:
        """The update of this source that comes next is compared."""
        return source in self._pending

    def before_update(self, source: ParameterValues, active: bool) -> None:
        """The update begins; `active`: the step is monitored, too."""
        if source in self._pending:
            self._reduce(source, True, active)

    def after_update(self, source: ParameterValues, active: bool) -> None:
        if source in self._pending:
            self._reduce(source, False, active)
            self._pending.discard(source)

    def _reduce(self, source: ParameterValues, before: bool, active: bool) -> None:
        probe, takes = self._probe, self._takes.get((source, before))
        if not takes or not probe.faults.is_enabled(PART):
            return
        backend = probe.backend
        had = backend.want_digest
        with probe.guard(PART), probe.shield():
            try:
                if not had or not active:
                    backend.want_digest = True
                    backend.forget()  # what was reduced before the reduction over ranks, or the update, counts no more
                for take in takes:
                    tensor = take.tensor()
                    self._rows[take.place] = _NONE if tensor is None else backend.reduce(tensor).row
            finally:
                backend.want_digest = had
            self._taken.add(source)

    def end_step(self, step: int) -> None:
        """The step is over, its rows are about to be sent to the host."""
        if not self._sources:
            return
        with self._probe.guard(PART):
            self.poll()
            if self._taken:
                self._taken.clear()
                rows, self._rows = self._rows, np.full(self._count, _NOT_TAKEN, np.int64)
                if self._samples is self._probe.pipeline.samples:  # else the step was taken back, and its rows with it
                    sendings = [(channel, self._groups[ranks]) for ranks, channel in self._channels.items()]
                    self._probe.pipeline.edit_rows(_Send(partial(self._report_differences, step), step, sendings, rows))

    # afterwards

    def poll(self) -> None:
        """Take over what has arrived, never waits."""
        for ranks, channel in list(self._channels.items()):
            channel.poll()
            for why, count in channel.left_out().items():
                if (ranks, why) not in self._said_left_out:
                    self._said_left_out.add((ranks, why))
                    _log.warning("replicas on ranks %s: %d checks were not made, nor are others like them: %s", in_short(ranks), count, why)
            if channel.failed:
                self._channels.pop(ranks).close()
                self._warn_once(ranks, channel.failed)

    def hurry(self) -> None:
        for channel in self._channels.values():
            channel.hurry()

    def finish(self, seconds: float) -> None:
        """Wait for what is under way, at most so long; for the end of the run."""
        deadline = time.monotonic() + seconds
        self.hurry()
        self.poll()
        while any(not channel.idle for channel in self._channels.values()) and time.monotonic() < deadline:
            time.sleep(0.001)
            self.poll()
        self.poll()  # what arrived between the last look and the end of the last check
        for ranks, channel in self._channels.items():
            self._warn_missed(ranks, channel, f"not all of them have answered in {seconds:.1f} s")

    def detach(self) -> None:
        """Let go of what is compared; connections of ranks stay for the next `attach`."""
        self._sources, self._groups, self._takes = [], {}, {}
        self._pending.clear()
        self._taken.clear()

    def close(self, *why: str) -> None:
        """Leave the groups; `why` is for the other ranks, nothing: the probe is closed."""
        self._sources = []
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close(*why)

    @staticmethod
    def _warn_missed(ranks: tuple[int, ...], channel: Channel, why: str) -> None:
        if channel.under_way:
            _log.warning("replicas on ranks %s: %d checks have no result, %s", in_short(ranks), channel.under_way, why)

    def _warn_once(self, ranks: tuple[int, ...], why: str) -> None:
        if ranks not in self._said:
            self._said.add(ranks)
            _log.warning("replicas on ranks %s are not compared any more, training goes on: %s", in_short(ranks), why)

    def _report_differences(self, step: int, channel: Channel, group: _Group, taken: Mask, differences: Sequence[Difference]) -> None:
        """The result of one check of one group."""
        rule, batch = self._rule, len(group.takes)
        if channel.leader and self._batches is not None and group.batch >= 0 and taken[batch]:
            same = all(difference.place != batch for difference in differences)
            self._raise_alerts(self._batches.compare_ranks(step, channel.ranks, same))
        differences = [difference for difference in differences if difference.place != batch]
        if not channel.leader or not (differences or rule.running):
            return
        mismatches = [_mismatch(channel.ranks, group.takes[d.place], group.labels[d.place], d) for d in differences]
        mismatches.sort(key=lambda m: m.kind != GRAD)  # what came first is said first
        compared = {
            (take.kind, take.piece.vpp_stage, take.piece.name, label)
            for take, label, is_taken in zip(group.takes, group.labels, taken.tolist())
            if is_taken
        }
        self._raise_alerts(rule.report(step, channel.ranks[0], mismatches, compared=compared))

    def _raise_alerts(self, alerts: Sequence[Alert]) -> None:
        probe = self._probe
        if not probe.closed:
            probe.pipeline.alert(alerts)
            return
        for alert in alerts:
            probe.session.raise_alert(alert)


class _Send(RowsEdit):
    """Edit of a step's rows that changes nothing: it sends the digests when they are on the host."""

    def __init__(self, found: Any, step: int, sendings: list[tuple[Channel, _Group]], places: Words) -> None:
        self._found = found
        self._step = step
        self._sendings = sendings
        self._places = places

    def start(self, rows: _rows.Rows) -> None:
        ints = _rows.as_int64(rows)
        has_row = self._places >= 0
        rows_taken = np.where(has_row, self._places, 0)
        taken = (
            (has_row & (ints[rows_taken, _rows.FLAGS] & _rows.HAS_DIGEST != 0)) | (self._places == _NONE)
            if len(ints)
            else self._places == _NONE
        )
        digests = np.where(has_row, ints[rows_taken, _rows.DIGEST], 0) if len(ints) else np.zeros(len(rows_taken), np.int64)
        for channel, group in self._sendings:
            places = np.array(group.places(), np.intp)
            known = taken[places]
            channel.submit(self._step, digests[places], known, partial(self._found, channel, group, known))

    def apply(self, rows: _rows.Rows) -> None:
        """Nothing is left to do."""


def _list_comparisons(settings: ReplicaCheckSettings, piece: Piece, replicas: Replicas) -> Iterator[tuple[str, bool, bool]]:
    """Kind, part and moment (before the update) of what a group can compare of a piece."""
    if settings.parameters:
        yield PARAM, replicas.part, replicas.late
    # of a sharded gradient the ranks that share it have different parts, and those of another pipeline stage another division
    if settings.gradients and (replicas.part or not piece.sharded or replicas.label == "tp"):
        yield GRAD, True, True


def _mismatch(ranks: Sequence[int], take: _Take, label: str, difference: Difference) -> Mismatch:
    piece = take.piece
    facts: dict[str, Any] = dict(_FACTS[take.kind])
    minority: list[int] = []
    if difference.digests is not None and difference.known is not None:
        holders: dict[str, list[int]] = {}
        for rank, digest, known in zip(ranks, difference.digests.view(np.uint64).tolist(), difference.known.tolist()):
            if known:
                holders.setdefault(f"{digest:016x}" if digest else "none", []).append(rank)
        order = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
        most = len(order) < 2 or len(order[0][1]) > len(order[1][1])
        minority = sorted(rank for _, held in order[most:] for rank in held)
        facts["digests"] = {digest: in_short(held) for digest, held in order[:SHOWN]}
        if len(order) > SHOWN:
            facts["values"] = len(order)
    return Mismatch(piece.name, take.kind, label, list(ranks), minority, piece.vpp_stage, take.place, facts)
