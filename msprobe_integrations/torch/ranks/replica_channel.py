"""Are these numbers the same on all ranks of a group, and if not, who has which? In the background, along the tree of the exchange.

A check is one exchange of 16 bytes per tensor: the smallest digest and the smallest complement of one, which is the largest digest. Only
where both differ a second exchange follows, in which the lowest rank of the group gets from every rank what it has of the first `DETAILED`
tensors that differ, 16 bytes each. 1,024 ranks with 2,000 parameters: 32 KB up and down per rank and check, and when something differs 1 KB
from each rank, 1 MB on the lowest one.

A check begins when all ranks have the same one (`step_exchange`): ranks that disagree about what they compare find out there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from msprobe_engine.core.errors import UsageError
from msprobe_integrations.common.ranks.replica_channel import Difference, Done, Mask, Words, fingerprint
from msprobe_integrations.common.ranks.step_exchange import StepExchange
from msprobe_integrations.common.ranks.tree import NOTHING, Lane
from msprobe_integrations.torch.ranks.job import job_store

DETAILED = 64
"""Tensors of which one check asks who has what; the others that differ are only counted."""
PATIENCE = 1800.0
"""Seconds without an answer after which the channel has failed. Nothing waits for it: a rank that writes a checkpoint for minutes is no
fault."""
LIMIT = 16
"""Checks that may wait in line."""

_UNKNOWN = np.iinfo(np.int64).max
_BOUNDS, _WHO = 0, 1
"""Lanes: the smallest and the largest digest of everything; who has what, of the first that differ."""


class _Check:
    lane = _BOUNDS

    def __init__(self, step: int, contents: int, digests: Words, known: Mask, done: Done) -> None:
        self.number, self.identity = step, contents
        self.digests, self.known, self.done = digests, known, done
        self.differences: list[Difference] | None = None
        """Once they are known."""
        self.apart = ""
        self.missing = False

    def words(self) -> Words:
        low = np.where(self.known, self.digests, _UNKNOWN)
        high = np.where(self.known, ~self.digests, _UNKNOWN)
        return np.concatenate([low, high]).astype(np.int64)


class _Who:
    """What this rank has of the tensors that differ in a check: its place in the group, digests, which of them it knows."""

    lane = _WHO

    def __init__(self, check: _Check, place: int, differing: npt.NDArray[np.intp]) -> None:
        self.number, self.identity = check.number, check.identity
        self.check, self.place, self.differing = check, place, differing
        self.apart = ""
        self.missing = False

    def words(self) -> Words:
        asked = self.differing[:DETAILED]
        return np.concatenate([[self.place], self.check.digests[asked], self.check.known[asked]]).astype(np.int64)


class Channel(StepExchange):
    """Compares numbers among some ranks. No call waits.

    Args:
        ranks: global ranks, ascending, this one among them.
        contents: what is compared, in order, the same on all ranks.
        patience: see `PATIENCE`.

    Attributes:
        failed: why nothing is compared any more; empty as long as it is.

    Raises:
        RuntimeError: this process may not open so many files.
    """

    def __init__(self, ranks: Sequence[int], contents: Sequence[str], *, patience: float = PATIENCE) -> None:
        self.contents = tuple(contents)
        self._fingerprint = fingerprint(*contents)
        self._patience = patience
        self._results: deque[_Check] = deque()
        self._left_out: dict[str, int] = {}
        super().__init__(job_store(), ranks, dist.get_rank(), "replicas", LIMIT)

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
        while self._results and (differences := self._results[0].differences) is not None:
            self._results[0].done(differences)
            self._results.popleft()
        if self.silent_for(self._patience):
            self.fail(f"ranks {self.ranks} did not all answer in {self._patience:.0f} s: is the probe off on one of them?")

    def left_out(self) -> dict[str, int]:
        """Checks that were not made since the last call, by the reason."""
        with self._lock:
            left, self._left_out = self._left_out, {}
        return left

    def _make_lanes(self) -> list[Lane]:
        return [Lane(self._shape, _lowest), Lane(self._shape, lambda a, b: np.concatenate([a, b]), self._keep_table)]

    def _keep_table(self, words: Words) -> Words:
        """What all ranks have; it stays on the first of them."""
        table = words.reshape(len(self.ranks), -1)
        self._table = table[np.argsort(table[:, 0])]
        return NOTHING

    def _receive(self, item: _Check | _Who, words: Words) -> None:
        if isinstance(item, _Check):
            low, high = words.reshape(2, -1)
            anywhere = (low != _UNKNOWN) | (high != _UNKNOWN)
            differing = np.flatnonzero(anywhere & (low != ~high))
            if not len(differing):
                item.differences = []
            self._results.append(item)
            if len(differing):
                super().submit(_Who(item, self._place, differing))
            return
        differences = [Difference(int(place)) for place in item.differing]
        if self.leader:
            digests, known = np.split(self._table[:, 1:], 2, axis=1)  # [ranks, asked] each
            for i, difference in enumerate(differences[: digests.shape[1]]):
                differences[i] = Difference(difference.place, digests[:, i], known[:, i] != 0)
        item.check.differences = differences

    def _leave_apart(self, item: _Check | _Who, why: str, /) -> None:
        if isinstance(item, _Who):  # that they differ is known
            item.check.differences = [Difference(int(place)) for place in item.differing]
            return
        with self._lock:
            self._left_out[why] = self._left_out.get(why, 0) + 1

    def _miss_ranks(self, items: Sequence[_Check | _Who], who: str) -> None:
        for item in items:
            self._leave_apart(item, who)

    def _differ(self, _item: _Check | _Who, /) -> None:
        raise UsageError(
            f"ranks {self.ranks} do not hold copies of the same parameters; model, optimizer and monitor settings have to be the "
            "same on all of them"
        )


def _lowest(a: Words, b: Words) -> Words:
    if len(a) != len(b):
        raise ValueError("other tensors")
    return np.minimum(a, b)
