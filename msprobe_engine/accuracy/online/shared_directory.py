"""The same two ends over a directory that both hosts have: a file per message, made under another name and renamed.

``DIRECTORY/rank{rank}-{session}/{sequence:012d}.step{step}.msg`` (step: ``header["step"]``, when there is one).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msprobe_engine.accuracy.online.events import Counts, OnEvent
from msprobe_engine.accuracy.online.options import ClientOptions, ServerOptions
from msprobe_engine.accuracy.online.outbox import Buffer
from msprobe_engine.accuracy.online.session import Handler, Last, SessionState


class DirectoryClient:
    """As `Client`; a message is acknowledged when its file is complete. A full directory is like a server that does not answer.

    Raises:
        SettingsError: the directory is not there or cannot be written.
    """

    def __init__(self, directory: Path, options: ClientOptions, on_event: OnEvent) -> None:
        raise NotImplementedError

    def send(self, header: Mapping[str, Any], buffers: Sequence[Buffer], done: Callable[[], None] | None = None) -> bool:
        """As `Client.send`."""
        raise NotImplementedError

    def counts(self) -> Counts:
        """As `Client.counts`."""
        raise NotImplementedError

    def close(self, timeout: float) -> Counts:
        """As `Client.close`."""
        raise NotImplementedError


class DirectoryServer:
    """As `Server`; a file is removed when the handler has returned. What the handler cannot use stays, renamed ``*.refused``.

    Raises:
        SettingsError: the directory is not there or cannot be read.
    """

    def __init__(self, directory: Path, handler: Handler, options: ServerOptions, on_event: OnEvent, last: Last | None = None) -> None:
        raise NotImplementedError

    def sessions(self) -> list[SessionState]:
        """As `Server.sessions`."""
        raise NotImplementedError

    def close(self, timeout: float = 10.0) -> None:
        """As `Server.close`."""
        raise NotImplementedError
