"""Are these numbers the same on all ranks of a group, and if not, who has which? In the background, over a group of our own.

A check is one all-reduce (minimum) of 16 bytes per tensor and 16 more: the digests and their complements, whose minima are the smallest
and the largest digest. Only where both differ a second exchange follows, in which the lowest rank of the group gets from every rank
what it has of the first `DETAILED` tensors that differ, 16 bytes each. 1,024 ranks with 2,000 parameters: 32 KB per rank and check for
the all-reduce (64 KB sent, about 20 rounds of it), and when something differs 1 KB from each rank, 1 MB on the lowest one. A gather
of everything would be 16 MB on every rank.

Messages have one length for the life of a channel (what was not taken says so), and a check begins when all ranks have said that they have
the same one (`step_exchange`): ranks that disagree about what they compare find out there, and never by a message that does not fit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from msprobe_engine.core.errors import UsageError
from msprobe_integrations.common.ranks.replica_channel import Difference, Done, Mask, Words, fingerprint
from msprobe_integrations.torch.ranks.step_exchange import Flight, StepExchange

DETAILED = 64
"""Tensors of which one check asks who has what; the others that differ are only counted."""
PATIENCE = 1800.0
"""Seconds without an answer after which the channel has failed. Nothing waits for it: a rank that writes a checkpoint for minutes is no
fault."""
LIMIT = 16
"""Checks that may wait in line."""

_UNKNOWN = np.iinfo(np.int64).max


class _Check:
    """One check in the line."""

    def __init__(self, step: int, contents: int, digests: Words, known: Mask, done: Done) -> None:
        self.number, self.identity = step, contents
        self.digests, self.known, self.done = digests, known, done
        self.apart = ""
        self.missing = False


class Channel(StepExchange):
    """Compares numbers among some ranks. No call waits.

    Args:
        ranks: global ranks, ascending, this one among them.
        contents: what is compared, in order, the same on all ranks.
        patience: see `PATIENCE`.

    Attributes:
        failed: why nothing is compared any more; empty as long as it is.

    Raises:
        RuntimeError: gloo is missing, or this process may not open so many files.
    """

    def __init__(self, ranks: Sequence[int], contents: Sequence[str], *, patience: float = PATIENCE) -> None:
        self.contents = tuple(contents)
        self._fingerprint = fingerprint(*contents)
        self._patience = patience
        self._results: deque[tuple[Done, list[Difference]]] = deque()
        self._left_out: dict[str, int] = {}
        super().__init__(ranks, "replicas", LIMIT)

    def submit(self, step: int, digests: Words, known: Mask, done: Done) -> None:  # type: ignore[override]
        """Compare; `done` is called by a later `poll` with what differs.

        Args:
            step: the same on all ranks.
            digests, known: one for each of the contents, [n]; what is not known is not compared.
        """
        super().submit(_Check(step, self._fingerprint, digests.copy(), known.copy(), done))

    @property
    def under_way(self) -> int:
        """Checks that have begun and have no result yet, or one that was not handed on; none of a channel that has failed."""
        return 0 if self.failed else super().under_way + len(self._results)

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        return not self.under_way

    def poll(self) -> None:
        """Hand on what has arrived; what went wrong is in `failed` afterwards."""
        while self._results:
            done, differences = self._results[0]
            done(differences)
            self._results.popleft()
        if self._flight is not None and time.monotonic() > self._since + self._patience:
            self.fail(f"ranks {self.ranks} did not all answer in {self._patience:.0f} s: is the probe off on one of them?")

    def left_out(self) -> dict[str, int]:
        """Checks that were not made since the last call, by the reason."""
        with self._lock:
            left, self._left_out = self._left_out, {}
        return left

    def _start(self, items: Sequence[_Check]) -> Flight:
        return _Compare(self, items[0], items[1:])

    def _leave_apart(self, _item: _Check, why: str, /) -> None:
        with self._lock:
            self._left_out[why] = self._left_out.get(why, 0) + 1

    def _miss_ranks(self, items: Sequence[_Check], who: str) -> None:
        for item in items:
            self._leave_apart(item, who)

    def _differ(self, _item: _Check, /) -> None:
        raise UsageError(
            f"ranks {self.ranks} do not hold copies of the same parameters; model, optimizer and monitor settings have to be the "
            "same on all of them"
        )

    def _finish(self, check: _Check, differences: list[Difference], further: Sequence[_Check]) -> Flight | None:
        self._results.append((check.done, differences))
        return _Compare(self, further[0], further[1:]) if further else None


class _Compare(Flight):
    """The smallest and the largest digest of everything."""

    def __init__(self, channel: Channel, check: _Check, further: Sequence[_Check]) -> None:
        assert channel.group is not None
        self._channel, self._check, self._further = channel, check, further
        self.items = [check, *further]
        low = np.where(check.known, check.digests, _UNKNOWN)
        high = np.where(check.known, ~check.digests, _UNKNOWN)
        self._bounds = torch.from_numpy(np.concatenate([low, high]).astype(np.int64))
        self.works = [channel.group.all_reduce(self._bounds, dist.ReduceOp.MIN)]

    def _follow(self) -> Flight | None:
        low, high = self._bounds.numpy().reshape(2, -1)
        anywhere = (low != _UNKNOWN) | (high != _UNKNOWN)
        places = np.flatnonzero(anywhere & (low != ~high))
        if len(places):
            return _Who(self._channel, self._check, self._further, places)
        return self._channel._finish(self._check, [], self._further)


class _Who(Flight):
    """Who has what, of the first that differ."""

    def __init__(self, channel: Channel, check: _Check, further: Sequence[_Check], places: npt.NDArray[np.intp]) -> None:
        assert channel.group is not None
        self._channel, self._check, self._further, self._places = channel, check, further, places
        self.items = [check, *further]
        asked = places[:DETAILED]
        mine = torch.from_numpy(np.stack([check.digests[asked], check.known[asked].astype(np.int64)]))
        self._all = [torch.empty_like(mine) for _ in channel.ranks] if channel.leader else None
        self.works = [channel.group.gather(self._all, mine)]

    def _follow(self) -> Flight | None:
        found = [Difference(int(place)) for place in self._places]
        if self._all is not None:
            table = np.stack([part.numpy() for part in self._all])  # [ranks, 2, asked]
            for i in range(table.shape[2]):
                found[i] = Difference(found[i].place, table[:, 0, i], table[:, 1, i] != 0)
        return self._channel._finish(self._check, found, self._further)
