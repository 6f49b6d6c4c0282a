"""Which batch a step had: a digest of the integers that its models were called with; and how many steps ago they were given the very same
tensors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from msprobe_engine.core import redaction
from msprobe_engine.core.guard import Guard
from msprobe_engine.core.records import BATCH_AGE, BATCH_DIGEST, TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.probe.pending_steps import ChangedRows
from msprobe_integrations.common.parameters.gradients import set_values
from msprobe_integrations.torch.monitor.probe import TorchProbe

_PART = "batches"
_ELEMENTS = 1 << 13
"""Of a larger tensor so many elements are looked at, spread over it."""
_TENSORS = 16
_DEPTH = 3
_PASSES = 64
"""Passes of a step that are looked at."""
_KEPT = 100_000
"""Steps that are remembered."""


class _Last(NamedTuple):
    """Of a batch: the last step that had it, and the one before."""

    step: int
    before: int | None


_BITS = 40
"""Of the digest of a step, a number between 0 and 1: curves and rules have no trouble with its size, and float64 holds it."""


class Batches:
    """Takes the digest of what the models are called with; only digests are kept."""

    def __init__(self) -> None:
        self._steps = 0
        self._places: list[int] = []
        self._integers: list[int] = []
        self._passes = 0
        self._last: dict[bytes, _Last] = {}

    def begin_pass(self, probe: TorchProbe, args: Sequence[Any], kwargs: Mapping[str, Any], *, ages: bool) -> None:
        """A training pass begins. Nothing is read. `ages`: were the same tensors given before, or to other ranks?"""
        self._passes += 1
        if self._passes > _PASSES or not probe.faults.is_enabled(_PART):
            return
        backend = probe.backend
        had = backend.want_digest
        with probe.guard(_PART), probe.shield():
            try:
                backend.want_digest = True
                tensors = list(islice((t for t in _tensors((args, kwargs), _DEPTH) if ages or _holds_integers(t)), _TENSORS))
                rows = [backend.reduce(_thin(tensor)).row for tensor in tensors]
            finally:
                backend.want_digest = had
            self._integers += [row for row, tensor in zip(rows, tensors) if _holds_integers(tensor)]
            if not ages:
                return
            if rows and self._passes == 1:  # the largest one: a mask or positions may be the same on all ranks
                probe.parameters.replicas.take_batch(max(zip(rows, tensors), key=lambda pair: pair[1].numel())[0])
            self._places += rows

    def end_step(self, probe: TorchProbe) -> None:
        """The step is over: numbers `BATCH_DIGEST` and `BATCH_AGE` of it, when the digests are on the host."""
        places, integers = self._places, self._integers
        self._places, self._integers, self._passes = [], [], 0
        if not probe.faults.is_enabled(_PART):
            return
        if integers and min(integers) >= 0 and redaction.active() is None:  # there are few batches of a few tokens: they could be guessed
            with probe.guard(_PART):
                row = probe.backend.blank_row()
                probe.pipeline.edit_rows(ChangedRows(functools.partial(_write_digest, probe.guard(_PART), integers, row)))
                probe.pipeline.scalar(BATCH_DIGEST, TensorRef(row, probe.number))
        if places and min(places) >= 0:
            with probe.guard(_PART):
                self._steps += 1
                row = probe.backend.blank_row()
                probe.pipeline.edit_rows(ChangedRows(functools.partial(self._compare, probe.guard(_PART), self._steps, places, row)))
                probe.pipeline.scalar(BATCH_AGE, TensorRef(row, probe.number))

    def _compare(self, guard: Guard, step: int, places: list[int], row: int, rows: _rows.Rows) -> None:
        with guard:
            digest = _digest_of_rows(rows, places)
            if not digest:
                return
            last = self._last.pop(digest, None)
            if last is None or last.step != step:  # a step may be built twice
                last = _Last(step, None if last is None else last.step)
            self._last[digest] = last
            if len(self._last) > _KEPT:
                del self._last[next(iter(self._last))]
            if last.before is not None:
                set_values(rows, np.array([row]), np.array([float(step - last.before)]))


def _digest_of_rows(rows: _rows.Rows, places: list[int]) -> bytes:
    """Counts and digests; nothing where one has no digest."""
    ints = _rows.as_int64(rows)[places]
    return ints[:, [_rows.COUNT, _rows.DIGEST]].tobytes() if (ints[:, _rows.FLAGS] & _rows.HAS_DIGEST).all() else b""


def _write_digest(guard: Guard, places: list[int], row: int, rows: _rows.Rows) -> None:
    with guard:
        if digest := _digest_of_rows(rows, places):
            number = int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "little") >> (64 - _BITS)
            set_values(rows, np.array([row]), np.array([number / 2**_BITS]))


def _holds_integers(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Plain tensors in containers of plain types."""
    if type(value) is torch.Tensor:
        if value.numel():
            yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in islice(value, _TENSORS):
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for item in islice(value.values(), _TENSORS):
            yield from _tensors(item, depth - 1)


def _thin(tensor: torch.Tensor) -> torch.Tensor:
    """A view of some of its elements: every so many along the last dimensions."""
    for dim in reversed(range(tensor.dim())):
        if (step := tensor.numel() // _ELEMENTS) > 1:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, min(step, tensor.shape[dim])),)]
    return tensor
