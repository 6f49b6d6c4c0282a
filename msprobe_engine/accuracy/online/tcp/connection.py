"""One connection of the server: TLS, greeting, frames in, acknowledgements out. A thread of its own, and never one that waits for long."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import fields

from msprobe_engine.accuracy.online.addresses import is_strangers
from msprobe_engine.accuracy.online.budget import Budget
from msprobe_engine.accuracy.online.certificates.tls import Credentials
from msprobe_engine.accuracy.online.events import Counts, Peer
from msprobe_engine.accuracy.online.options import ServerOptions
from msprobe_engine.accuracy.online.tcp.channel import CLOSED, Channel, Waker
from msprobe_engine.accuracy.online.tcp.frames import Frame, FrameReader, Kind, Need, encode_control, parse_header
from msprobe_engine.accuracy.online.tcp.session import Session
from msprobe_engine.core.errors import TransportError

_SESSION = re.compile(r"[0-9a-f]{32}")
_LARGEST_RANK = 1 << 24
_LARGEST = 1 << 62
_BATCH = 8 << 20
"""Bytes received before acknowledgements are looked at again."""
_ANSWER_SECONDS = 0.005
"""Acknowledgements while more is under way are not sent more often."""
_FAREWELL_SECONDS = 1.0


class Connection:
    """See the module. `start` begins its thread.

    Args:
        address: of the other end, for messages.
        credentials: None: without TLS.
        enter, left: of the `Server` it belongs to; told that the client has said who it is, and that the connection has ended.
    """

    def __init__(
        self, accepted: socket.socket, address: str, options: ServerOptions, credentials: Credentials | None, budget: Budget,
        enter: Callable[[Connection, Peer], Session], left: Callable[[Connection, Session | None, BaseException | None], None],
    ) -> None:  # fmt: skip
        self.address = address
        self._options = options
        self._credentials, self._budget, self._enter, self._left = credentials, budget, enter, left
        self._socket = accepted
        self._channel = Channel(accepted)
        self._waker = Waker()
        self._session: Session | None = None
        self._cut = ""
        self._need: Need | None = None
        self._taken = 0
        self._acknowledged = -1
        self._answered = 0.0
        self._thread = threading.Thread(target=self._run, name="msprobe-online", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something to acknowledge, or it was cut."""
        self._waker.wake()

    def hang_up(self, reason: str) -> None:
        """Hang up as soon as possible; `reason` is told to the client."""
        self._cut = reason
        self._waker.wake()

    def join(self, timeout: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        problem: BaseException | None = None
        try:
            reader = FrameReader((Kind.HELLO,), self._options.message_bytes)
            self._session = session = self._receive_greeting(reader)
            if session is not None:
                reader.kinds = frozenset((Kind.MESSAGE, Kind.ALIVE, Kind.END))
                self._serve(session, reader)
        except Exception as error:
            problem = error
        finally:
            self._farewell(problem)
            if self._taken:
                self._budget.release(self._taken)
            self._budget.leave(self._waker)
            self._left(self, self._session, problem)
            self._waker.close()

    def _farewell(self, problem: BaseException | None) -> None:
        """Say why, and give the other end the time to read it: what is closed with unread data throws away what was said."""
        if isinstance(problem, TransportError):
            self._channel.queue_bytes([encode_control(Kind.REFUSED, {"reason": str(problem)[:500]})])
        self._channel.drain(0.0 if isinstance(problem, ConnectionError) else _FAREWELL_SECONDS)

    def _receive_greeting(self, reader: FrameReader) -> Session | None:
        deadline = time.monotonic() + self._options.greeting_seconds
        if self._credentials is not None:
            self._channel.start_tls(self._credentials.context(), deadline, server_side=True, waker=self._waker, stop=lambda: self._cut)
        elif is_strangers(self._socket):
            raise TransportError("this connection comes from a program of another user of this machine; use TLS (tls_path) between users")
        while not self._cut:
            self._waker.clear()
            count = self._channel.receive(reader.target())
            if count == CLOSED:
                raise TransportError("the other end hung up before it said who it is")
            for part in reader.parse_received(count):
                assert isinstance(part, Frame)
                return self._welcome(part)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TransportError(f"no greeting within {self._options.greeting_seconds:g} s")
            if not count:
                self._channel.wait(remaining, self._waker)
        raise TransportError(self._cut)

    def _welcome(self, frame: Frame) -> Session | None:
        header = parse_header(frame.header)
        name = header.get("session")
        rank, first, lost = (whole(header.get(key), _LARGEST_RANK if key == "rank" else _LARGEST) for key in ("rank", "first", "lost"))
        if not (isinstance(name, str) and _SESSION.fullmatch(name)):
            raise TransportError("the greeting has no session of 32 hex digits")
        if rank is None or first is None or lost is None:
            raise TransportError("rank, first and lost of the greeting must be whole numbers from 0 on")
        if self._options.ranks and rank not in self._options.ranks:
            raise TransportError(f"rank {rank} is not in rank_list ({sorted(self._options.ranks)}) of the server")
        peer = Peer(name, rank, 0, self.address, self._channel.certificate_name, lost)
        session = self._enter(self, peer)
        safe, have = session.accept_greeting(first, lost)
        limit = self._options.message_bytes
        self._channel.queue_bytes([encode_control(Kind.WELCOME, {"safe": safe, "have": have, "message_bytes": limit})])
        return session

    def _serve(self, session: Session, reader: FrameReader) -> None:
        options = self._options
        said = time.monotonic()
        pace = Pace(said, options.silence, options.least_rate)
        while not self._cut:
            self._waker.clear()
            self._acknowledge(session, time.monotonic() - self._answered > _ANSWER_SECONDS)
            if self._channel.pending and self._channel.flush():
                said = time.monotonic()
            reading = self._may_read(session, reader)
            complete = self._read_frames(session, reader) if reading else 0
            session.kick()
            if complete < 0:
                return
            now = time.monotonic()
            heard, reader.bytes = reader.bytes > 0, 0
            if heard:
                session.seen = now
            problem = pace.find_problem(now, reading=reading, heard=heard, complete=complete > 0, inside=reader.inside)
            if problem:
                raise TransportError(problem)
            if now - said >= options.heartbeat and not self._channel.pending:
                self._channel.queue_bytes([encode_control(Kind.ALIVE)])
                said = now
                continue
            if complete or self._acknowledge(session, session.idle):
                continue
            self._channel.wait(min(options.heartbeat / 2, 1.0), self._waker, read=reading)
        raise TransportError(self._cut)

    def _acknowledge(self, session: Session, due: bool) -> bool:
        """Say what is safe, when there is something new; True when it was said."""
        if not due or session.safe == self._acknowledged:
            return False
        self._acknowledged, refused = session.pop_acknowledgement()
        self._answered = time.monotonic()
        self._channel.queue_bytes([encode_control(Kind.ACK, {"refused": refused} if refused else None, self._acknowledged)])
        return True

    def _may_read(self, session: Session, reader: FrameReader) -> bool:
        """Is there room for what may come?"""
        if not session.room:
            return False
        if self._need is not None:
            if not self._budget.acquire(self._need.size, self._waker):
                return False
            self._taken = self._need.size
            view, memory = self._budget.memory.get(self._need.payload)
            reader.give(view, memory)
            self._need = None
        return True

    def _read_frames(self, session: Session, reader: FrameReader) -> int:
        """Take in what is there; returns how many frames, -1 at the end of the conversation."""
        complete = 0
        size = 0
        count = 0  # what is in the reader already comes first
        while True:
            for part in reader.parse_received(count):
                if isinstance(part, Need):
                    self._need = part
                else:
                    complete += 1
                    if not self._handle_frame(session, part):
                        return -1
            size += count
            count = 0
            if size >= _BATCH:
                return complete + 1
            if self._need is not None:
                if not self._may_read(session, reader):
                    return complete
                continue
            if not session.room:
                return complete
            count = self._channel.receive(reader.target())
            if count == CLOSED:
                raise ConnectionResetError("the other end hung up")
            if not count:
                return complete

    def _handle_frame(self, session: Session, frame: Frame) -> bool:
        if frame.kind == Kind.MESSAGE:
            size, self._taken = self._taken, 0
            if not session.accept(frame):
                self._budget.release(size)
            return True
        header = parse_header(frame.header)
        if frame.kind == Kind.END:
            session.final = counts_of(header.get("counts"))
            self._channel.queue_bytes([encode_control(Kind.ENDED)])
            return False
        lost = whole(header.get("lost"))
        if lost is not None:
            session.record_lost(lost)
        return True


def whole(value: object, limit: int = _LARGEST) -> int | None:
    """A number that is one, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit else None


def counts_of(found: object) -> Counts:
    """What a client says of itself; what is no number is 0."""
    given: dict[str, object] = found if isinstance(found, dict) else {}
    waited = given.get("waited_seconds")
    seconds = 0.0
    if isinstance(waited, (int, float)) and waited is not True and 0 <= waited <= _LARGEST:  # 400 digits make no float
        seconds = float(waited)
    numbers = {f.name: whole(given.get(f.name)) or 0 for f in fields(Counts) if f.name != "waited_seconds"}
    return Counts(**numbers, waited_seconds=seconds)


class Pace:
    """See the module. Times are those of `time.monotonic`.

    Args:
        silence: seconds without a byte that are too many.
        least_rate: bytes per second that a message needs on average, after `silence`.
    """

    def __init__(self, now: float, silence: float, least_rate: float) -> None:
        self._silence = silence
        self._rate = least_rate
        self._heard = now
        self._began: float | None = None
        self._paused: float | None = None

    def find_problem(self, now: float, *, reading: bool, heard: bool, complete: bool, inside: int) -> str:
        """What is wrong, "" when nothing is.

        Args:
            reading: this end takes what comes.
            heard: something has come since the last look.
            complete: a frame has become complete since then.
            inside: bytes of the frame that has begun.
        """
        if heard:
            self._heard = now
        if not reading:
            self._paused = now if self._paused is None else self._paused
            return ""
        if self._paused is not None:
            self._heard += now - self._paused
            if self._began is not None:
                self._began += now - self._paused
            self._paused = None
        if not inside:
            self._began = None
        elif complete or self._began is None:
            self._began = now
        if now - self._heard > self._silence:
            return f"nothing was heard for {self._silence:g} s"
        if self._began is not None and now - self._began > self._silence + inside / self._rate:
            return f"a message of {inside} bytes has not come within {now - self._began:.0f} s, which is too slow"
        return ""
