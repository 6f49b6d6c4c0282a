"""The sending end over TCP: a bounded queue, and one thread that connects, sends, and sends again what was not acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msprobe_engine.accuracy.online.events import Counts, OnEvent
from msprobe_engine.accuracy.online.options import Address, ClientOptions

Buffer = bytes | bytearray | memoryview


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
        raise NotImplementedError

    def send(self, header: Mapping[str, Any], buffers: Sequence[Buffer], done: Callable[[], None] | None = None) -> bool:
        """Put one message into the queue.

        Args:
            header: becomes JSON; NaN and infinities are allowed.
            buffers: contiguous memory; the payload is their bytes one after the other. Nothing is copied: it must not change
                before `done`.
            done: called once, from any thread, when the buffers are not needed any more (acknowledged or given up).

        Returns:
            False when the message was given up (it is counted, and `done` was called).
        """
        raise NotImplementedError

    def counts(self) -> Counts:
        """What became of the messages so far."""
        raise NotImplementedError

    def close(self, timeout: float) -> Counts:
        """Say that this was all, and wait until everything is acknowledged, for at most `timeout` seconds; the rest is counted as lost."""
        raise NotImplementedError
