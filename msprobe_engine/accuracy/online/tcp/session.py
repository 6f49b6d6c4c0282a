"""One client as the server knows it: what has come, what is safe, and the thread that hands messages to the handler.

A session outlives its connections. What has been received stays here until the handler has taken it, whatever happens to the connection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msprobe_engine.accuracy.online.budget import Budget
from msprobe_engine.accuracy.online.events import FAULT, LOST, RECOVERED, REFUSED, Counts, Event, OnEvent, Peer
from msprobe_engine.accuracy.online.send_queue import report_event
from msprobe_engine.accuracy.online.tcp.frames import Frame, parse_header

Handler = Callable[[Peer, Mapping[str, Any], memoryview], None]
"""Called with the client, the header and the payload (whose memory is used again after the call), for one client one message at a time
and in order, for several clients from several threads at once. When it returns the message is safe and is acknowledged.

Raises:
    OSError: not now (disk full, ...): the same message is handed over again after a pause; the client waits.
    ProbeError, ValueError, ...: the message cannot be used: it is refused, counted on both sides, and not sent again.
"""
Last = Callable[[Peer], int]
"""Number of the last message of this session that is safe, 0 for none. A server that was killed asks its handler's owner so, and messages
that were safe but not acknowledged are not handed over twice."""
_MOST = 4096
_WAKE_SECONDS = 0.005
_KICK = 512 << 10
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True)
class SessionState:
    """One client as the server knows it.

    Attributes:
        connected: there is a connection now.
        received: messages handed over with success; `bytes` of headers and payloads.
        refused: messages the handler did not want.
        missing: numbers that never came.
        waiting: messages received that the handler has not taken yet.
        seconds: since the last sign of life.
        final: the client's own counts, once it has said that this was all; None before.
    """

    peer: Peer
    connected: bool
    received: int
    bytes: int
    refused: int
    missing: int
    waiting: int
    seconds: float
    final: Counts | None


class Session:
    """See the module. `accept` is called by one connection at a time.

    Args:
        safe: number of the last message that is safe.
        budget: where the memory of messages goes back to.
        read_ahead: bytes that may wait, besides one message.
    """

    def __init__(self, peer: Peer, safe: int, handler: Handler, on_event: OnEvent, budget: Budget, read_ahead: int) -> None:
        self.peer = peer
        self.safe = self.have = safe
        self.final: Counts | None = None
        self.connection: Any = None
        self.seen = self.since = time.monotonic()
        self.gone_told = False
        self._handler = handler
        self._on_event = on_event
        self._budget = budget
        self._read_ahead = read_ahead
        self._changed = threading.Condition()
        self._inbox: deque[Frame] = deque()
        self._waiting = 0
        self._woken = 0.0
        self._worker: threading.Thread | None = None
        self._stopped = False
        self._reasons: list[tuple[int, str]] = []
        self._received = self._bytes = self._refused = self._missing = 0

    @property
    def room(self) -> bool:
        """May another message be received?"""
        return self._waiting < self._read_ahead and len(self._inbox) < _MOST

    @property
    def idle(self) -> bool:
        """Has the handler taken all there is?"""
        return not self._inbox

    @property
    def is_empty(self) -> bool:
        """Has not a single message come, nor the word that this was all?"""
        with self._changed:
            return self.final is None and not (self._inbox or self._received or self._refused)

    def accept_greeting(self, first: int, lost: int) -> tuple[int, int]:
        """A greeting: the client has no message before number `first` any more. Returns what is safe, and what has been received."""
        with self._changed:
            self.gone_told = False
            self.peer = replace(self.peer, lost=lost)
            gap = self._skip(first)
            answer = self.safe, self.have
        if gap:
            said = f"{self._who()}: {gap} messages before number {first} went to an earlier server, and are not here"
            report_event(self._on_event, Event(LOST, said, bad=True, peer=self.peer))
        return answer

    def _skip(self, first: int) -> int:
        """With the lock held: nothing between what is here and `first` will come."""
        gap = max(0, first - 1 - self.have)
        if gap:
            self._missing += gap
            self.have = first - 1
            if not self._inbox:
                self.safe = self.have
        return gap

    def accept(self, frame: Frame) -> bool:
        """Take a message that has arrived; False when it was here before. The handler may get it at the next `kick` only."""
        with self._changed:
            if frame.sequence <= self.have:
                return False
            self._skip(frame.sequence)
            self.have = frame.sequence
            self._inbox.append(frame)
            self._waiting += _size(frame)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=f"msprobe-handler-{self.peer.rank}", daemon=True)
                self._worker.start()
            elif self._waiting >= _KICK:
                self._changed.notify_all()
        return True

    def kick(self) -> None:
        """Nothing more has come for now. To wake the handler's thread for each message would cost more than a small message does."""
        if self._inbox:
            with self._changed:
                self._changed.notify_all()

    def reject(self, sequence: int, reason: str) -> None:
        """A message that cannot even be read; the handler does not see it."""
        with self._changed:
            self._skip(sequence)
            self.have = max(self.have, sequence)
            if not self._inbox:
                self.safe = self.have
            self._refused += 1
            first = self._refused == 1
        if first:
            said = f"{self._who()}: message {sequence} cannot be read ({reason}); further ones are counted only"
            report_event(self._on_event, Event(REFUSED, said, bad=True, peer=self.peer))

    def skip(self, first: int) -> None:
        """What is missing before number `first` will not come."""
        with self._changed:
            gap = self._skip(first)
        if gap:
            said = f"{self._who()}: {gap} messages before number {first} are missing and were given up"
            report_event(self._on_event, Event(LOST, said, bad=True, peer=self.peer))

    def pop_acknowledgement(self) -> tuple[int, list[tuple[int, str]]]:
        """For an acknowledgement: the last number that is done with, and what was refused since the last call."""
        with self._changed:
            reasons, self._reasons = self._reasons, []
            return self.safe, reasons

    def record_lost(self, count: int) -> None:
        """The client says that it has given up so many messages in all."""
        self.peer = replace(self.peer, lost=count)

    def stop(self, timeout: float) -> None:
        """Hand nothing more over; return when the handler has returned, or after `timeout` seconds."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            worker = self._worker
        if worker is not None:
            worker.join(timeout)

    def state(self) -> SessionState:
        """What is known now."""
        with self._changed:
            return SessionState(
                self.peer, self.connection is not None, self._received, self._bytes, self._refused, self._missing, len(self._inbox),
                time.monotonic() - self.seen, self.final,
            )  # fmt: skip

    def _who(self) -> str:
        return f"rank {self.peer.rank} ({self.peer.address})"

    def _work(self) -> None:
        while True:
            with self._changed:
                # a thread that has nothing to do for a minute ends; the next message starts another
                if not self._changed.wait_for(lambda: self._inbox or self._stopped, 60.0) or self._stopped:
                    self._worker = None
                    return
                frame = self._inbox[0]
            reason = self._handle(frame)
            if reason is None:
                continue  # stopped: it was not taken
            size = _size(frame)
            with self._changed:
                room = self.room
                self._inbox.popleft()
                self._waiting -= size
                self.safe = frame.sequence if self._inbox else self.have
                if reason:
                    self._refused += 1
                    if len(self._reasons) < 100:
                        self._reasons.append((frame.sequence, reason))
                else:
                    self._received += 1
                    self._bytes += size
                connection = self.connection
                news = not self._inbox or not room
            self._budget.memory.put(frame.memory)
            del frame
            self._budget.release(size)
            now = time.monotonic()
            if connection is not None and (news or now - self._woken > _WAKE_SECONDS):
                self._woken = now  # every wake costs more than a small message
                connection.wake()

    def _handle(self, frame: Frame) -> str | None:
        """Hand one message over until it is taken ("") or refused (why); None when the server stops in between."""
        tries = 0
        while True:
            try:
                p = self.peer
                peer = Peer(p.session, p.rank, frame.sequence, p.address, p.name, p.lost)  # `replace` costs three times as much
                self._handler(peer, parse_header(frame.header), frame.payload)
            except OSError as error:
                if not tries:
                    said = f"{self._who()}: message {frame.sequence} cannot be stored now ({error}); it is tried again, the client waits"
                    report_event(self._on_event, Event(FAULT, said, bad=True, peer=self.peer))
                tries += 1
                with self._changed:
                    if self._changed.wait_for(lambda: self._stopped, _PAUSES[min(tries, len(_PAUSES)) - 1]):
                        return None
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"[:300]
                if not self._refused:
                    said = f"{self._who()}: message {frame.sequence} cannot be used ({reason}); further ones are counted only"
                    report_event(self._on_event, Event(REFUSED, said, bad=True, peer=self.peer))
                return reason
            else:
                if tries:
                    report_event(self._on_event, Event(RECOVERED, f"{self._who()}: messages can be stored again", peer=self.peer))
                return ""


def _size(frame: Frame) -> int:
    return len(frame.header) + len(frame.payload)
