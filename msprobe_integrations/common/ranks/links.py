"""The connections of one rank to its neighbours in one tree of ranks."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable

from msprobe_integrations.common.ranks.addresses import machine_id
from msprobe_integrations.common.ranks.connections import Connection, Loop, decode, encode
from msprobe_integrations.common.ranks.tree import Message

CONNECTING = 15.0
"""Seconds that a neighbour may take to connect once all ranks have come."""
_EACH_ADDRESS = 3.0
_RETRY = 0.1


class Links:
    """Connections of one rank to its neighbours in one tree. On the loop's thread.

    Args:
        key: of the tree, the same on all its ranks, 20 bytes.
        children: places that connect to this one.
        receive: gets what a neighbour says.
        lose: hears that a neighbour cannot be reached, and why.
    """

    def __init__(
        self,
        loop: Loop,
        key: bytes,
        place: int,
        children: tuple[int, ...],
        receive: Callable[[int, Message], None],
        lose: Callable[[int, str], None],
    ) -> None:
        self._loop, self._key, self._place, self._children = loop, key, place, children
        self._receive, self._lose = receive, lose
        self._there: dict[int, Connection] = {}
        self._kept: dict[int, list[bytes]] = {}
        self._closed = False
        loop.open_links(key, self)
        if children:
            loop.later(CONNECTING + _EACH_ADDRESS, self._look_for_children)

    def reach(self, parent: int, address: str) -> None:
        """Connect to the rank above this one."""
        secret, port, machine, *hosts = address.split(" ")
        if machine == machine_id():
            hosts = ["127.0.0.1", *hosts]
        self._parent, self._secret = parent, bytes.fromhex(secret)
        self._until = time.monotonic() + CONNECTING
        self._try_host([(host, int(port)) for host in hosts], 0, "it says no address")

    def send(self, place: int, message: Message) -> None:
        """To a neighbour; what cannot be sent yet waits."""
        data = encode(message)
        if (connection := self._there.get(place)) is not None:
            connection.send(data)
        else:
            self._kept.setdefault(place, []).append(data)

    def adopt(self, connection: Connection) -> None:
        """A child has connected."""
        if connection.place in self._there or connection.place not in self._children:
            connection.close()
            return
        self._add_connection(connection)

    def close(self) -> None:
        """What was sent arrives still."""
        self._closed = True
        self._loop.end_links(self._key)
        for connection in self._there.values():
            connection.finish()

    def _add_connection(self, connection: Connection) -> None:
        self._there[connection.place] = connection
        connection.set_handler(self._read_messages)
        for data in self._kept.pop(connection.place, []):
            connection.send(data)
        self._read_messages(connection)

    def _read_messages(self, connection: Connection) -> None:
        try:
            for message in decode(connection.data):
                if self._closed:
                    return
                self._receive(connection.place, message)
        except ValueError as error:
            connection.ended = str(error)
        if connection.ended and not self._closed:
            connection.close()
            self._lose(connection.place, connection.ended)

    def _look_for_children(self) -> None:
        missing = [place for place in self._children if place not in self._there]
        if missing and not self._closed:
            self._lose(missing[0], "it did not connect")

    def _try_host(self, hosts: list[tuple[str, int]], number: int, why: str) -> None:
        if self._closed:
            return
        if number >= len(hosts):
            if not hosts or time.monotonic() > self._until:
                self._lose(self._parent, why)
            else:
                self._loop.later(_RETRY, lambda: self._try_host(hosts, 0, why))
            return
        host = hosts[number]
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host[0] else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            sock.connect_ex(host)
        except OSError as error:
            self._try_host(hosts, number + 1, f"{host[0]}: {error.strerror}")
            return
        decided = False

        def decide(error: str) -> None:
            nonlocal decided
            if decided:
                return
            decided = True
            self._loop.watch(sock, 0, lambda _events: None)
            if error or self._closed:
                sock.close()
                self._try_host(hosts, number + 1, f"{host[0]} port {host[1]}: {error}")
                return
            connection = Connection(self._loop, sock)
            connection.place = self._parent
            connection.send(self._loop.hello(self._secret, self._key, self._place))
            self._add_connection(connection)

        def on_events(_events: int) -> None:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            decide(os.strerror(code) if code else "")

        self._loop.watch(sock, selectors.EVENT_WRITE, on_events)
        self._loop.later(_EACH_ADDRESS, lambda: decide("no answer"))
