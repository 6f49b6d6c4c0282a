"""The sending end over TCP: a bounded queue, and one thread that connects, sends, and sends again what was not acknowledged."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msprobe_engine.accuracy.online.addresses import check_plain, is_loopback
from msprobe_engine.accuracy.online.certificates.tls import CLIENT, Credentials, explain
from msprobe_engine.accuracy.online.events import (
    CONNECTED,
    DISCONNECTED,
    EXPIRING,
    FAULT,
    FINISHED,
    LOST,
    RECONNECTED,
    REFUSED,
    UNREACHABLE,
    Counts,
    Event,
    OnEvent,
)
from msprobe_engine.accuracy.online.options import Address, ClientOptions
from msprobe_engine.accuracy.online.send_queue import Buffer, Outbox, report_event
from msprobe_engine.accuracy.online.tcp.channel import CLOSED, Channel, Waker
from msprobe_engine.accuracy.online.tcp.frames import (
    WITH_CRC,
    Frame,
    FrameReader,
    Kind,
    Need,
    checksum,
    encode_control,
    encode_prefix,
    parse_header,
)
from msprobe_engine.core.errors import ProbeError, TransportError

_FROM_SERVER = (Kind.WELCOME, Kind.REFUSED, Kind.ACK, Kind.ALIVE, Kind.ENDED)
_AHEAD = 4 << 20
"""Bytes given to the channel before the next message is taken from the queue."""
_REFUSED_SECONDS = 5.0
_END_SECONDS = 1.0
_AGAIN_SECONDS = 600.0
"""The same trouble is said again after so long."""


class _RefusedByServerError(TransportError):
    """The server does not want this client."""


class Client:
    """Sends messages to a `Server`; lives in the training process.

    Args:
        address: of the server. It need not be there yet, and may go and come back.
        options: limits, times, TLS.
        on_event: told what happens.

    Raises:
        SettingsError: certificates cannot be used, or plain TCP to another host without ``plain``. Nothing else is ever raised,
            and nothing after that.
    """

    def __init__(self, address: Address, options: ClientOptions, on_event: OnEvent) -> None:
        check_plain(address.host, options.tls is not None, options.plain, "host")
        self._address = address
        self._options = options
        self._on_event = on_event
        self._credentials = Credentials(options.tls, CLIENT) if options.tls is not None else None
        for warning in self._credentials.warnings() if self._credentials is not None else ():
            report_event(on_event, Event(EXPIRING, warning, bad=True))
        self.session = secrets.token_hex(16)
        """Random name of this client; a restart has another."""
        self._waker = Waker()
        self._outbox = Outbox(options, on_event, self._waker.wake)
        self._connections = 0
        self._said: dict[str, float] = {}
        self._lost_since = 0.0
        self._ending = False
        self._ended = threading.Event()
        self._stop = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="msprobe-online", daemon=True)
        self._thread.start()

    def send(
        self, header: Mapping[str, Any], buffers: Sequence[Buffer], done: Callable[[], None] | None = None, *, important: bool = False
    ) -> bool:
        """Put one message into the queue.

        Args:
            header: becomes JSON; NaN and infinities are allowed.
            buffers: contiguous memory; the payload is their bytes one after the other. Nothing is copied: it must not change
                before `done`.
            done: called once, from any thread, when the buffers are not needed any more (acknowledged or given up).
            important: there is as much room again for such messages.

        Returns:
            False when the message was given up (it is counted, and `done` was called).
        """
        return self._outbox.offer(header, buffers, done, important)

    def counts(self) -> Counts:
        """What became of the messages so far."""
        return self._outbox.counts(self._connections)

    def close(self, timeout: float) -> Counts:
        """Say that this was all, and wait until everything is acknowledged, for at most `timeout` seconds; the rest is counted as lost."""
        if os.getpid() != self._process or self._stop.is_set():
            return self.counts()
        deadline = time.monotonic() + timeout
        self._outbox.end_offers()
        complete = self._outbox.drain(timeout)
        self._ending = True
        self._waker.wake()
        if complete and self._connections:
            self._ended.wait(max(0.0, deadline - time.monotonic()))
        self._stop.set()
        self._waker.wake()
        self._thread.join(_END_SECONDS)  # longer only while it connects, and then it holds no message
        self._outbox.give_up()
        counts = self.counts()
        if counts.lost:
            said = f"{counts.lost} messages were not acknowledged by {self._address} within {timeout:g} s and are lost"
            report_event(self._on_event, Event(LOST, said, bad=True))
        elif self._ended.is_set():
            report_event(self._on_event, Event(FINISHED, f"{counts.acknowledged} messages are safe at {self._address}"))
        if not self._thread.is_alive():
            self._waker.close()
        return counts

    # everything below runs on the client's own thread

    def _run(self) -> None:
        pause = 0.0
        while not self._stop.is_set() and not self._ended.is_set():
            try:
                before = self._connections
                self._connection()
                pause = 0.0
            except _RefusedByServerError as error:
                self._trouble(REFUSED, f"{self._address}: {error}")
                if time.monotonic() - self._lost_since > _REFUSED_SECONDS:
                    self._outbox.impatient()  # this will last: the training must not wait for it
            except (ProbeError, OSError) as error:
                kind = UNREACHABLE if self._connections == before else DISCONNECTED
                self._trouble(kind, f"{self._address}: {explain(error, CLIENT)}")
            except Exception as error:  # a fault of ours: messages stay in the queue, the training goes on
                self._trouble(FAULT, f"{self._address}: {type(error).__name__}: {error}")
            if self._connections != before:
                pause = 0.0
            pause = min(max(0.1, 2 * pause), self._options.retry_seconds)
            self._stop.wait(pause * random.uniform(0.7, 1.0))  # ranks do not come back all at once

    def _trouble(self, kind: str, message: str) -> None:
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if self._stop.is_set() or self._ended.is_set() or now - self._said.get(kind, -_AGAIN_SECONDS) < _AGAIN_SECONDS:
            return
        self._said[kind] = now
        report_event(self._on_event, Event(kind, f"{message}; it is tried again, the training goes on", bad=True))

    def _connection(self) -> None:
        """One connection from beginning to end."""
        deadline = time.monotonic() + self._options.connect_seconds
        channel = self._connect(deadline)
        try:
            reader = FrameReader(_FROM_SERVER)
            self._greet(channel, reader, deadline)
            self._talk(channel, reader)
        finally:
            channel.drain(0.0)

    def _connect(self, deadline: float) -> Channel:
        host, port = self._address.host, self._address.port
        if self._credentials is None and not self._options.plain and not is_loopback(host):
            raise TransportError(f"{host} is not this machine any more, and plain TCP to others is not allowed")
        connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
        channel = Channel(connection)
        if self._credentials is not None:
            try:
                channel.start_tls(
                    self._credentials.context(), deadline, server_side=False, host=host, waker=self._waker, stop=self._stop.is_set
                )
            except BaseException:
                channel.drain(0.0)
                raise
        return channel

    def _greet(self, channel: Channel, reader: FrameReader, deadline: float) -> None:
        hello = {
            "session": self.session,
            "rank": self._options.rank,
            "first": self._outbox.first,
            "lost": self._outbox.dropped,
            "host": socket.gethostname(),
            "process": self._process,
        }
        channel.queue_bytes([encode_control(Kind.HELLO, hello)])
        while True:
            try:
                self._flush(channel, reader)
                frames = self._receive(channel, reader)
            except ConnectionError:
                why = "its messages say why" if channel.encrypted else "if it wants TLS, set tls_path on both hosts, or on none"
                raise TransportError(f"the server hung up without an answer; {why}") from None
            for frame in frames:
                header = parse_header(frame.header)
                if frame.kind == Kind.REFUSED:
                    raise _RefusedByServerError(f"the server refuses: {str(header.get('reason'))[:500]}")
                if frame.kind != Kind.WELCOME:
                    raise TransportError(f"the server answers a greeting with {frame.kind.name}")
                return self._handle_welcome(header)
            self._waker.clear()
            if self._stop.is_set():
                raise TransportError("the training ends")
            if time.monotonic() >= deadline:
                raise TransportError(f"no answer to the greeting within {self._options.connect_seconds:g} s; is this a server of msprobe?")
            channel.wait(deadline - time.monotonic(), self._waker)

    def _handle_welcome(self, header: Mapping[str, Any]) -> None:
        safe, have, limit = header.get("safe"), header.get("have"), header.get("message_bytes")
        if not (isinstance(safe, int) and isinstance(have, int) and isinstance(limit, int) and 0 <= safe <= have):
            raise TransportError("the greeting of the server lacks numbers; install the same msprobe on both hosts")
        if not self._outbox.acknowledge(safe):
            raise TransportError(f"the server has message {safe} of this session, which was never sent")
        self._outbox.limit(limit)
        self._outbox.rewind(have)
        self._connections += 1
        self._said.clear()
        if self._connections == 1:
            report_event(self._on_event, Event(CONNECTED, f"connected to {self._address}{self._how()}"))
        else:
            seconds = time.monotonic() - self._lost_since
            said = f"connected to {self._address} again after {seconds:.1f} s; what was not acknowledged is sent again"
            report_event(self._on_event, Event(RECONNECTED, said))
        self._lost_since = 0.0

    def _how(self) -> str:
        return " with TLS" if self._credentials is not None else " without TLS"

    def _talk(self, channel: Channel, reader: FrameReader) -> None:
        heard = said = time.monotonic()
        crc = not channel.encrypted and not is_loopback(self._address.host)
        end_sent = False
        while not self._stop.is_set():
            self._waker.clear()
            sending = self._fill(channel, crc)
            if sending:
                if self._flush(channel, reader):
                    said = time.monotonic()
            elif self._ending and not end_sent and self._outbox.empty:
                channel.queue_bytes([encode_control(Kind.END, {"counts": self.counts().__dict__})])
                end_sent = True
                continue
            for frame in self._receive(channel, reader):
                if frame.kind == Kind.ENDED:
                    self._ended.set()
                    return
                self._answer(frame)
            now = time.monotonic()
            if reader.bytes:
                heard, reader.bytes = now, 0
            if now - heard > self._options.silence:
                raise TransportError(f"the server has said nothing for {self._options.silence:g} s")
            if now - said >= self._options.heartbeat and not channel.pending:
                channel.queue_bytes([encode_control(Kind.ALIVE, {"lost": self._outbox.dropped})])
                said = now
                continue
            if sending and not channel.pending:
                continue  # there may be more in the queue
            next_sign = said + self._options.heartbeat if not channel.pending else now + self._options.heartbeat
            channel.wait(min(next_sign, heard + self._options.silence) - now + 0.01, self._waker)

    def _fill(self, channel: Channel, crc: bool) -> bool:
        """Take messages from the queue when the channel has nothing more; is there anything to send?"""
        taken = 0
        if channel.pending:
            return True
        parts: list[bytes | memoryview] = []
        while taken < _AHEAD and (message := self._outbox.next()) is not None:
            parts.append(encode_prefix(Kind.MESSAGE, message.sequence, len(message.header), message.payload, WITH_CRC if crc else 0))
            parts.append(message.header)
            parts += message.buffers
            if crc:
                parts.append(checksum(message.header, message.buffers))
            taken += message.size
        channel.queue_bytes(parts)
        return bool(parts)

    def _flush(self, channel: Channel, reader: FrameReader) -> int:
        try:
            return channel.flush()
        except OSError:
            for frame in self._receive(channel, reader):  # what the server said before it hung up is worth more than that it did
                self._answer(frame)
            raise

    def _receive(self, channel: Channel, reader: FrameReader) -> list[Frame]:
        frames: list[Frame] = []
        while count := channel.receive(reader.target()):
            if count == CLOSED:
                if not frames:
                    raise ConnectionResetError("the server hung up")
                break
            frames += [found for found in reader.parse_received(count) if not isinstance(found, Need)]
        return frames

    def _answer(self, frame: Frame) -> None:
        if frame.kind == Kind.REFUSED:
            raise _RefusedByServerError(f"the server hangs up: {str(parse_header(frame.header).get('reason'))[:500]}")
        if frame.kind == Kind.ACK:
            refused = parse_header(frame.header).get("refused")
            reasons: dict[int, str] = {}
            for item in refused if isinstance(refused, list) else ():
                with contextlib.suppress(TypeError, ValueError):
                    reasons[int(item[0])] = str(item[1])[:500]
            if not self._outbox.acknowledge(frame.sequence, reasons):
                raise TransportError(f"the server acknowledges message {frame.sequence}, which was never sent")
