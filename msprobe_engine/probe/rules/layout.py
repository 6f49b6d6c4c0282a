"""Which row of a frame is which tensor. From one step to the next this hardly ever changes, so it is worked out once.

A frame refers to its statistics rows from inside nested entries. Walking them costs microseconds per tensor; comparing them
with those of the previous frame is one call into C. Rules and sinks therefore look at columns through a `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.records import Entry, Frame, Sample, leaves
from msprobe_engine.core.statistics.rows import COUNT, NANS, NEG_INF, POS_INF, SUMSQ, ZEROS, as_int64
from msprobe_engine.probe.rules.tensor_kinds import KINDS, entry_kind, sample_kind

KIND_INDEX = {kind: i for i, kind in enumerate(KINDS)}
_SECTION = {"input": "input_args", "kwargs": "input_kwargs"}


@dataclass(frozen=True)
class Layout:
    """The tensors of a frame, flat, entries first: n of them.

    Attributes:
        keys: what tells a tensor from all others of the frame, and is the same in the next frame.
        rows: row in `Frame.rows`, [n] intp.
        kinds: index in `KINDS`, [n] int8.
        order: index of the entry, or number of entries plus index of the sample, [n] intp.
        plain: True when `rows` is 0..n-1, so that no gathering is needed.
        number: differs between layouts; equal numbers mean the same layout.
    """

    names: list[str]
    keys: list[str]
    rows: npt.NDArray[np.intp]
    kinds: npt.NDArray[np.int8]
    order: npt.NDArray[np.intp]
    plain: bool
    number: int

    def order_rows(self, frame: Frame) -> npt.NDArray[np.float64]:
        """The rows of the frame in the order of the layout, [n, 16]."""
        return frame.rows if self.plain else frame.rows[self.rows]

    def source(self, frame: Frame, i: int) -> Entry | Sample:
        """The entry or sample that tensor `i` belongs to."""
        order = int(self.order[i])
        return frame.entries[order] if order < len(frame.entries) else frame.samples[order - len(frame.entries)]

    def after_backward(self, frame: Frame, i: int) -> bool:
        """Does tensor `i` belong to a call that follows the last backward call of the frame?"""
        calls = len(frame.entries)
        backward = self.order[(self.kinds == KIND_INDEX["activation_grad"]) & (self.order < calls)]
        return bool(len(backward) and backward.max() < self.order[i] < calls)

    def mask(self, kinds: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """True for tensors of these kinds, [n]."""
        return np.isin(self.kinds, [KIND_INDEX[kind] for kind in kinds])


class Table:
    """Columns of one frame in the order of its layout, each worked out once however many rules ask for it. [n] each."""

    def __init__(self, frame: Frame, layout: Layout) -> None:
        self.frame = frame
        self.layout = layout

    @cached_property
    def rows(self) -> npt.NDArray[np.float64]:
        """The statistics rows, [n, 16]."""
        return self.layout.order_rows(self.frame)

    @cached_property
    def ints(self) -> npt.NDArray[np.int64]:
        """Their integer words, [n, 16]."""
        return as_int64(self.rows)

    @cached_property
    def count(self) -> npt.NDArray[np.int64]:
        """Number of elements."""
        return np.ascontiguousarray(self.ints[:, COUNT])

    @cached_property
    def finite(self) -> npt.NDArray[np.bool_]:
        """True where there are elements, all finite, with a finite sum of squares."""
        fine: npt.NDArray[np.bool_] = (self.count > 0) & (self.squares < np.inf)
        bad = self.ints[:, NANS] + self.ints[:, POS_INF] + self.ints[:, NEG_INF]
        return fine & (bad == 0) if bad.any() else fine

    @cached_property
    def squares(self) -> npt.NDArray[np.float64]:
        """Sum of squares of the finite elements."""
        return np.ascontiguousarray(self.rows[:, SUMSQ])

    @cached_property
    def zeros(self) -> npt.NDArray[np.int64]:
        """Number of exact zeros."""
        return np.ascontiguousarray(self.ints[:, ZEROS])


@dataclass
class _Memory:
    """The last frame of one size: what it held, and its layout."""

    entries: list[Entry]
    samples: list[Sample]
    leaves: list[list[tuple[str, int, int]]]
    layout: Layout


class LayoutCache:
    """Gives the layout of a frame, and the same object again while frames look alike. Not safe for several threads.

    Frames of different sizes take turns (a step that is not due holds no samples), so the last one of each size is remembered.
    """

    SIZES = 4

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._memory: _Memory | None = None
        self._known: dict[tuple[int, int], _Memory] = {}
        self._table: Table | None = None
        self._number = 0

    def table(self, frame: Frame) -> Table:
        """The columns of `frame`, shared by all rules that ask."""
        if self._table is None or self._table.frame is not frame:
            self._table = Table(frame, self.of(frame))
        return self._table

    def of(self, frame: Frame) -> Layout:
        """The layout of `frame`; the same object as for the last frame of this size when nothing moved."""
        if frame is self._frame and self._memory is not None:
            return self._memory.layout
        size = (len(frame.entries), len(frame.samples))
        memory = self._known.get(size)
        if memory is None or frame.samples != memory.samples or frame.entries != memory.entries:
            leaves = self._walk(frame)
            if memory is None or leaves != memory.leaves or not _alike(frame.samples, memory.samples):
                memory = _Memory([], [], leaves, self._renew_layout(frame, leaves))
        memory.entries, memory.samples = frame.entries, frame.samples
        # The number of rows may have changed although no tensor moved.
        if memory.layout.plain != _is_plain(memory.layout.rows, frame):
            memory.layout = self._renew_layout(frame, memory.leaves)
        self._frame, self._memory = frame, memory
        self._known.pop(size, None)
        self._known[size] = memory
        if len(self._known) > self.SIZES:
            del self._known[next(iter(self._known))]
        return memory.layout

    def _renew_layout(self, frame: Frame, leaves: list[list[tuple[str, int, int]]]) -> Layout:
        self._number += 1
        return self._build(frame, leaves)

    def _walk(self, frame: Frame) -> list[list[tuple[str, int, int]]]:
        # An entry holds plain argument values too (an iteration number, for example); what is equal need not be walked again.
        old, known = (self._memory.entries, self._memory.leaves) if self._memory is not None else ([], [])
        shared = min(len(old), len(known))
        return [known[i] if i < shared and entry == old[i] else _tensors(entry, frame.rank) for i, entry in enumerate(frame.entries)]

    def _build(self, frame: Frame, leaves: list[list[tuple[str, int, int]]]) -> Layout:
        names: list[str] = []
        keys: list[str] = []
        rows: list[int] = []
        kinds: list[int] = []
        order: list[int] = []
        for i, tensors in enumerate(leaves):
            for name, row, kind in tensors:
                names.append(name)
                keys.append(name)
                rows.append(row)
                kinds.append(kind)
                order.append(i)
        for i, sample in enumerate(frame.samples, len(frame.entries)):
            if sample.ref.row < 0:
                continue
            names.append(sample.name)
            keys.append(f"{sample.family} {sample.vpp_stage} {sample.micro_step} {sample.phase} {sample.name}{_part(sample)}")
            rows.append(sample.ref.row)
            kinds.append(KIND_INDEX[sample_kind(sample)])
            order.append(i)
        index = np.array(rows, np.intp)
        return Layout(names, keys, index, np.array(kinds, np.int8), np.array(order, np.intp), _is_plain(index, frame), self._number)


def _tensors(entry: Entry, rank: int) -> list[tuple[str, int, int]]:
    out = []
    received = _is_received(entry, rank)
    for place, ref in leaves(entry):
        if ref.row >= 0:
            first = place.split(".", 1)[0]
            if received and first in _SECTION:
                continue
            kind = KIND_INDEX[entry_kind(entry, _SECTION.get(first, first))]
            out.append((f"{entry.name}.{place}", ref.row, kind))
    return out


def _is_received(entry: Entry, rank: int) -> bool:
    """Is it a broadcast of another rank? What lies in this rank's memory before it is no number of the training."""
    if not entry.name.startswith("Distributed.") or "broadcast" not in entry.name:
        return False
    return bool(entry.tags.get("root", rank) != rank)


def _alike(new: list[Sample], old: list[Sample]) -> bool:
    # Samples may differ in their extra facts; only what a layout holds counts.
    return len(new) == len(old) and all(sample is earlier or _identity(sample) == _identity(earlier) for sample, earlier in zip(new, old))


def _identity(sample: Sample) -> tuple[object, ...]:
    return (*sample[:2], sample.ref.row, *sample[3:6], sample_kind(sample), _part(sample))


def _part(sample: Sample) -> str:
    # Families that hold several tensors of one name say which one it is: a state of the optimizer, a number of a module.
    extra = sample.extra
    return f" {part}" if extra and (part := extra.get("state") or extra.get("column") or extra.get("tag")) else ""


def _is_plain(rows: npt.NDArray[np.intp], frame: Frame) -> bool:
    return len(rows) == len(frame.rows) and bool((rows == np.arange(len(rows))).all())
