"""Where and how: addresses, limits and times of the online path. Units are bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

BLOCK, DROP = "block", "drop"
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class Address:
    """Host name or IP address (v4 or v6), and port; a server may take port 0 for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class TlsOptions:
    """TLS with certificates on both sides.

    Attributes:
        directory: ``tls_path``: client.key, client.crt (or server.key, server.crt), ca.crt and, when there, crl.pem.
        check_host: a server's certificate must name the host that was connected to.
    """

    directory: Path
    check_host: bool = True


@dataclass(frozen=True)
class ClientOptions:
    """Of a sending end.

    Attributes:
        tls: None: plain TCP; outside of loopback that has to be allowed with `plain`.
        plain: plain TCP to another host is meant.
        queue_bytes: headers and payloads that may wait; one message alone may be larger.
        policy: `BLOCK`: `send` waits for room; `DROP`: it gives the message up and counts it.
        longest_wait: with `BLOCK`: longest wait in one `send`. A wait that ran out is not repeated until the server has taken something.
        message_bytes: larger messages are given up and counted; the server's own limit counts too.
        heartbeat: a sign of life is sent after so much silence.
        silence: a server that says nothing for so long is taken for gone, and a connection is made anew.
        connect_seconds: longest time for one attempt to connect, TLS and greeting included.
        retry_seconds: longest pause between attempts (they begin at 0.1 and double).
        directory_bytes: shared directory: most that may lie there unread.
    """

    rank: int = 0
    tls: TlsOptions | None = None
    plain: bool = False
    queue_bytes: int = 256 * MIB
    policy: str = BLOCK
    longest_wait: float = 60.0
    message_bytes: int = 4 * GIB
    heartbeat: float = 5.0
    silence: float = 30.0
    connect_seconds: float = 10.0
    retry_seconds: float = 10.0
    directory_bytes: int = 16 * GIB


@dataclass(frozen=True)
class ServerOptions:
    """Of a receiving end.

    Attributes:
        tls: None: plain TCP; to listen outside of loopback without has to be allowed with `plain`.
        plain: plain TCP for other hosts is meant.
        ranks: ranks that are welcome; empty: all.
        message_bytes: a larger message ends the connection, before memory is taken for it.
        memory_bytes: for messages of all clients that are being received or wait for the handler; one alone may be larger.
        read_ahead: bytes of one client that may wait for the handler; the message that goes beyond is still received.
        heartbeat, silence: as with the client.
        greeting_seconds: time for TLS and greeting together; who needs longer is cut off.
        least_rate: bytes per second, on average over a message after `silence`; who is slower is cut off.
        newcomers: connections that have not said who they are; of more the oldest is cut off.
        clients: connections in all.
        gap_seconds: shared directory: how long a missing message is waited for when later ones are there.
    """

    tls: TlsOptions | None = None
    plain: bool = False
    ranks: frozenset[int] = field(default_factory=frozenset)
    message_bytes: int = 4 * GIB
    memory_bytes: int = 8 * GIB
    read_ahead: int = 32 * MIB
    heartbeat: float = 5.0
    silence: float = 30.0
    greeting_seconds: float = 10.0
    least_rate: int = 64 << 10
    newcomers: int = 64
    clients: int = 4096
    gap_seconds: float = 30.0
