"""Are these numbers the same on all ranks of a group, and if not, who has which? In the background, over a group of our own.

A check is one all-reduce (minimum) of 16 bytes per tensor and 16 more: the digests and their complements, whose minima are the smallest
and the largest digest. Only where both differ a second exchange follows, in which the lowest rank of the group gets from every rank
what it has of the first `DETAILED` tensors that differ, 16 bytes each. 1,024 ranks with 2,000 parameters: 32 KB per rank and check for
the all-reduce (64 KB sent, about 20 rounds of it), and when something differs 1 KB from each rank, 1 MB on the lowest one. A gather
of everything would be 16 MB on every rank.

Checks of one group follow one another: every rank sees from the same result whether there is a second exchange, so all ranks do the
same exchanges in the same order. Messages have one length for the life of a channel (what was not taken says so): ranks that disagree
about what they compare find out from the first word, and never by a message that does not fit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from msprobe_engine.errors import UsageError
from msprobe_integrations.common.replica_channel import Difference, Done, Mask, Words, fingerprint
from msprobe_integrations.torch.own_group import OwnGroup

DETAILED = 64
"""Tensors of which one check asks who has what; the others that differ are only counted."""
MEETING = 60.0
"""Seconds that ranks wait for each other when a channel is made."""
PATIENCE = 1800.0
"""Seconds after which an exchange counts as failed. Nothing waits for it: a rank that writes a checkpoint for minutes is no fault."""
LIMIT = 16
"""Checks that may wait in line."""

_UNKNOWN = np.iinfo(np.int64).max


class _Check(NamedTuple):
    identity: int
    digests: Words
    known: Mask
    done: Done


class Channel:
    """Compares numbers among some ranks. Building it is a collective call of theirs, everything else returns at once.

    Args:
        ranks: global ranks, ascending, this one among them.
        contents: what is compared, in order, the same on all ranks.
        meeting, patience: see `MEETING`, `PATIENCE`.

    Attributes:
        leader: this is the lowest rank, the one that learns who has what.
        failed: why nothing is compared any more; empty as long as it is.

    Raises:
        UsageError: the ranks have different contents.
        RuntimeError: gloo is missing, or a rank did not come.
    """

    def __init__(self, ranks: Sequence[int], contents: Sequence[str], *, meeting: float = MEETING, patience: float = PATIENCE) -> None:
        self.ranks = list(ranks)
        self.contents = tuple(contents)
        self.leader = dist.get_rank() == self.ranks[0]
        self.failed = ""
        self._patience = patience
        self._waiting: deque[_Check] = deque()
        self._round: _Round | None = None
        self._left: list[_Round] = []
        self._own = OwnGroup(self.ranks, meeting, patience)
        mine = fingerprint(*contents)
        both = torch.tensor([mine, ~mine], dtype=torch.int64, device="cpu")
        self._own.all_reduce(both, dist.ReduceOp.MIN).wait(timedelta(seconds=meeting))
        if int(both[0]) != ~int(both[1]):
            self.close()
            raise UsageError(
                f"ranks {self.ranks} do not hold copies of the same parameters; model, optimizer and monitor settings have to be the "
                "same on all of them"
            )

    def submit(self, step: int, digests: Words, known: Mask, done: Done) -> None:
        """Compare; `done` is called by a later `poll` with what differs.

        Args:
            step: the same on all ranks.
            digests, known: one for each of the contents, [n]; what is not known is not compared.
        """
        if not self.failed:
            if len(self._waiting) >= LIMIT:
                self._fail(f"ranks {self.ranks} did not all answer in {LIMIT} checks: is the probe off on one of them?")
            else:
                self._waiting.append(_Check(fingerprint(f"step {step}"), digests, known, done))
                self.poll()

    @property
    def under_way(self) -> int:
        """Checks that have begun and have no result yet; none of a channel that has failed."""
        return 0 if self.failed else len(self._waiting) + (self._round is not None)

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self.under_way

    def poll(self) -> None:
        """Go on with what has arrived. Never waits; a fault of the transport is in `failed` afterwards."""
        try:
            while not self.failed:
                if self._round is None:
                    if not self._waiting:
                        return
                    self._round = _Compare(self, self._waiting.popleft())
                elif self._round.work.is_completed():
                    self._round.work.wait()  # raises what went wrong
                    self._round = self._round.next()
                elif time.monotonic() > self._round.deadline:
                    self._fail(f"ranks {self.ranks} did not all answer in {self._patience:.0f} s: is the probe off on one of them?")
                else:
                    return
        except Exception as error:
            self._fail(str(error) or type(error).__name__)

    def close(self) -> None:
        """Take the group apart; does not wait for ranks that do not answer."""
        self._fail("closed")
        left, self._left = self._left, []
        self._own.close(left)

    def _fail(self, why: str) -> None:
        self.failed = self.failed or why
        self._waiting.clear()
        if self._round is not None:
            self._left.append(self._round)
            self._round = None


class _Round:
    """One exchange under way."""

    work: Any

    def __init__(self, channel: Channel, check: _Check) -> None:
        self.channel = channel
        self.check = check
        self.deadline = time.monotonic() + channel._patience

    def next(self) -> _Round | None:
        """What follows, once the exchange is done; None when the check is over."""
        raise NotImplementedError


class _Compare(_Round):
    """The smallest and the largest digest of everything."""

    def __init__(self, channel: Channel, check: _Check) -> None:
        super().__init__(channel, check)
        low = np.where(check.known, check.digests, _UNKNOWN)
        high = np.where(check.known, ~check.digests, _UNKNOWN)
        self._bounds = torch.from_numpy(np.concatenate([[check.identity, ~check.identity], low, high]).astype(np.int64))
        self.work = channel._own.all_reduce(self._bounds, dist.ReduceOp.MIN)

    def next(self) -> _Round | None:
        bounds = self._bounds.numpy()
        if bounds[0] != ~bounds[1]:
            raise UsageError(f"ranks {self.channel.ranks} compare different steps; the probe has to be driven alike on all of them")
        low, high = bounds[2:].reshape(2, -1)
        anywhere = (low != _UNKNOWN) | (high != _UNKNOWN)
        places = np.flatnonzero(anywhere & (low != ~high))
        if len(places):
            return _Who(self.channel, self.check, places)
        self.check.done([])
        return None


class _Who(_Round):
    """Who has what, of the first that differ."""

    def __init__(self, channel: Channel, check: _Check, places: npt.NDArray[np.intp]) -> None:
        super().__init__(channel, check)
        self._places = places
        asked = places[:DETAILED]
        mine = torch.from_numpy(np.stack([check.digests[asked], check.known[asked].astype(np.int64)]))
        self._all = [torch.empty_like(mine) for _ in channel.ranks] if channel.leader else None
        self.work = channel._own.gather(self._all, mine)

    def next(self) -> _Round | None:
        found = [Difference(int(place)) for place in self._places]
        if self._all is not None:
            table = np.stack([part.numpy() for part in self._all])  # [ranks, 2, asked]
            for i in range(table.shape[2]):
                found[i] = Difference(found[i].place, table[:, 0, i], table[:, 1, i] != 0)
        self.check.done(found)
        return None
