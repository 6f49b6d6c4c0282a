"""Messages that wait to be sent or to be acknowledged: bounded, numbered, counted. Whoever sends them is a thread of its own."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msprobe_engine.accuracy.online.events import DROPPING, FAULT, RECOVERED, REFUSED, Counts, Event, OnEvent
from msprobe_engine.accuracy.online.options import BLOCK, ClientOptions
from msprobe_engine.accuracy.online.tcp.frames import MESSAGE_HEADER_BYTES, encode_header
from msprobe_engine.core.guard import raise_of_training, suppress_faults

Buffer = bytes | bytearray | memoryview


class Message(NamedTuple):
    """One message of the queue; `size` is what header and payload have together, `payload` the second alone."""

    sequence: int
    step: int | None
    header: bytes
    buffers: tuple[memoryview, ...]
    size: int
    payload: int
    done: Callable[[], None] | None


def report_event(on_event: OnEvent, event: Event) -> None:
    """Call `on_event`; what it raises is its own affair."""
    with suppress_faults():
        on_event(event)


class Outbox:
    """See the module. `offer` may be called from any thread, the methods for the sender from one.

    Args:
        options: limits and policy.
        on_event: told when messages begin to be dropped, and when they no longer are.
        wake: called when there is something new for the sender.
    """

    def __init__(self, options: ClientOptions, on_event: OnEvent, wake: Callable[[], None]) -> None:
        self._options = options
        self._on_event = on_event
        self._wake = wake
        self._room = threading.Condition()
        self._unsent: deque[Message] = deque()
        self._flying: deque[Message] = deque()
        self._bytes = 0
        self._sequence = 0
        self._furthest = 0
        self._process = os.getpid()
        self._ended = False
        self._patient = True
        self._dropping = 0
        self._faults = 0
        self._limit = options.message_bytes
        self._offered = self._acknowledged = self._refused = self._dropped = self._lost = self._sent_bytes = self._resent = 0
        self._waited = 0.0

    def offer(
        self, header: Mapping[str, Any], buffers: Sequence[Buffer], on_sent: Callable[[], None] | None, important: bool = False
    ) -> bool:
        """Take a message, as `Client.send`. Never raises."""
        taken = False
        try:  # the thread that sends is not in a forked child, and the lock may be held by a thread that is not there either
            taken = os.getpid() == self._process and self._offer(header, buffers, on_sent, important)
        except Exception as error:
            raise_of_training(error)
            with self._room:
                self._offered += 1
                self._dropped += 1
                self._faults += 1
                first = self._faults == 1
            if first:
                said = f"a message cannot be sent: {type(error).__name__}: {error} (further ones are counted only)"
                report_event(self._on_event, Event(FAULT, said, bad=True))
        if not taken:
            _finish(on_sent)
        return taken

    def _offer(self, header: Mapping[str, Any], buffers: Sequence[Buffer], on_sent: Callable[[], None] | None, important: bool) -> bool:
        text = encode_header(header)
        views = tuple(view for view in map(_bytes, buffers) if view.nbytes)
        payload = sum(view.nbytes for view in views)
        size = len(text) + payload
        step = header.get("step")
        recovered = 0
        problem = ""
        with self._room:
            self._offered += 1
            if self._ended:
                problem = "a message comes after the end"
            elif size > self._limit or len(text) > MESSAGE_HEADER_BYTES:
                problem = (
                    f"a message of {size} bytes (header {len(text)}) is larger than allowed ({self._limit}, header {MESSAGE_HEADER_BYTES})"
                )
            elif not self._wait_for_room(size, self._options.queue_bytes * (2 if important else 1)):
                problem = f"the queue is full ({self._bytes} of {self._options.queue_bytes} bytes wait); messages are dropped and counted"
            if problem:
                self._dropped += 1
                self._dropping += 1
                first = self._dropping == 1
            else:
                recovered, self._dropping = self._dropping, 0
                self._sequence += 1
                whole = Message(self._sequence, step if isinstance(step, int) else None, text, views, size, payload, on_sent)
                self._unsent.append(whole)
                self._bytes += size
        if problem:
            if first:
                report_event(self._on_event, Event(DROPPING, problem, bad=True))
            return False
        self._wake()
        if recovered:
            report_event(self._on_event, Event(RECOVERED, f"messages are taken again, {recovered} were dropped in between", bad=True))
        return True

    def _wait_for_room(self, size: int, room: int) -> bool:
        """With the lock held. One message may always wait, however large."""

        def fits() -> bool:
            return self._bytes + size <= room or self._bytes == 0 or self._ended

        if fits() or self._options.policy != BLOCK or not self._patient:
            return fits() and not self._ended
        begin = time.monotonic()
        got = self._room.wait_for(lambda: fits() or not self._patient, self._options.longest_wait) and fits()
        self._waited += time.monotonic() - begin
        if not got:
            self._patient = False
        return got and not self._ended

    def next(self) -> Message | None:
        """For the sender: the next message that was not sent on this connection."""
        with self._room:
            if not self._unsent:
                return None
            message = self._unsent.popleft()
            self._flying.append(message)
            if message.sequence <= self._furthest:
                self._resent += 1
            else:
                self._furthest = message.sequence
            return message

    def rewind(self, have: int) -> None:
        """For the sender: a new connection, on which all after number `have` must be sent again."""
        with self._room:
            while self._flying and self._flying[-1].sequence > have:
                self._unsent.appendleft(self._flying.pop())
            while self._unsent and self._unsent[0].sequence <= have:
                self._flying.append(self._unsent.popleft())

    def acknowledge(self, sequence: int, refused: Mapping[int, str] | None = None) -> bool:
        """For the sender: everything up to this number is done with. False: such a message was never sent."""
        gone: list[Message] = []
        said = 0
        with self._room:
            if sequence > self._furthest:
                return False
            while self._flying and self._flying[0].sequence <= sequence:
                message = self._flying.popleft()
                gone.append(message)
                self._bytes -= message.size
                if refused and message.sequence in refused:
                    self._refused += 1
                    said += self._refused == 1
                else:
                    self._acknowledged += 1
                    self._sent_bytes += message.size
            if gone:
                self._patient = True
                self._room.notify_all()
        if said and refused:
            number, reason = next(iter(refused.items()))
            report_event(
                self._on_event,
                Event(REFUSED, f"the server cannot use message {number}: {reason} (further ones are counted only)", bad=True),
            )
        for message in gone:
            _finish(message.done)
        return True

    def impatient(self) -> None:
        """For the sender: nobody will take anything for a while; do not wait for room until something was acknowledged."""
        with self._room:
            self._patient = False
            self._room.notify_all()

    def limit(self, message_bytes: int) -> None:
        """For the sender: the server takes no larger messages."""
        with self._room:
            self._limit = min(self._options.message_bytes, message_bytes)
            too_large = [message for message in self._unsent if message.size > self._limit]
            if too_large:  # the server counts their numbers as missing
                self._unsent = deque(message for message in self._unsent if message.size <= self._limit)
                self._bytes -= sum(message.size for message in too_large)
                self._dropped += len(too_large)
                self._room.notify_all()
        for message in too_large:
            _finish(message.done)
        if too_large:
            said = f"{len(too_large)} messages are larger than the {message_bytes} bytes that the server takes, and are dropped"
            report_event(self._on_event, Event(DROPPING, said, bad=True))

    @property
    def dropped(self) -> int:
        """Messages given up so far."""
        return self._dropped

    @property
    def first(self) -> int:
        """Number of the oldest message that is still here; of the next one when there is none."""
        with self._room:
            oldest = self._flying or self._unsent
            return oldest[0].sequence if oldest else self._sequence + 1

    @property
    def last(self) -> int:
        """Number of the newest message; 0 when there was none."""
        return self._sequence

    @property
    def empty(self) -> bool:
        """Is everything acknowledged?"""
        with self._room:
            return not self._flying and not self._unsent

    def end_offers(self) -> None:
        """No more offers."""
        with self._room:
            self._ended = True
            self._room.notify_all()
        self._wake()

    def drain(self, timeout: float) -> bool:
        """Wait until `empty`; False when it took too long."""
        with self._room:
            return self._room.wait_for(lambda: not self._flying and not self._unsent, timeout)

    def give_up(self) -> None:
        """Count what is left as lost."""
        with self._room:
            left = [*self._flying, *self._unsent]
            self._flying.clear()
            self._unsent.clear()
            self._lost += len(left)
            self._bytes = 0
            self._room.notify_all()
        for message in left:
            _finish(message.done)

    def counts(self, connections: int) -> Counts:
        """See `Counts`."""
        with self._room:
            waiting = len(self._flying) + len(self._unsent)
            return Counts(
                self._offered, self._acknowledged, self._refused, self._dropped, self._lost, waiting, self._sent_bytes, self._resent,
                connections, self._waited,
            )  # fmt: skip


def _bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B") if view.nbytes else memoryview(b"")


def _finish(done: Callable[[], None] | None) -> None:
    if done is not None:
        with suppress_faults():
            done()
