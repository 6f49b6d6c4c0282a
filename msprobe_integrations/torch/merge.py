"""Rows of shards become rows of whole tensors: one small exchange per group and step, on the host, in the background.

Why on the host and over a group of our own: the rows come to the host at the step boundary anyway, and a collective of ours on a
communicator of the training would hang the training as soon as one rank's probe is off. Here a rank that does not take part
costs the others a message and the merge, nothing else: nobody waits for an exchange, the frame does.

Why two ways: gathering moves n * k rows and needs no agreement on the meaning of words; four all-reduces move 2 * k. Small
groups gather (one message round), large ones reduce. Both give the same rows.

Why first an agreement: gloo ends the process when messages of different lengths meet, and ranks may disagree about what a step holds
(settings that changed one step later on one of them, a rank that is paused). So rows travel only after a small message of fixed length has
said that all ranks have the same ones waiting. What they do not all have stays local, and the next steps are merged again.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from msprobe_engine import rows as _rows
from msprobe_engine.errors import UsageError
from msprobe_engine.log import get_logger
from msprobe_engine.rows import Rows
from msprobe_integrations.torch.own_group import OwnGroup

GATHER_LIMIT = 1 << 20
"""Bytes (all ranks together) up to which rows are gathered; above, they are all-reduced."""
PATIENCE = 60.0
"""Seconds that a frame waits for the rows of other ranks, and ranks for each other when an exchange is made."""
LONGEST = 1800.0
"""Seconds after which the transport gives up. A rank that writes a checkpoint for minutes is no fault."""
LIMIT = 64
"""Steps that may wait for the other ranks; more mean that a rank has left."""
SLOTS = 8
"""Steps that one agreement is about."""

_COUNTS = (_rows.COUNT, _rows.NANS, _rows.POS_INF, _rows.NEG_INF, _rows.ZEROS, _rows.DIGEST, _rows.BELOW)
_SUMS = (_rows.SUM, _rows.SUMSQ, _rows.SUM3, _rows.SUM4)
_FLAGS = (_rows.HAS_DIGEST, _rows.HAS_INTEGERS, _rows.WRITTEN, _rows.HAS_MOMENTS, _rows.HAS_BELOW, _rows.HAS_EPS)
"""Those that a merged row may have: checksums do not merge."""
_NOTHING = np.iinfo(np.int64).min
_FAR = 1 << 62
Words = npt.NDArray[np.int64]
_log = get_logger()


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
        self._queue: deque[RowMerge] = deque()
        self._flight: _Agreement | _Rows | None = None
        self._left: list[Any] = []
        self._since = 0.0
        self._said = self.told = False
        self._own = OwnGroup(self.ranks, patience, LONGEST)

    def merge(self, step: int, names: Sequence[str], places: Sequence[int], extras: Sequence[MutableMapping[str, Any]] = ()) -> RowMerge:
        """An edit for `Pipeline.edit_rows`: the rows at `places` are replaced by their merge over the group.

        Args:
            step: the step they belong to.
            names: what the rows are, in order; has to be the same list on every rank of the group.
            places: row index of each name in this step's buffer.
            extras: the samples' `extra`; ``scope`` becomes ``shard`` in each when the merge fails.
        """
        return RowMerge(self, step, names, places, extras)

    def close(self, under_way: list[Any] | None = None) -> None:
        """Take the group apart; does not wait for ranks that do not answer.

        Args:
            under_way: the only references to exchanges of `begin` that have not ended; taken over.
        """
        self.told = True
        self.fail("closed")
        left, self._left = self._left, []
        if under_way:
            left += under_way
            under_way.clear()
        self._own.close(left)

    def begin(self, identity: int, rows: Rows) -> _Exchange:
        """Start one exchange, of as many rows on every rank; returns at once."""
        if (len(rows) + 1) * _rows.WORDS * 8 * self.size <= self._limit:
            return _Gather(self._own, self.size, identity, rows)
        return _Reduce(self._own, identity, rows)

    def submit(self, merge: RowMerge) -> None:
        """Take `merge` into the line; returns at once and never raises."""
        if not self.failed:
            self._queue.append(merge)
            self.advance()
            if len(self._queue) > LIMIT:
                self.fail(f"ranks {self.ranks} did not all send their rows in {LIMIT} steps: is the probe off on one of them?")

    def advance(self) -> None:
        """Go on with what has arrived; never waits and never raises. Every rank sees the same results and so does the same exchanges in
        the same order."""
        try:
            while not self.failed:
                if self._flight is None:
                    if not self._queue:
                        return
                    self._flight = _Agreement(self._own, list(islice(self._queue, SLOTS)))
                    self._since = time.monotonic()
                elif not self._flight.done():
                    return
                elif isinstance(self._flight, _Rows):
                    self._flight.share()
                    self._flight = None
                else:
                    self._flight = self._agreed(*self._flight.result())
                    self._since = time.monotonic()
        except Exception as error:
            self.fail(str(error) or type(error).__name__)

    @property
    def stalled(self) -> bool:
        """True when the other ranks have been silent for longer than `patience`."""
        return self._flight is not None and time.monotonic() > self._since + self._patience

    def fail(self, why: str) -> None:
        """Nothing is merged any more."""
        self.failed = self.failed or why
        self._queue.clear()
        if self._flight is not None:
            self._left.append(self._flight)
            self._flight = None

    def say_apart(self, why: str) -> None:
        """Say once that rows of some steps are not merged."""
        if not self._said:
            self._said = True
            _log.warning(
                "statistics of sharded tensors stay those of this rank's shard (marked scope: shard) where ranks %s do not all have the "
                "same rows: %s; said once",
                self.ranks,
                why,
            )

    def _agreed(self, low: Words, high: Words) -> _Rows | None:
        same = (low == high).all(1) & (low[:, 1] != _NOTHING)
        count = len(same) if same.all() else int(np.argmin(same))
        if count:
            return _Rows(self, [self._queue.popleft() for _ in range(count)])
        newest = int(high[0, 0])
        if low[0, 0] == newest:
            self._queue.popleft().apart = "the same step holds different things; monitor settings have to be the same on all ranks"
        while self._queue and self._queue[0].number < newest:
            self._queue.popleft().apart = "some ranks have no rows of this step; the probe has to be driven alike on all of them"
        return None


class _Agreement:
    """Which of the steps in the line do all ranks have? For each slot the smallest and the largest number of a step and its contents."""

    def __init__(self, group: OwnGroup, merges: Sequence[RowMerge]) -> None:
        words = np.full((SLOTS, 2), _NOTHING, np.int64)
        for i, merge in enumerate(merges):
            words[i] = merge.number, merge.identity
        self._words = torch.from_numpy(np.stack([words, ~words]))
        self._work = group.all_reduce(self._words, dist.ReduceOp.MIN)

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def result(self) -> tuple[Words, Words]:
        """Smallest and largest of all ranks, each [SLOTS, (step, contents)]. Raises what the transport raised."""
        self._work.wait()
        words = self._words.numpy()
        return words[0], ~words[1]


class _Rows:
    """Rows of steps that all ranks have, on their way."""

    def __init__(self, exchange: RowExchange, merges: Sequence[RowMerge]) -> None:
        self._merges = merges
        identity = _identity([str(merge.identity) for merge in merges])
        self._exchange = exchange.begin(identity, np.concatenate([merge.mine for merge in merges]))

    def done(self) -> bool:
        return self._exchange.done()

    def share(self) -> None:
        """Give every merge its rows. Raises what the transport raised."""
        merged = self._exchange.finish()
        at = 0
        for merge in self._merges:
            merge.merged = merged[at : at + len(merge.mine)]
            at += len(merge.mine)


def _identity(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode("utf-8", "backslashreplace"), digest_size=7).digest(), "big")


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
    def __init__(self, group: OwnGroup, size: int, identity: int, rows: Rows) -> None:
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


class _Reduce(_Exchange):
    """COUNT..DIGEST and BELOW add up as int64 (the digest modulo 2**64, which is what int64 addition does), the sums as float64, the
    bounds are minima (of the negative, or the complement, for maxima), and a flag holds if it holds on all non-empty shards."""

    def __init__(self, group: OwnGroup, identity: int, rows: Rows) -> None:
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


class RowMerge:
    """The rows of one step and group on their way; see `RowExchange.merge`. Used by the pipeline: `start` when the rows are on the
    host, `ready` at every step boundary, then the call itself."""

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

    def start(self, rows: Rows) -> None:
        """Send this rank's rows; returns at once and never raises."""
        self._deadline = time.monotonic() + self._exchange._patience
        self.mine = np.ascontiguousarray(rows[self._places])
        self._exchange.submit(self)

    def ready(self) -> bool:
        """True when the call will not wait."""
        exchange = self._exchange
        exchange.advance()
        over = self.merged is not None or self.apart or exchange.failed
        return bool(over) or exchange.stalled or time.monotonic() > self._deadline

    def wait(self, seconds: float) -> None:
        """Wait until ready, at most so long; for the end of the run."""
        end = time.monotonic() + seconds
        while not self.ready() and time.monotonic() < end:
            time.sleep(0.001)

    def __call__(self, rows: Rows) -> None:
        """Put the merged rows in place. Where there are none the samples say so, and it is logged once.

        Raises:
            MergeFailed: once, when nothing can be merged any more.
        """
        exchange = self._exchange
        if self.merged is not None:
            rows[self._places] = self.merged
            return
        for extra in self._extras:
            extra["scope"] = "shard"
        if exchange.failed:
            quiet, exchange.told = exchange.told, True
            if not quiet:
                raise MergeFailed(f"statistics of sharded tensors stay those of this rank's shard: {exchange.failed}")
        else:
            late = f"not all of them sent theirs in {exchange._patience:.0f} s or before the end; is the probe off on one of them?"
            exchange.say_apart(self.apart or late)
