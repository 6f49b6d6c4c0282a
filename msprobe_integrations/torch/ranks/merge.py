"""Rows of shards become rows of whole tensors: one small exchange per group and step, on the host, in the background.

Why on the host and over a group of our own: the rows come to the host at the step boundary anyway, and a collective of ours on a
communicator of the training would hang the training as soon as one rank's probe is off. Here a rank that does not take part
costs the others a message and the merge, nothing else: nobody waits for an exchange, the frame does.

Why two ways: gathering moves n * k rows and needs no agreement on the meaning of words; four all-reduces move 2 * k. Small
groups gather (one message round), large ones reduce. Both give the same rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.probe.pending_steps import RowsEdit
from msprobe_engine.probe.rules.builtin.replica_mismatch import short_ranks
from msprobe_integrations.torch.ranks.own_group import OwnGroup
from msprobe_integrations.torch.ranks.step_exchange import CLOSED, Flight, StepExchange

GATHER_LIMIT = 1 << 20
"""Bytes (all ranks together) up to which rows are gathered; above, they are all-reduced."""
PATIENCE = 60.0
"""Seconds that a frame waits for the rows of other ranks that take part."""
LIMIT = 64
"""Steps that may wait for the other ranks; more mean that a rank has left."""

_COUNTS = (_rows.COUNT, _rows.NANS, _rows.POS_INF, _rows.NEG_INF, _rows.ZEROS, _rows.DIGEST, _rows.BELOW)
_SUMS = (_rows.SUM, _rows.SUMSQ, _rows.SUM3, _rows.SUM4)
_FLAGS = (_rows.HAS_DIGEST, _rows.HAS_INTEGERS, _rows.WRITTEN, _rows.HAS_MOMENTS, _rows.HAS_BELOW, _rows.HAS_EPS)
"""Those that a merged row may have: checksums do not merge."""
_FAR = 1 << 62
_LEFT_OUT = "statistics of sharded tensors are left out (scope: unknown, complete: false)"
_log = get_logger()


class MergeFailed(UsageError):
    """The ranks of a group could not put their rows together."""


class RowExchange(StepExchange):
    """Exchanges rows among the ranks of one process group. No training communicator is used, no random number drawn.

    Args:
        group: the training's process group; None is the default group.
        ranks: its global ranks, where there is no group of them.
        purpose: as for `StepExchange`.
        gather_limit: see `GATHER_LIMIT`.
        patience: see `PATIENCE`.

    Raises:
        RuntimeError: gloo is missing, or this process may not open so many files.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        ranks: Sequence[int] = (),
        purpose: str = "rows",
        gather_limit: int = GATHER_LIMIT,
        patience: float = PATIENCE,
    ) -> None:
        self._gather_limit = gather_limit
        self._patience = patience
        self._said = self.told = False
        self._missed: set[str] = set()
        super().__init__(ranks or dist.get_process_group_ranks(group or dist.group.WORLD), purpose, LIMIT)

    def merge(self, step: int, names: Sequence[str], places: Sequence[int], extras: Sequence[MutableMapping[str, Any]] = ()) -> RowMerge:
        """An edit for `Pipeline.edit_rows`: the rows at `places` are replaced by their merge over the group.

        Args:
            step: the step they belong to.
            names: what the rows are, in order; has to be the same list on every rank of the group.
            places: row index of each name in this step's buffer.
            extras: the samples' `extra`; ``scope`` becomes ``unknown`` in each when the merge fails, and their numbers are left out.
        """
        return RowMerge(self, step, names, places, extras)

    def close(self, why: str = CLOSED) -> None:
        """As `StepExchange.close`; that rows are not merged from now on is no news."""
        self.told = True
        super().close(why)

    @property
    def stalled(self) -> bool:
        """True when the other ranks have been silent for longer than `patience`."""
        return self._flight is not None and time.monotonic() > self._since + self._patience

    def say_apart(self, why: str) -> None:
        """Say once that rows of some steps are not merged."""
        if not self._said:
            self._said = True
            _log.warning("%s where ranks %s do not all have the same rows: %s; said once", _LEFT_OUT, self.ranks, why)

    def say_missing(self, who: str) -> None:
        """Say, once for the same ranks, that rows are not merged because these take no part."""
        if who not in self._missed:
            self._missed.add(who)
            _log.warning(
                "ranks %s cannot merge their rows: %s. As long as that lasts %s; all of them need the probe, with the same settings",
                self.ranks,
                who,
                _LEFT_OUT,
            )

    def _start(self, items: Sequence[RowMerge]) -> Flight:
        assert self.group is not None
        identity = _identity([str(merge.identity) for merge in items])
        rows = np.concatenate([merge.mine for merge in items])
        if (len(rows) + 1) * _rows.WORDS * 8 * len(self.ranks) <= self._gather_limit:
            return _Gather(self.group, len(self.ranks), identity, rows, items)
        return _Reduce(self.group, identity, rows, items)


def _identity(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode("utf-8", "backslashreplace"), digest_size=7).digest(), "big")


class _Rows(Flight):
    """Rows of steps that all ranks have, on their way."""

    def __init__(self, merges: Sequence[RowMerge]) -> None:
        self.items = merges

    def _follow(self) -> None:
        merged = self._result()
        at = 0
        for merge in self.items:
            merge.merged = merged[at : at + len(merge.mine)]
            at += len(merge.mine)

    def _result(self) -> Rows:
        """Merged rows."""
        raise NotImplementedError


class _Gather(_Rows):
    def __init__(self, group: OwnGroup, size: int, identity: int, rows: Rows, merges: Sequence[RowMerge]) -> None:
        super().__init__(merges)
        mine = np.zeros((len(rows) + 1, _rows.WORDS), np.float64)
        mine[1:] = rows
        _rows.as_int64(mine)[0, 0] = identity
        self._identity = identity
        self._mine = torch.from_numpy(mine.view(np.int64))
        self._all = [torch.empty_like(self._mine) for _ in range(size)]
        self.works = [group.all_gather(self._all, self._mine)]

    def _result(self) -> Rows:
        parts = [part.numpy() for part in self._all]
        if any(int(part[0, 0]) != self._identity for part in parts):
            raise MergeFailed("ranks of the group sent different rows or steps; monitor settings have to be the same on all ranks")
        merged: Rows = np.ascontiguousarray(parts[0][1:]).view(np.float64)
        for part in parts[1:]:
            merged = _rows.merge(merged, np.ascontiguousarray(part[1:]).view(np.float64))
        return merged


class _Reduce(_Rows):
    """COUNT..DIGEST and BELOW add up as int64 (the digest modulo 2**64, which is what int64 addition does), the sums as float64, the
    bounds are minima (of the negative, or the complement, for maxima), and a flag holds if it holds on all non-empty shards."""

    def __init__(self, group: OwnGroup, identity: int, rows: Rows, merges: Sequence[RowMerge]) -> None:
        super().__init__(merges)
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
            group.all_reduce(tensor, op)
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


class RowMerge(RowsEdit):
    """The rows of one step and group on their way; see `RowExchange.merge`."""

    def __init__(
        self,
        exchange: RowExchange,
        step: int,
        names: Sequence[str],
        places: Sequence[int],
        extras: Sequence[MutableMapping[str, Any]],
    ) -> None:
        self._exchange = exchange
        self._places = np.asarray(places, np.int64)
        self._extras = extras
        self._deadline = 0.0
        self.number = max(-_FAR, min(_FAR, step))
        self.identity = _identity([f"step {step}", *names])
        self.mine: Rows = _rows.empty(0)
        """This rank's rows."""
        self.merged: Rows | None = None
        """Those of all ranks, once they are there."""
        self.apart = ""
        """Why there will be none."""
        self.missing = False
        """It is because a rank takes no part."""

    def start(self, rows: Rows) -> None:
        self._deadline = time.monotonic() + self._exchange._patience
        self.mine = np.ascontiguousarray(rows[self._places])
        self._exchange.submit(self)

    def ready(self) -> bool:
        exchange = self._exchange
        over = self.merged is not None or self.apart or exchange.failed
        return bool(over) or exchange.stalled or time.monotonic() > self._deadline

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._exchange.hurry()
        while not self.ready() and time.monotonic() < end:
            time.sleep(0.001)

    def leave_out(self, rows: Rows) -> dict[int, str]:
        """Take out of `rows` what is not known without the other ranks, and say which rows have no numbers then, and why."""
        rows[self._places] = left = _rows.keep_nonfinite(rows[self._places])
        empty = self._places[_rows.as_int64(left)[:, _rows.COUNT] == 0].tolist()
        return dict.fromkeys(empty, f"statistics of sharded tensors, not merged over ranks {short_ranks(self._exchange.ranks)}")

    def apply(self, rows: Rows) -> None:
        """Put the merged rows in place. Where there are none, those of this rank's part would be taken for the whole: all that is left of
        them are NaN and Inf, the samples say so, and it is logged once.

        Raises:
            MergeFailed: once, when nothing can be merged any more.
        """
        exchange = self._exchange
        if self.merged is not None:
            rows[self._places] = self.merged
            return
        self.unknown = self.leave_out(rows)
        for extra in self._extras:
            extra["scope"] = "unknown"
            extra.pop("histogram", None)
        if self.missing:
            exchange.say_missing(self.apart)
        elif exchange.failed:
            quiet, exchange.told = exchange.told, True
            if not quiet:
                raise MergeFailed(f"{_LEFT_OUT}: {exchange.failed}")
        else:
            why = "one is late, stands still or has ended, or its probe is off"
            late = f"not all of them sent theirs in {exchange._patience:.2g} s or before the end: {why}"
            exchange.say_apart(self.apart or exchange.trouble or late)
