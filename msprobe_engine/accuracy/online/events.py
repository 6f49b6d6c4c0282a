"""What both ends of the online path tell their owner: who the other end is, what happened, and how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CONNECTED, RECONNECTED, DISCONNECTED, UNREACHABLE = "connected", "reconnected", "disconnected", "unreachable"
REFUSED, DROPPING, RECOVERED, LOST, FINISHED, GONE, EXPIRING, FAULT = (
    "refused", "dropping", "recovered", "lost", "finished", "gone", "expiring", "fault",
)  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """The other end of a server's conversation: one training process.

    Attributes:
        session: random name (32 hex digits) of this process; a restart has another.
        rank: what the client says its rank is.
        sequence: number of the message at hand, from 1; 0 outside of a message.
        address: where it comes from, for messages (``10.0.0.5:41234`` or a path).
        name: common name of its certificate, "" without TLS.
        lost: messages that the client says it has given up so far (queue full); they have no number.
    """

    session: str
    rank: int
    sequence: int = 0
    address: str = ""
    name: str = ""
    lost: int = 0


@dataclass(frozen=True)
class Event:
    """Something worth a line.

    Attributes:
        kind: one of the constants of this module.
        message: one sentence for people, complete: what, where, what to do.
        bad: data is lost or somebody was refused; worth a warning, the others are information.
        peer: whom it is about; None when nobody is known.
    """

    kind: str
    message: str
    bad: bool = False
    peer: Peer | None = None


OnEvent = Callable[[Event], None]
"""Called from background threads, seldom, never with a lock held; what it raises is ignored."""


@dataclass(frozen=True)
class Counts:
    """What became of the messages of one client. ``offered == acknowledged + refused + dropped + lost + waiting`` always.

    Attributes:
        offered: calls of `send`.
        acknowledged: safe at the server (TCP) or complete in the directory.
        refused: the server's handler cannot use them; it says why in an event.
        dropped: no room in the queue, or larger than a message may be.
        lost: were in the queue when `close` ran out of time, or were between the servers when one came back without its memory.
        waiting: in the queue now.
        bytes: of headers and payloads acknowledged.
        resent: sent more than once because a connection broke.
        connections: how often a connection was made.
        waited_seconds: how long `send` has made its callers wait, in all.
    """

    offered: int = 0
    acknowledged: int = 0
    refused: int = 0
    dropped: int = 0
    lost: int = 0
    waiting: int = 0
    bytes: int = 0
    resent: int = 0
    connections: int = 0
    waited_seconds: float = 0.0
