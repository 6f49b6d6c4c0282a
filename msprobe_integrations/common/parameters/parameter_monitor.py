"""The parameter side of one probe: a watch per optimizer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from msprobe_engine.core.log import get_logger
from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.probe.pending_steps import ChangedRows
from msprobe_integrations.common.parameters.gradients import REDUCED, UNSCALED, set_values
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler, ParameterSource
from msprobe_integrations.common.ranks.exchanges import Exchanges
from msprobe_integrations.common.ranks.replica_channel import Ranks
from msprobe_integrations.common.ranks.replicas import PART as REPLICAS
from msprobe_integrations.common.ranks.replicas import ReplicaCheck

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.parts import ProbeBase


Find = Callable[[Any, Sequence[Any], Any], "ParameterSource | None"]
_PART = "parameter monitor"
_NEEDED = ("attach", _PART)
"""Parts without which this rank has nothing to merge or to compare."""
_log = get_logger()
_FAULT = "a fault has switched its probe off"
IDLE = 10
"""Monitored steps without an update after which it is said."""
_GONE = (
    "monitor: an optimizer that is watched has made no update for %d monitored steps, so there are no rows of gradients and parameters. "
    "If another one has taken its place, attach that one; a step of the probe ends after the update"
)


class Attached(NamedTuple):
    """What `Probe.attach` was given."""

    models: list[Any]
    optimizer: Any
    on_update: Callable[[bool], None] | None
    find: Find | None


class ParameterMonitor:
    """Makes, drives and closes the watches of a probe.

    Args:
        find: what finds the `ParameterSource` of an optimizer, unless `attach` is given another one.
        exchanges: merge rows of shards.

    Attributes:
        watches: one per optimizer; none where nothing is monitored.
        optimizers: as they were passed.
        exchanges: merge rows of shards.
        replicas: compares what has to be equal on several ranks.
        stale: settings have changed since the watches were made.
        owned: names of the parameters that have been in an optimizer.
        counted: parameters of the optimizer whose updates are counted; a new one of the same parameters goes on, or has lost its state.
    """

    def __init__(self, probe: ProbeBase, find: Find, exchanges: Exchanges, ranks: Ranks) -> None:
        self.watches: list[ParameterSampler] = []
        self.optimizers: list[Any] = []
        self.exchanges = exchanges
        self.replicas = ReplicaCheck(probe, ranks)
        self.stale = False
        self.owned: set[str] = set()
        self.counted: Sequence[Callable[[], Any]] = []
        self._left = False
        self._probe = probe
        self._find = find
        self.ranks = ranks
        self._attached: Attached | None = None

    def attach(self, attached: Attached | None = None) -> None:
        """Watch these, or by new settings what was watched before."""
        attached = self._attached = attached or self._attached
        self.stale = False
        self.remove()
        monitor = self._probe.monitor
        if attached is None or monitor is None:
            return
        optimizer = attached.optimizer
        self.optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
        self.exchanges.apply_settings(monitor)
        for each in self.optimizers or [None]:
            source = (attached.find or self._find)(self._probe, attached.models, each)
            if source is not None:
                watch = ParameterSampler(self._probe, source)
                watch.on_update = attached.on_update
                watch.replicas, watch.owned = self.replicas, self.owned
                self.watches.append(watch)
        if self._probe.faults.is_enabled(REPLICAS) and not self._left:
            with self._probe.guard(REPLICAS):
                self.replicas.attach([watch.source for watch in self.watches])

    @property
    def without_optimizer(self) -> bool:
        """Was a model attached, and no optimizer?"""
        return not self.watches and self._attached is not None and self._attached.optimizer is None

    def begin_step(self, due: bool) -> None:
        """A step begins; `due`: it is monitored."""
        with self._probe.guard(REPLICAS):
            self.replicas.begin_step(self._probe.step)
        for watch in self.watches:
            with self._probe.guard(_PART):
                watch.begin_step(due)

    def end_step(self, scalars: Mapping[str, Any], again: bool) -> None:
        """A monitored step is over.

        Args:
            scalars: numbers that the loop gives.
            again: the next step is monitored too.
        """
        if self.watches:
            with self._probe.guard(_PART):
                for watch in self.watches:
                    watch.end_step(again)
                    if watch.idle >= 0:
                        watch.idle += 1
                        if watch.idle == IDLE:
                            _log.warning(_GONE, IDLE)
                note_norms(self._probe, scalars)

    def leave_where_off(self) -> None:
        """Where a fault has switched off what other ranks wait for, they hear that this rank takes part no longer."""
        disabled = self._probe.faults.disabled
        if not disabled or self._left:
            return
        if any(part in disabled for part in _NEEDED):
            self._left = True
            self.exchanges.close(_FAULT)
            self.replicas.close(_FAULT)
        elif REPLICAS in disabled:
            self.replicas.close(_FAULT)

    def remove(self) -> None:
        watches, self.watches, self.optimizers = self.watches, [], []
        for watch in watches:
            with self._probe.guard("closing"):
                watch.close()

    def detach(self) -> None:
        """Let go of models and optimizers."""
        self.remove()
        self.owned.clear()
        self._attached = None
        self.replicas.detach()

    def hurry(self) -> None:
        """The end of the run waits: ranks that have not come yet are waited for a little only."""
        self.exchanges.hurry()
        self.replicas.hurry()

    def finish(self, seconds: float) -> None:
        """Wait for what is compared, at most so long."""
        with self._probe.guard(REPLICAS):
            self.replicas.finish(seconds)

    def close(self) -> None:
        """Take the groups of ranks apart, at the very end: last frames may have waited for them."""
        self.replicas.close()
        self.exchanges.close()


def note_norms(probe: ProbeBase, given: Mapping[str, Any]) -> None:
    """Note ``update_norm``, ``param_norm`` and ``grad_norm`` of the step that ends, over the parameters of this rank: whole ones where
    the rows of shards are merged, and none where they should have been and could not be. Numbers that are there already stay, and those
    that are `given` come. To be called behind all other edits of the step.

    ``param_norm`` is of parameters after the update, ``grad_norm`` of gradients before clipping and without the loss scale.
    """
    pipeline = probe.pipeline
    rows_of: dict[str, list[int]] = {}
    for sample in pipeline.samples:
        if sample.family in _FAMILIES:
            rows_of.setdefault(sample.family + sample.phase, []).append(sample.ref.row)
    if given.get("loss_scale") is not None:
        pipeline.scalar("loss_scale", given["loss_scale"])
    gradients = rows_of.get("grad_reduced" + UNSCALED)
    scale = None if gradients else pipeline.read_scalar("loss_scale")
    for name, places in (
        ("update_norm", rows_of.get("update")),
        ("param_norm", rows_of.get("param_updated") or rows_of.get("param_origin")),
        ("grad_norm", gradients or rows_of.get("grad_reduced" + REDUCED)),
    ):
        if places and name not in given and pipeline.read_scalar(name) is None:
            row = probe.backend.blank_row()
            divisor = scale if name == "grad_norm" else None
            pipeline.edit_rows(ChangedRows(functools.partial(_norm, row, [p for p in places if p >= 0], divisor)))
            pipeline.scalar(name, TensorRef(row, probe.number))


_FAMILIES = frozenset(("update", "param_updated", "param_origin", "grad_reduced"))


def _norm(row: int, places: Sequence[int], divisor: TensorRef | float | None, rows: _rows.Rows) -> None:
    chosen = rows[places]
    norm = math.sqrt(float(np.sum(chosen[:, _rows.SUMSQ])))
    ints = _rows.as_int64(chosen)
    if ints[:, _rows.NANS].any():
        norm = math.nan
    elif ints[:, _rows.POS_INF].any() or ints[:, _rows.NEG_INF].any():
        norm = math.inf
    elif (ints[:, _rows.FLAGS] & _rows.WRITTEN == 0).any():
        return  # a part is not known, so there is no norm of the whole
    if isinstance(divisor, TensorRef):
        divisor = _rows.read_row(rows[divisor.row]).mean if divisor.row >= 0 else None
    set_values(rows, np.array([row]), np.array([norm / divisor if divisor else norm]))
