"""Which row of a frame is which tensor. From one step to the next this hardly ever changes, so it is worked out once.

A frame refers to its statistics rows from inside nested entries. Walking them costs microseconds per tensor; comparing them
with those of the previous frame is one call into C. Rules and sinks therefore look at columns through a `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msprobe_engine.records import Entry, Frame, Sample, leaves
from msprobe_engine.rules.kinds import KINDS, entry_kind, sample_kind

KIND_INDEX = {kind: i for i, kind in enumerate(KINDS)}
_SECTION = {"input": "input_args", "kwargs": "input_kwargs"}


@dataclass(frozen=True)
class Layout:
    """The tensors of a frame, flat, entries first: n of them.

    Attributes:
        names: record names.
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

    def take(self, frame: Frame) -> npt.NDArray[np.float64]:
        """The rows of the frame in the order of the layout, [n, 16]."""
        return frame.rows if self.plain else frame.rows[self.rows]

    def source(self, frame: Frame, i: int) -> Entry | Sample:
        """The entry or sample that tensor `i` belongs to."""
        order = int(self.order[i])
        return frame.entries[order] if order < len(frame.entries) else frame.samples[order - len(frame.entries)]

    def mask(self, kinds: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """True for tensors of these kinds, [n]."""
        return np.isin(self.kinds, [KIND_INDEX[kind] for kind in kinds])


class LayoutCache:
    """Gives the layout of a frame, and the same object again while frames look alike. Not safe for several threads."""

    def __init__(self) -> None:
        self._frame: Frame | None = None
        self._entries: list[Entry] = []
        self._samples: list[Sample] = []
        self._leaves: list[list[tuple[str, int, int]]] = []
        self._layout: Layout | None = None
        self._number = 0

    def of(self, frame: Frame) -> Layout:
        """The layout of `frame`; the same object as for the last frame when nothing moved."""
        if frame is self._frame and self._layout is not None:
            return self._layout
        if self._layout is None or frame.samples != self._samples or frame.entries != self._entries:
            found = self._walk(frame)
            if self._layout is None or found != self._leaves or not _alike(frame.samples, self._samples):
                self._leaves = found
                self._number += 1
                self._layout = self._build(frame, found)
        self._frame, self._entries, self._samples = frame, frame.entries, frame.samples
        # The number of rows may have changed although no tensor moved.
        if self._layout.plain != _is_plain(self._layout.rows, frame):
            self._number += 1
            self._layout = self._build(frame, self._leaves)
        return self._layout

    def _walk(self, frame: Frame) -> list[list[tuple[str, int, int]]]:
        # An entry holds plain argument values too (an iteration number, for example); what is equal need not be walked again.
        old, known = self._entries, self._leaves
        shared = min(len(old), len(known))
        return [known[i] if i < shared and entry == old[i] else _tensors(entry) for i, entry in enumerate(frame.entries)]

    def _build(self, frame: Frame, found: list[list[tuple[str, int, int]]]) -> Layout:
        names: list[str] = []
        keys: list[str] = []
        rows: list[int] = []
        kinds: list[int] = []
        order: list[int] = []
        for i, tensors in enumerate(found):
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
            keys.append(f"{sample.family} {sample.vpp_stage} {sample.micro_step} {sample.phase} {sample.name}")
            rows.append(sample.ref.row)
            kinds.append(KIND_INDEX[sample_kind(sample)])
            order.append(i)
        index = np.array(rows, np.intp)
        return Layout(names, keys, index, np.array(kinds, np.int8), np.array(order, np.intp), _is_plain(index, frame), self._number)


def _tensors(entry: Entry) -> list[tuple[str, int, int]]:
    out = []
    for place, ref in leaves(entry):
        if ref.row >= 0:
            first = place.split(".", 1)[0]
            kind = KIND_INDEX[entry_kind(entry, _SECTION.get(first, first))]
            out.append((f"{entry.name}.{place}", ref.row, kind))
    return out


def _alike(new: list[Sample], old: list[Sample]) -> bool:
    # Samples may differ in their extra facts; only what a layout holds counts.
    return len(new) == len(old) and all(a is b or _identity(a) == _identity(b) for a, b in zip(new, old))


def _identity(sample: Sample) -> tuple[object, ...]:
    return (sample.name, sample.family, sample.ref.row, sample.phase, sample.micro_step, sample.vpp_stage, sample_kind(sample))


def _is_plain(rows: npt.NDArray[np.intp], frame: Frame) -> bool:
    return len(rows) == len(frame.rows) and bool((rows == np.arange(len(rows))).all())
