"""Rows of shards become rows of whole tensors: one small exchange per group and step, on the host, in the background.

Why on the host and along a tree of our own: the rows come to the host at the step boundary anyway, and a collective of ours on a
communicator of the training would hang the training as soon as one rank's probe is off. Here a rank that does not take part
costs the others a message and the merge, nothing else: nobody waits for an exchange, the frame does.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import MutableMapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.log import get_logger
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.core.text.ranges import in_short
from msprobe_engine.probe.pending_steps import RowsEdit
from msprobe_integrations.common.ranks.exchange_thread import CLOSED
from msprobe_integrations.common.ranks.step_exchange import StepExchange
from msprobe_integrations.common.ranks.tree import Lane, Words
from msprobe_integrations.torch.ranks.job import job_store

PATIENCE = 60.0
"""Seconds that a frame waits for the rows of other ranks that take part."""
LIMIT = 64
"""Steps that may wait for the other ranks; more mean that a rank has left."""

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
        patience: see `PATIENCE`.

    Raises:
        RuntimeError: this process may not open so many files.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        ranks: Sequence[int] = (),
        purpose: str = "rows",
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        self._said = self.told = False
        self._missed: set[str] = set()
        members = ranks or dist.get_process_group_ranks(group or dist.group.WORLD)
        super().__init__(job_store(), members, dist.get_rank(), purpose, LIMIT)

    def merge(self, step: int, names: Sequence[str], places: Sequence[int], extras: Sequence[MutableMapping[str, Any]] = ()) -> RowMerge:
        """An edit for `Pipeline.edit_rows`: the rows at `places` are replaced by their merge over the group.

        Args:
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
        return self.silent_for(self._patience)

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

    def _make_lanes(self) -> list[Lane]:
        return [Lane(self._shape, _merge_words)]

    def _receive(self, item: RowMerge, words: Words) -> None:
        item.merged = _as_rows(words)


def _merge_words(a: Words, b: Words) -> Words:
    if len(a) != len(b):
        raise ValueError("other rows")
    return _rows.merge(_as_rows(a), _as_rows(b)).view(np.int64).ravel()


def _as_rows(words: Words) -> Rows:
    rows: Rows = words.view(np.float64).reshape(-1, _rows.WORDS)
    return rows


def _identity(texts: Sequence[str]) -> int:
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode("utf-8", "backslashreplace"), digest_size=7).digest(), "big")


class RowMerge(RowsEdit):
    """The rows of one step and group on their way; see `RowExchange.merge`."""

    lane = 0

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

    def words(self) -> Words:
        """This rank's rows."""
        return self.mine.view(np.int64).ravel()

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
        return dict.fromkeys(empty, f"statistics of sharded tensors, not merged over ranks {in_short(self._exchange.ranks)}")

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
