"""The sending end over a directory that both hosts have; see `online.directory_layout` for what lies in it."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online.directory import layout
from msprobe_engine.accuracy.online.events import CONNECTED, FAULT, FINISHED, LOST, RECOVERED, UNREACHABLE, Counts, Event, OnEvent
from msprobe_engine.accuracy.online.options import ClientOptions
from msprobe_engine.accuracy.online.send_queue import Buffer, Message, Outbox, report_event
from msprobe_engine.accuracy.online.tcp.frames import WITH_CRC, Kind, checksum, encode_prefix
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.io.output_files import write_file

_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)
_LASTS = 3
"""Tries, from 0.6 s on, after which it is more than a server that makes room a moment later."""


class DirectoryClient:
    """As `Client`; a message is acknowledged when its file is complete. A full directory is like a server that does not answer.

    Raises:
        SettingsError: the directory is not there or cannot be written.
    """

    def __init__(self, directory: Path, options: ClientOptions, on_event: OnEvent) -> None:
        self.session = secrets.token_hex(16)
        """Random name, made anew at each start of this client."""
        self._folder = directory / layout.folder_name(options.rank, self.session)
        self._options = options
        self._on_event = on_event
        self._process = os.getpid()
        self._beats = 0
        self._beat_at = 0.0
        self._lying: deque[tuple[Path, int]] = deque()
        self._lying_bytes = 0
        self._trouble = False
        self._problem, self._problem_since = "", 0.0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._outbox = Outbox(options, on_event, self._wake.set)
        try:
            self._make_folder()
            self._beat()
        except OSError as error:
            raise SettingsError(
                f"nfs_path {directory}: cannot be written ({error.strerror}); name a directory that this process and the server can write"
            ) from None
        report_event(on_event, Event(CONNECTED, f"messages go to {self._folder}"))
        self._thread = threading.Thread(target=self._run, name="msprobe-online", daemon=True)
        self._thread.start()

    def send(
        self, header: Mapping[str, Any], buffers: Sequence[Buffer], done: Callable[[], None] | None = None, *, important: bool = False
    ) -> bool:
        """As `Client.send`."""
        return self._outbox.offer(header, buffers, done, important)

    def counts(self) -> Counts:
        """As `Client.counts`; while the directory cannot be written there is no connection."""
        return self._outbox.counts(0 if self._problem else 1)

    def close(self, timeout: float) -> Counts:
        """As `Client.close`; the server need not have read anything."""
        if os.getpid() != self._process or self._stop.is_set():
            return self.counts()
        self._outbox.end_offers()
        self._outbox.drain(timeout)
        self._stop.set()
        self._wake.set()
        self._thread.join(self._options.connect_seconds)
        self._outbox.give_up()
        counts = self.counts()
        try:
            layout.write_note(self._folder / layout.END, {"counts": counts.__dict__, "sequence": self._outbox.last})
        except OSError as error:
            said = f"{self._folder}: the last word cannot be written ({error.strerror}); the server will wait for more for a while"
            report_event(self._on_event, Event(FAULT, said, bad=True))
        if counts.lost:
            said = f"{counts.lost} messages are lost: {self._folder} {self._why_lost()}"
            report_event(self._on_event, Event(LOST, said, bad=True))
        else:
            report_event(self._on_event, Event(FINISHED, f"{counts.acknowledged} messages are in {self._folder}, or were read already"))
        return counts

    def _why_lost(self) -> str:
        if self._problem:
            return f"{self._problem}, for {time.monotonic() - self._problem_since:.0f} s by now; make room, or name another nfs_path"
        return "is full of messages that the server has not read" if self._trouble else "did not take them in time"

    # everything below runs on the client's own thread

    def _make_folder(self) -> None:
        self._folder.mkdir(exist_ok=True)
        os.chmod(self._folder, layout.FOLDER_MODE)  # whatever the umask is

    def _beat(self) -> None:
        self._beats += 1
        self._beat_at = time.monotonic()
        note = {
            "beat": self._beats,
            "lost": self._outbox.dropped,
            "host": socket.gethostname(),
            "process": self._process,
            "heartbeat": self._options.heartbeat,
        }
        layout.write_note(self._folder / layout.ALIVE, note)

    def _run(self) -> None:
        message: Message | None = None
        tries = 0
        while not self._stop.is_set():
            self._wake.clear()
            message = message or self._outbox.next()
            pause = max(0.0, self._beat_at + self._options.heartbeat - time.monotonic())
            try:
                if not pause:
                    self._beat()
                if message is not None and self._room(message.size):
                    self._write(message)
                    self._problem = ""
                    self._outbox.acknowledge(message.sequence)
                    message, tries = None, 0
                    continue
                tries = 0 if message is None else tries + 1
            except OSError as error:
                tries += 1
                self._cannot_write(error.strerror or str(error), tries)
            except Exception as error:  # a fault of ours: the message stays, the training goes on
                tries += 1
                self._cannot_write(f"{type(error).__name__}: {error}", tries)
            if tries:  # a new message would change nothing
                self._stop.wait(_PAUSES[min(tries, len(_PAUSES)) - 1])
            else:
                self._wake.wait(pause)

    def _room(self, size: int) -> bool:
        """Is less than ``directory_bytes`` lying there? What the server has removed counts no more."""
        while self._lying and not self._lying[0][0].exists():
            self._lying_bytes -= self._lying.popleft()[1]
        if not self._lying or self._lying_bytes + size <= self._options.directory_bytes:
            return True
        self._report_trouble(
            f"{self._lying_bytes} bytes lie there unread (allowed: {self._options.directory_bytes}); is the server running?"
        )
        return False

    def _write(self, message: Message) -> None:
        path = self._folder / layout.message_name(message.sequence, message.step)
        prefix = encode_prefix(Kind.MESSAGE, message.sequence, len(message.header), message.payload, WITH_CRC)
        pieces: list[bytes | memoryview] = [prefix, message.header, *message.buffers, checksum(message.header, message.buffers)]
        try:
            write_file(path, pieces)
        except FileNotFoundError:  # somebody has removed the folder
            self._make_folder()
            write_file(path, pieces)
        self._lying.append((path, message.size))
        self._lying_bytes += message.size
        if self._trouble:
            self._trouble = False
            report_event(self._on_event, Event(RECOVERED, f"{self._folder}: messages can be written again"))

    def _cannot_write(self, why: str, tries: int) -> None:
        """If that lasts nobody waits for it: neither a send for room in the queue, nor the end of the run as long as for a slow server."""
        if not self._problem:
            self._problem_since = time.monotonic()
        self._problem = f"cannot be written ({why})"
        if tries >= _LASTS:
            self._outbox.impatient()
        self._report_trouble(self._problem)

    def _report_trouble(self, problem: str) -> None:
        if not self._trouble:
            self._trouble = True
            said = f"{self._folder}: {problem}; it is tried again, the training goes on"
            report_event(self._on_event, Event(UNREACHABLE, said, bad=True))
