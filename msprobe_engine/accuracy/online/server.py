"""The receiving end over TCP: one thread per client that reads, one that hands messages to the handler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msprobe_engine.accuracy.online.events import Counts, OnEvent, Peer
from msprobe_engine.accuracy.online.options import Address, ServerOptions

Handler = Callable[[Peer, Mapping[str, Any], memoryview], None]
"""Called with the client, the header and the payload (whose memory is used again after the call), for one client one message at a time
and in order, for several clients from several threads at once. When it returns the message is safe and is acknowledged.

Raises:
    OSError: not now (disk full, ...): the connection is closed and the message comes again.
    ProbeError, ValueError, ...: the message cannot be used: it is refused, counted on both sides, and not sent again.
"""
Last = Callable[[Peer], int]
"""Number of the last message of this session that is safe, 0 for none. A server that was killed asks its handler's owner so, and messages
that were safe but not acknowledged are not handed over twice."""


@dataclass(frozen=True)
class SessionState:
    """One client as the server knows it.

    Attributes:
        peer: who.
        connected: there is a connection now.
        received: messages handed over with success; `bytes` of headers and payloads.
        refused: messages the handler did not want.
        missing: numbers that never came.
        seconds: since the last sign of life.
        final: the client's own counts, once it has said that this was all; None before.
    """

    peer: Peer
    connected: bool
    received: int
    bytes: int
    refused: int
    missing: int
    seconds: float
    final: Counts | None


class Server:
    """Listens until `close`.

    Args:
        address: host to listen on (loopback unless told otherwise) and port.
        handler: see `Handler`.
        options: limits, times, TLS.
        on_event: told what happens.
        last: see `Last`; None: what this process itself remembers.

    Raises:
        SettingsError: certificates cannot be used, or plain TCP outside of loopback without ``plain``.
        TransportError: the port is taken, the address is not of this machine.
    """

    def __init__(self, address: Address, handler: Handler, options: ServerOptions, on_event: OnEvent, last: Last | None = None) -> None:
        raise NotImplementedError

    @property
    def port(self) -> int:
        """The port in use."""
        raise NotImplementedError

    def sessions(self) -> list[SessionState]:
        """All clients that were ever connected, in the order in which they came."""
        raise NotImplementedError

    def close(self, timeout: float = 10.0) -> None:
        """Stop listening, let handlers finish what they are at (for at most `timeout` seconds), acknowledge it, and hang up."""
        raise NotImplementedError
