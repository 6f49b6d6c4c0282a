"""Where the processes of a job reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from pathlib import Path

_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the interface over which the hosts of a job reach each other; gloo has the same variable."""
_SIOCGIFADDR = 0x8915


def machine_id() -> str:
    """The same in all processes that reach each other over the loopback interface, and in no others."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    return f"?{secrets.token_hex(8)}"


def own_hosts(other: str) -> list[str]:
    """Addresses of this machine, the likeliest that other machines reach it by first.

    Args:
        other: a machine that this one can reach; empty: none is known.
    """
    return list(dict.fromkeys([*_hosts_of_interface(), *_hosts_towards(other), *_hosts_by_name()]))


def _hosts_of_interface() -> list[str]:
    name = os.environ.get(_INTERFACE, "").encode()[:15]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return [socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name))[20:24])] if name else []
    return []


def _hosts_towards(host: str) -> list[str]:
    """The address that this process has for whoever holds the store; nothing is sent."""
    if host:
        with contextlib.suppress(OSError):
            family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address)
                return [str(sock.getsockname()[0])]
    return []


def _hosts_by_name() -> list[str]:
    with contextlib.suppress(OSError):
        return [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return []
