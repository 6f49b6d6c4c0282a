"""Which batch a step had: a digest of the integers that its models were called with; and how many steps ago they were given the very same
tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from msprobe_engine.core.guard import Guard
from msprobe_engine.core.records import BATCH_AGE, TensorRef
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.probe.pending_steps import ChangedRows
from msprobe_integrations.common.parameters.gradients import set_values
from msprobe_integrations.torch.monitor.probe import TorchProbe
from msprobe_integrations.torch.training.batch_digest import BatchDigest

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


class Batches:
    """Takes the digest of what the models are called with; only digests are kept."""

    def __init__(self) -> None:
        self._steps = 0
        self._places: list[int] = []
        self._digest = BatchDigest()
        self._passes = 0
        self._last: dict[bytes, _Last] = {}

    def begin_pass(self, probe: TorchProbe, args: Sequence[Any], kwargs: Mapping[str, Any], *, ages: bool) -> None:
        """A training pass begins. Nothing is read. `ages`: were the same tensors given before, or to other ranks?"""
        if not probe.faults.is_enabled(_PART):
            return
        self._passes += 1
        with probe.guard(_PART), probe.shield(), torch.no_grad():
            tensors = list(islice(_tensors((args, kwargs), _DEPTH), 2 * _TENSORS))
            self._digest.add(tensors)
            if not ages or self._passes > _PASSES:
                return
            backend = probe.backend
            had = backend.want_digest
            try:
                backend.want_digest = True
                rows = [backend.reduce(_thin(tensor)).row for tensor in tensors[:_TENSORS]]
            finally:
                backend.want_digest = had
            if rows and self._passes == 1:  # the largest one: a mask or positions may be the same on all ranks
                probe.parameters.replicas.take_batch(max(zip(rows, tensors), key=lambda pair: pair[1].numel())[0])
            self._places += rows

    def finish_digest(self) -> dict[str, torch.Tensor]:
        """Number `BATCH_DIGEST` of the step that ends."""
        return self._digest.finish()

    def end_step(self, probe: TorchProbe) -> None:
        """The step is over: number `BATCH_AGE` of it, when the digests are on the host."""
        places, self._places, self._passes = self._places, [], 0
        if not probe.faults.is_enabled(_PART):
            return
        if places and min(places) >= 0:
            with probe.guard(_PART):
                self._steps += 1
                row = probe.backend.blank_row()
                probe.pipeline.edit_rows(ChangedRows(functools.partial(self._compare, probe.guard(_PART), self._steps, places, row)))
                probe.pipeline.scalar(BATCH_AGE, TensorRef(row, probe.number))

    def _compare(self, guard: Guard, step: int, places: list[int], row: int, rows: _rows.Rows) -> None:
        with guard:
            ints = _rows.as_int64(rows)[places]
            if not (ints[:, _rows.FLAGS] & _rows.HAS_DIGEST).all():
                return
            digest = ints[:, [_rows.COUNT, _rows.DIGEST]].tobytes()
            last = self._last.pop(digest, None)
            if last is None or last.step != step:  # a step may be built twice
                last = _Last(step, None if last is None else last.step)
            self._last[digest] = last
            if len(self._last) > _KEPT:
                del self._last[next(iter(self._last))]
            if last.before is not None:
                set_values(rows, np.array([row]), np.array([float(step - last.before)]))


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Plain tensors in containers of plain types."""
    if type(value) is torch.Tensor:
        if value.numel():
            yield value
    elif depth and isinstance(value, (list, tuple)):
        for item in islice(value, 2 * _TENSORS):
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, Mapping):
        for item in islice(value.values(), 2 * _TENSORS):
            yield from _tensors(item, depth - 1)


def _thin(tensor: torch.Tensor) -> torch.Tensor:
    """A view of some of its elements: every so many along the last dimensions."""
    for dim in reversed(range(tensor.dim())):
        if (step := tensor.numel() // _ELEMENTS) > 1:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, min(step, tensor.shape[dim])),)]
    return tensor
