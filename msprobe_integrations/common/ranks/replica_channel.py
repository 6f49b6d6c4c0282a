"""What the replica check needs of a transport between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
SILENT = "it has no probe, or one whose settings leave this out"
"""What is said of a rank that says nothing."""


class Difference(NamedTuple):
    """A tensor that is not the same on all ranks.

    Attributes:
        digests: of every rank of the channel, [ranks] int64; None where it was not asked, or on other ranks than the lowest.
        known: which of them are there, [ranks].
    """

    place: int
    digests: Words | None = None
    known: Mask | None = None


Done = Callable[[list[Difference]], None]


def fingerprint(*texts: str) -> int:
    """The same number, 56 bits, for the same texts."""
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=7).digest(), "big")


class Channel(Protocol):
    """Compares numbers among some ranks, in the background. No call waits.

    Attributes:
        ranks: global ranks, ascending, this one among them.
        contents: what is compared, in order, the same on all ranks.
        leader: this is the lowest rank, the one that learns who has what.
        failed: why nothing is compared any more; empty as long as it is.
    """

    ranks: list[int]
    contents: tuple[str, ...]
    leader: bool
    failed: str

    @property
    def under_way(self) -> int:
        """Checks that have begun and have no result yet; none of a channel that has failed."""
        ...

    @property
    def idle(self) -> bool:
        """Nothing is under way."""
        ...

    def submit(self, step: int, digests: Words, known: Mask, done: Done) -> None:
        """Compare; `done` is called by a later `poll` with what differs.

        Args:
            step: the same on all ranks.
            digests, known: one for each of the contents, [n]; what is not known is not compared.
        """
        ...

    def poll(self) -> None:
        """Hand on what has arrived. Never waits; a fault of the transport is in `failed` afterwards."""
        ...

    def left_out(self) -> dict[str, int]:
        """Checks that were not made since the last call because not all ranks had them, by the reason."""
        ...

    def hurry(self) -> None:
        """The end of the run waits: ranks that have not come yet are waited for a little only."""
        ...

    def close(self, why: str = ...) -> None:
        """Leave; does not wait for ranks that do not answer.

        Args:
            why: what the other ranks say of this one.
        """
        ...


class Ranks(Protocol):
    """The ranks of a job, as a framework knows them."""

    def rank(self) -> int | None:
        """This one; None where no ranks are joined."""
        ...

    def members(self, group: Any) -> Sequence[int]:
        """Global ranks of a group."""
        ...

    def channel(self, ranks: Sequence[int], contents: Sequence[str]) -> Channel:
        """Connect these ranks, in the background, when all of them have come. Raises what goes wrong."""
        ...
