"""From the settings of a training to what carries its calls away, and its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msprobe_engine.accuracy.online.addresses import check_plain, is_loopback
from msprobe_engine.accuracy.online.certificates.tls import CLIENT, Credentials
from msprobe_engine.accuracy.online.directory.client import DirectoryClient
from msprobe_engine.accuracy.online.events import Counts, OnEvent
from msprobe_engine.accuracy.online.options import Address, ClientOptions, TlsOptions
from msprobe_engine.accuracy.online.sender import Transport
from msprobe_engine.accuracy.online.tcp.client import Client
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.schema import OnlineSettings

NEVER_THERE_SECONDS = 5.0
"""How long the end of a training waits for a benchmark host that was never reached, or a directory that cannot be written."""
_LOOK_SECONDS = 0.02


def tls_of(tls_path: str | None, host: str, check_host: bool = True) -> TlsOptions | None:
    """TLS with the files of ``tls_path``. Without one: with those of the working directory, as the existing tool has it, and on loopback
    none. An empty one: none."""
    if tls_path is None:
        return None if is_loopback(host) else TlsOptions(Path("./"), check_host)
    return TlsOptions(Path(tls_path).expanduser(), check_host) if tls_path else None


def check(online: OnlineSettings) -> None:
    """Can anything be sent with these settings? The other end need not be there.

    Raises:
        SettingsError: the directory or the certificates cannot be used, or plain TCP to another host was not asked for.
    """
    if online.nfs_path:
        if not Path(online.nfs_path).expanduser().is_dir():
            raise SettingsError(f"nfs_path: {online.nfs_path} is no directory; give one that this host and the benchmark host have")
        return
    tls = tls_of(online.tls_path, online.host, online.tls_check_host)
    check_plain(online.host, tls is not None, online.plain_tcp, "host")
    if tls is not None:
        Credentials(tls, CLIENT)


def connect(online: OnlineSettings, rank: int, queue_bytes: int, on_event: OnEvent) -> Transport:
    """What carries messages to the benchmark host. It need not be there yet.

    Args:
        queue_bytes: messages that may wait.
        on_event: told what happens, from background threads.

    Raises:
        SettingsError: see `check`.
    """
    options = ClientOptions(
        rank=rank,
        tls=None if online.nfs_path else tls_of(online.tls_path, online.host, online.tls_check_host),
        plain=online.plain_tcp,
        queue_bytes=queue_bytes,
        policy=online.policy,
        longest_wait=online.longest_wait,
    )
    if online.nfs_path:
        return DirectoryClient(Path(online.nfs_path).expanduser(), options, on_event)
    return Client(Address(online.host, online.port), options, on_event)


def finish(transport: Transport, patience: float, remaining: Callable[[], float]) -> Counts:
    """Say that this was all, when everything has arrived or nothing more does.

    Args:
        patience: seconds without progress that are waited.
        remaining: seconds that the process may take to end; asked again and again.
    """
    before, since = transport.counts(), time.monotonic()
    while (now := transport.counts()).waiting:
        if now.acknowledged != before.acknowledged or now.connections != before.connections:
            before, since = now, time.monotonic()
        limit = patience if now.connections else min(patience, NEVER_THERE_SECONDS)
        if time.monotonic() - since > limit or remaining() < 1.0:
            break
        time.sleep(_LOOK_SECONDS)
    return transport.close(max(0.1, min(2.0, remaining() / 2)))
