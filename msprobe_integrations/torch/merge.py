"""Rows of shards become rows of whole tensors: one small exchange per group and step, on the host, in the background.

Why on the host and over a group of our own: the rows come to the host at the step boundary anyway, and a collective of ours on a
communicator of the training would hang the training as soon as one rank's probe is off. Here a rank that does not take part
costs the others a message and the merge, nothing else: nobody waits for an exchange, the frame does.

Why two ways: gathering moves n * k rows and needs no agreement on the meaning of words; four all-reduces move 2 * k. Small
groups gather (one message round), large ones reduce. Both give the same rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from msprobe_engine import rows as _rows
from msprobe_engine.errors import UsageError
from msprobe_engine.rows import Rows
from msprobe_integrations.torch.collectives import own_groups

GATHER_LIMIT = 1 << 20
"""Bytes (all ranks together) up to which rows are gathered; above, they are all-reduced."""
PATIENCE = 60.0
"""Seconds after which an exchange counts as failed."""

_COUNTS = (_rows.COUNT, _rows.NANS, _rows.POS_INF, _rows.NEG_INF, _rows.ZEROS, _rows.DIGEST, _rows.BELOW)
_SUMS = (_rows.SUM, _rows.SUMSQ, _rows.SUM3, _rows.SUM4)
_FLAGS = (_rows.HAS_DIGEST, _rows.HAS_INTEGERS, _rows.WRITTEN, _rows.HAS_MOMENTS, _rows.HAS_BELOW, _rows.HAS_EPS)
"""Those that a merged row may have: checksums do not merge."""


class MergeFailed(UsageError):
    """The ranks of a group could not put their rows together."""


class RowExchange:
    """Exchanges rows among the ranks of one process group.

    Building it is a collective call of the group's ranks (it makes a gloo group of the same ranks; no training communicator is
    used, no random number drawn).

    Args:
        group: the training's process group; None is the default group.
        ranks: its global ranks, where there is no group of them.
        gather_limit: see `GATHER_LIMIT`.
        patience: see `PATIENCE`.

    Raises:
        RuntimeError: gloo is missing, or a rank of the group did not build its part within `patience`.
    """

    def __init__(
        self, group: Any = None, *, ranks: Sequence[int] = (), gather_limit: int = GATHER_LIMIT, patience: float = PATIENCE
    ) -> None:
        self.ranks = list(ranks or dist.get_process_group_ranks(group or dist.group.WORLD))
        self.size = len(self.ranks)
        self._limit = gather_limit
        self._patience = patience
        self.failed: str = ""
        made: Any = dist.new_group(self.ranks, timeout=timedelta(seconds=patience), backend="gloo", use_local_synchronization=True)
        self._group: Any = made
        own_groups.add(made.group_name)

    def merge(self, step: int, names: Sequence[str], places: Sequence[int], extras: Sequence[MutableMapping[str, Any]] = ()) -> RowMerge:
        """An edit for `Pipeline.edit_rows`: the rows at `places` are replaced by their merge over the group.

        Args:
            step: the step they belong to.
            names: what the rows are, in order; has to be the same list on every rank of the group.
            places: row index of each name in this step's buffer.
            extras: the samples' `extra`; ``scope`` becomes ``shard`` in each when the merge fails.
        """
        return RowMerge(self, [f"step {step}", *names], places, extras)

    def close(self) -> None:
        """Take the group apart. A gloo group that lives until the interpreter exits may abort the process there."""
        group, self._group = self._group, None
        self.failed = self.failed or "closed"
        if group is not None and dist.is_initialized():
            own_groups.discard(group.group_name)
            with contextlib.suppress(Exception):  # gone with the training's own groups
                dist.destroy_process_group(group)

    def begin(self, identity: int, rows: Rows) -> _Exchange:
        """Start one exchange; returns at once."""
        if (len(rows) + 1) * _rows.WORDS * 8 * self.size <= self._limit:
            return _Gather(self._group, self.size, identity, rows)
        return _Reduce(self._group, identity, rows)


class _Exchange:
    """One exchange under way."""

    works: list[Any]

    def done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def finish(self) -> Rows:
        """Merged rows, once done. Raises what the transport raised."""
        for work in self.works:
            work.wait()
        return self._result()

    def _result(self) -> Rows:
        raise NotImplementedError


class _Gather(_Exchange):
    def __init__(self, group: Any, size: int, identity: int, rows: Rows) -> None:
        mine = np.zeros((len(rows) + 1, _rows.WORDS), np.float64)
        mine[1:] = rows
        _rows.as_int64(mine)[0, 0] = identity
        self._identity = identity
        self._mine = torch.from_numpy(mine.view(np.int64))
        self._all = [torch.empty_like(self._mine) for _ in range(size)]
        self.works = [dist.all_gather(self._all, self._mine, group=group, async_op=True)]

    def _result(self) -> Rows:
        parts = [part.numpy() for part in self._all]
        if any(int(part[0, 0]) != self._identity for part in parts):
            raise MergeFailed("ranks of the group sent different rows or steps; monitor settings have to be the same on all ranks")
        merged: Rows = np.ascontiguousarray(parts[0][1:]).view(np.float64)
        for part in parts[1:]:
            merged = _rows.merge(merged, np.ascontiguousarray(part[1:]).view(np.float64))
        return merged


class _Reduce(_Exchange):
    """COUNT..DIGEST and BELOW add up as int64 (the digest modulo 2**64, which is what int64 addition does), the sums as float64, the
    bounds are minima (of the negative, or the complement, for maxima), and a flag holds if it holds on all non-empty shards."""

    def __init__(self, group: Any, identity: int, rows: Rows) -> None:
        ints = _rows.as_int64(rows)
        flags = np.where(ints[:, _rows.COUNT] == 0, sum(_FLAGS), ints[:, _rows.FLAGS])
        low = np.stack([ints[:, _rows.IMIN], ~ints[:, _rows.IMAX], *(flags & bit for bit in _FLAGS)], 1)
        head = np.array([[identity, ~identity, *(0 for _ in _FLAGS)]], np.int64)
        sums = rows[:, _SUMS]
        sums[ints[:, _rows.FLAGS] & _rows.HAS_MOMENTS == 0, 2:] = 0.0  # bits of checksums, perhaps
        self._add = torch.from_numpy(np.ascontiguousarray(ints[:, _COUNTS]))
        self._sums = torch.from_numpy(np.ascontiguousarray(sums))
        self._bounds = torch.from_numpy(np.stack([rows[:, _rows.MIN], -rows[:, _rows.MAX]], 1))
        self._low = torch.from_numpy(np.concatenate([head, low]))
        self.works = [
            dist.all_reduce(tensor, op=op, group=group, async_op=True)
            for tensor, op in (
                (self._low, dist.ReduceOp.MIN),
                (self._add, dist.ReduceOp.SUM),
                (self._sums, dist.ReduceOp.SUM),
                (self._bounds, dist.ReduceOp.MIN),
            )
        ]

    def _result(self) -> Rows:
        low = self._low.numpy()
        if low[0, 0] != ~low[0, 1]:
            raise MergeFailed("ranks of the group sent different rows or steps; monitor settings have to be the same on all ranks")
        out = _rows.empty(len(low) - 1)
        ints = _rows.as_int64(out)
        ints[:, _COUNTS] = self._add.numpy()
        out[:, _SUMS] = self._sums.numpy()
        bounds = self._bounds.numpy()
        out[:, _rows.MIN], out[:, _rows.MAX] = bounds[:, 0], -bounds[:, 1]
        ints[:, _rows.IMIN], ints[:, _rows.IMAX] = low[1:, 0], ~low[1:, 1]
        flags = low[1:, 2:].sum(1)
        ints[:, _rows.FLAGS] = flags
        out[flags & _rows.HAS_MOMENTS == 0, _rows.SUM3 : _rows.BELOW] = 0.0
        ints[flags & _rows.HAS_BELOW == 0, _rows.BELOW] = 0
        return out


class RowMerge:
    """The rows of one step and group on their way; see `RowExchange.merge`. Used by the pipeline: `start` when the rows are on the
    host, `ready` at every step boundary, then the call itself."""

    def __init__(
        self, exchange: RowExchange, names: Sequence[str], places: Sequence[int], extras: Sequence[MutableMapping[str, Any]]
    ) -> None:
        self._exchange = exchange
        self._places = np.asarray(places, np.int64)
        self._extras = extras
        self._identity = int.from_bytes(hashlib.blake2b("\0".join(names).encode(), digest_size=7).digest(), "big")
        self._under_way: _Exchange | None = None
        self._error: Exception | None = None
        self._deadline = 0.0

    def start(self, rows: Rows) -> None:
        """Send this rank's rows; returns at once and never raises."""
        self._deadline = time.monotonic() + self._exchange._patience
        if self._exchange.failed:
            return
        try:
            self._under_way = self._exchange.begin(self._identity, np.ascontiguousarray(rows[self._places]))
        except Exception as error:
            self._error = error

    def ready(self) -> bool:
        """True when the call will not wait."""
        if self._under_way is None or self._exchange.failed:
            return True
        return self._under_way.done() or time.monotonic() > self._deadline

    def wait(self, seconds: float) -> None:
        """Wait until ready, at most so long; for the end of the run."""
        end = time.monotonic() + seconds
        while not self.ready() and time.monotonic() < end:
            time.sleep(0.001)

    def __call__(self, rows: Rows) -> None:
        """Put the merged rows in place.

        Raises:
            MergeFailed: for the first step that could not be merged; later ones stay local without a word.
        """
        quiet = bool(self._exchange.failed)
        try:
            if self._error is not None:
                raise self._error
            if self._under_way is None or not self._under_way.done():
                raise MergeFailed(
                    f"ranks {self._exchange.ranks} did not all send their rows in {self._exchange._patience:.0f} s: "
                    "is the probe off on one of them?"
                )
            rows[self._places] = self._under_way.finish()
        except Exception as error:
            for extra in self._extras:
                extra["scope"] = "shard"
            self._exchange.failed = str(error) or type(error).__name__
            if not quiet:
                raise MergeFailed(f"statistics of sharded tensors stay those of this rank's shard: {self._exchange.failed}") from error
