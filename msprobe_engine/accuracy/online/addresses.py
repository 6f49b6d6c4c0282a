"""Is an address of this machine only, and who is at the other end of a connection within it?"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys

from msprobe_engine.core.errors import SettingsError


def is_loopback(host: str) -> bool:
    """True when `host` can be reached from this machine only. A name counts when all its addresses do; an unknown one does not."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        pass
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(str(text).partition("%")[0]).is_loopback for text in found)


def check_plain(host: str, tls: bool, plain: bool, what: str) -> None:
    """Refuse plain TCP that other hosts can hear unless it is meant.

    Raises:
        SettingsError: it is not meant.
    """
    if not tls and not plain and not is_loopback(host):
        raise SettingsError(
            f"{what} {host}: without TLS everybody in the network could read tensors and send some; make certificates with "
            "'msprobe certs' and set tls_path on both hosts, or allow plain TCP in a network that only you use"
        )


def is_strangers(connection: socket.socket) -> bool:
    """Is the other end of this loopback connection a program of another user? False when that cannot be told (not Linux, a tunnel).

    ``/proc/net/tcp`` lists connections with the user they belong to (proc(5)); root may do everything anyway.
    """
    local, remote = connection.getsockname(), connection.getpeername()
    family = connection.family
    if not sys.platform.startswith("linux") or not is_loopback(remote[0]):
        return False
    remote_listed = f"{_as_listed(remote[0], family)}:{remote[1]:04X}"
    local_listed = f"{_as_listed(local[0], family)}:{local[1]:04X}"
    try:
        with open("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp", encoding="ascii") as file:
            for line in file:
                fields = line.split()
                if len(fields) > 7 and fields[1] == remote_listed and fields[2] == local_listed:
                    return int(fields[7]) not in (0, os.getuid())
    except (OSError, ValueError):
        return False
    return False


def _as_listed(host: str, family: socket.AddressFamily | int) -> str:
    """An address as /proc has it: words of 32 bits in the order of this machine."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words)
