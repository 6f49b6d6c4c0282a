"""Samples of parameters and what belongs to them (gradients, moments), whole or in shards.

A parameter may live on one rank in part: a flat range [lo, hi) of its elements. `Pieces` takes the statistics of the part and, when
an exchange is given for it, has the rows of all parts merged, so that what is reported is always the whole parameter.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.records import Sample, TensorDescription, TensorRef
from msprobe_engine.core.statistics import histograms
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.probe.pending_steps import ChangedRows, RowsEdit

if TYPE_CHECKING:
    from msprobe_integrations.common.monitor.parts import ProbeBase


class Exchange(Protocol):
    """Merges rows of shards over the ranks that hold them."""

    def merge(self, step: int, names: Sequence[str], places: Sequence[int], extras: Sequence[dict[str, Any]]) -> RowsEdit:
        """What puts the merged rows in place of this rank's: an edit of the step's rows.

        Args:
            names: the same on all ranks that have the row.
            places: rows of this rank.
            extras: facts of their samples.
        """
        ...

    def hurry(self) -> None:
        """The end of the run waits: ranks that have not come yet are waited for a little only."""
        ...

    def close(self, why: str = ...) -> None:
        """Leave the others.

        Args:
            why: what they say of this rank.
        """
        ...


LOCAL, ACCUMULATED, REDUCED, UNSCALED, CLIPPED = "local", "accumulated", "reduced", "unscaled", "clipped"
HISTOGRAM_KINDS = {"update": "linear", "ratio": "linear"}
"""Histograms of other families are of exponents: ``log2``."""
_new = tuple.__new__


@dataclass(frozen=True, eq=False)
class Piece:
    """What this rank holds of one parameter.

    Attributes:
        name: parameter name without wrappers, ``decoder.layers.0.mlp.linear_fc1.weight``.
        parameter: the model's parameter (all of it, or a DTensor).
        vpp_stage: virtual pipeline chunk.
        lo, hi: flat range of the elements that are this rank's to reduce; (0, numel) when it is not sharded.
        facts: JSON-ready, goes into every sample's `extra`. With ``of`` (elements of the whole) other ranks hold the rest.
        exchange: merges the rows of all parts; None when the parameter is whole here, or cannot be merged.
        whole: shape of the whole parameter where `parameter` does not have it (ZeRO 3 empties it between its uses).
        positions: False when the part is no flat range of the whole, as of a second dimension: its digest would mean nothing, `lo`
            and `hi` are 0 and the number of its elements.
        sharded: True when other ranks hold the rest.
        plain: facts of a sample of the whole tensor.
    """

    name: str
    parameter: Any
    vpp_stage: int
    lo: int
    hi: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    exchange: Exchange | None = None
    whole: tuple[int, ...] | None = None
    positions: bool = True
    sharded: bool = field(init=False)
    plain: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharded", "of" in self.facts)
        object.__setattr__(self, "plain", {k: v for k, v in self.facts.items() if k != "of"})

    def add_fact(self, key: str, value: Any) -> None:
        """One more fact, for all samples from now on."""
        object.__setattr__(self, "facts", {**self.facts, key: value})
        object.__setattr__(self, "plain", {**self.plain, key: value})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return tuple(self.parameter.shape) if self.whole is None else self.whole

    def part(self, whole: Any) -> Any:
        """This rank's range of a tensor of the parameter's shape, as a view."""
        return whole.detach().view(-1)[self.lo : self.hi] if self.sharded else whole.detach()

    def part_facts(self) -> dict[str, Any]:
        """Facts of a sample of this rank's part."""
        extra = dict(self.facts)
        if self.positions:
            extra["shard"] = [self.lo, self.hi]
        extra["scope"] = "shard" if self.exchange is None else "whole"
        return extra


Row = tuple[TensorRef, tuple[int, str]]
"""Statistics row, and first row and kind of a histogram (-1: there is none)."""
Get = Callable[[Piece], Any]


class Pieces:
    """Takes samples of pieces and collects, per exchange, what is to be merged at the end of the step.

    Attributes:
        drawn: families that get a histogram of each tensor, and its kind.
    """

    def __init__(self, probe: ProbeBase) -> None:
        self._probe = probe
        self._shapes: dict[tuple[Piece, TensorDescription], TensorDescription] = {}
        self._merges: dict[Exchange, tuple[list[str], list[int], list[dict[str, Any]]]] = {}
        self._without_digest: list[int] = []
        self._values: list[int] = []
        self._unless: tuple[int, list[int]] | None = None
        families = probe.monitor.histograms if probe.monitor is not None else ()
        self.drawn = {family: HISTOGRAM_KINDS.get(family, "log2") for family in families}

    def take_all(self, family: str, pieces: Sequence[Piece], get: Get, *, phase: str = "") -> None:
        """Sample what `get` gives for each piece: this rank's part of a sharded one, else the whole tensor. None: no sample."""
        backend, samples = self._probe.backend, self._probe.pipeline.samples
        reduce, append = backend.reduce, samples.append
        histogram = family in self.drawn
        with backend.batched():
            for piece in pieces:
                tensor = get(piece)
                if tensor is None:
                    continue
                if piece.sharded or histogram:
                    self.sample_tensor(family, piece, tensor, phase=phase, part=True)
                else:
                    append(_new(Sample, (family, piece.name, reduce(tensor), phase, -1, piece.vpp_stage, piece.plain)))

    def sample_tensor(self, family: str, piece: Piece, tensor: Any, *, phase: str = "", micro_step: int = -1, part: bool = False) -> None:
        """Sample one tensor. No wait.

        Args:
            tensor: the whole tensor, or with `part` this rank's range of it; None when there is none (a rank that holds nothing
                of a merged parameter still takes part with an empty row).
            part: the rows of all ranks are to be merged.
        """
        part = part and piece.sharded
        if tensor is None:
            if not part or piece.exchange is None:
                return
            tensor = piece.parameter.detach().view(-1)[:0]
        ref, histogram = self.reduce(family, piece, tensor, part)
        self.add(family, piece, ref, phase=phase, micro_step=micro_step, part=part, histogram=histogram)

    def reduce(self, family: str, piece: Piece, tensor: Any, part: bool) -> Row:
        """The row of a tensor of `piece`, and where the family is drawn its histogram; both for `add`."""
        backend = self._probe.backend
        if part and piece.sharded and piece.positions:
            ref = backend.reduce_part(tensor.detach(), piece.lo)
        else:
            ref = backend.reduce(tensor)
        kind = self.drawn.get(family)
        return ref, (backend.histogram(tensor.detach(), kind), kind) if kind is not None else (-1, "")

    def add(
        self,
        family: str,
        piece: Piece,
        ref: TensorRef,
        *,
        phase: str = "",
        micro_step: int = -1,
        part: bool = False,
        extra: Mapping[str, Any] | None = None,
        histogram: tuple[int, str] = (-1, ""),
        state: str = "",
    ) -> None:
        """Note a row of `piece` as a sample.

        Args:
            ref: the row; of this rank's part with `part`.
            extra: further facts.
            histogram: first row of its histogram (-1: none) and the kind.
            state: tells samples of one family, phase and piece apart.
        """
        first, kind = histogram
        part = part and piece.sharded
        if not part and extra is None and first < 0 and "placements" not in piece.plain:
            sample = _new(Sample, (family, piece.name, ref, phase, micro_step, piece.vpp_stage, piece.plain))
            self._probe.pipeline.samples.append(sample)
            return
        merge = part and piece.exchange is not None
        facts: dict[str, Any] = piece.part_facts() if part else dict(piece.plain)
        if extra:
            facts.update(extra)
        if first >= 0:
            facts["histogram"] = histograms.reference(first, kind)
        if part and not piece.positions and ref.row >= 0:
            self._without_digest.append(ref.row)
        if merge and ref.description.shape:
            ref = TensorRef(ref.row, self._description(piece, ref.description))
        elif part and not merge and piece.lo == piece.hi:
            return  # nothing of it is here, and nobody adds the rest
        elif not part and "placements" in facts and ref.description.shape not in ((), piece.shape):
            facts["scope"] = "shard"  # the unsharded gradient of FSDP2 is one of tensor-parallel shards still
        self._probe.pipeline.samples.append(Sample(family, piece.name, ref, phase, micro_step, piece.vpp_stage, facts))
        if not merge or ref.row < 0:
            return
        assert piece.exchange is not None
        names, places, extras = self._merges.setdefault(piece.exchange, ([], [], []))
        name = f"{family} {state} {phase} {piece.vpp_stage} {piece.name}"
        names.append(name)
        places.append(ref.row)
        extras.append(facts)
        if first >= 0:
            for i in range(histograms.row_count(kind)):
                names.append(f"{name} bins {i}")
                places.append(first + i)

    def only_unless(self, skipped: TensorRef | float | None, families: Sequence[str]) -> None:
        """Rows of these families in this step are taken back where the number `skipped`, which is on its way, turns out not to be 0."""
        if isinstance(skipped, TensorRef) and skipped.row >= 0:
            self._unless = skipped.row, [s.ref.row for s in self._probe.pipeline.samples if s.family in families and s.ref.row >= 0]

    def value(self, row: int) -> None:
        """What this row says in the end is its mean, as the row of one number."""
        self._values.append(row)

    def flush(self, step: int) -> None:
        """Hand the step's merges to the pipeline; to be called just before the step ends."""
        merges, self._merges = self._merges, {}
        edit = self._probe.pipeline.edit_rows
        for exchange, (names, places, extras) in merges.items():
            edit(exchange.merge(step, names, places, extras))
        without, self._without_digest = self._without_digest, []
        if without and self._probe.backend.want_digest:
            edit(ChangedRows(functools.partial(_drop_digests, without)))
        values, self._values = self._values, []
        if values:
            edit(ChangedRows(functools.partial(_single_values, values)))
        unless, self._unless = self._unless, None
        if unless is not None:
            edit(ChangedRows(functools.partial(_take_back, *unless)))

    def exchange(self, kept: Any = None) -> Any:
        """Put aside what is to be merged, and go on with nothing, or with what an earlier call gave."""
        old = self._merges, self._without_digest, self._values, self._unless
        self._merges, self._without_digest, self._values, self._unless = kept or ({}, [], [], None)
        return old

    def forget(self) -> None:
        """The step is taken back: nothing of it is merged."""
        self._merges, self._without_digest, self._values, self._unless = {}, [], [], None

    def _description(self, piece: Piece, seen: TensorDescription) -> TensorDescription:
        key = (piece, seen)
        if key not in self._shapes:
            self._shapes[key] = seen._replace(shape=piece.shape)
        return self._shapes[key]


def _drop_digests(places: Sequence[int], rows: _rows.Rows) -> None:
    ints = _rows.as_int64(rows)
    ints[places, _rows.FLAGS] &= ~_rows.HAS_DIGEST
    ints[places, _rows.DIGEST] = 0


def _take_back(flag: int, places: Sequence[int], rows: _rows.Rows) -> None:
    """Rows become those of no elements, if the row `flag` is of another number than 0."""
    if _rows.as_int64(rows)[flag, _rows.ZEROS] == 0:
        none = _rows.empty(len(places))
        _rows.as_int64(none)[:, _rows.FLAGS] = _rows.WRITTEN
        rows[places] = none


def _single_values(places: Sequence[int], rows: _rows.Rows) -> None:
    """Rows become those of one element each, their mean."""
    chosen = rows[places]
    ints = _rows.as_int64(chosen)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = chosen[:, _rows.SUM] / ints[:, _rows.COUNT]
    means[_rows.nonfinite(chosen) > 0] = math.nan
    has_values = ints[:, _rows.COUNT] > 0
    set_values(rows, np.asarray(places)[has_values], means[has_values])


def set_values(rows: _rows.Rows, places: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
    """Make rows those of one number each.

    Args:
        rows: [n, 16].
        places: which, [k].
        values: [k], NaN and Inf too.
    """
    made = _rows.empty(len(values))
    ints = _rows.as_int64(made)
    finite = np.isfinite(values)
    ints[:, _rows.COUNT] = 1
    ints[:, _rows.FLAGS] = _rows.WRITTEN
    ints[:, _rows.NANS] = np.isnan(values)
    ints[:, _rows.POS_INF] = values == math.inf
    ints[:, _rows.NEG_INF] = values == -math.inf
    ints[:, _rows.ZEROS] = values == 0
    held = np.where(finite, values, 0.0)
    made[:, _rows.SUM], made[:, _rows.SUMSQ] = held, held * held
    made[:, _rows.MIN] = np.where(finite, values, math.inf)
    made[:, _rows.MAX] = np.where(finite, values, -math.inf)
    rows[places] = made


def layer_numbers(modules: Sequence[tuple[str, Any]]) -> dict[str, int]:
    """Module path -> global layer index (from 0), for modules that know it: local numbering restarts in every pipeline stage."""
    return {name: number - 1 for name, m in modules if isinstance(number := getattr(m, "layer_number", None), int)}


def layer_of(name: str, numbers: Mapping[str, int]) -> int | None:
    """Global layer index of a parameter, from its nearest enclosing module that knows it; None outside of layers."""
    path = name
    found = None
    while "." in path:
        path = path.rpartition(".")[0]
        if path in numbers:
            found = numbers[path]
    return found
