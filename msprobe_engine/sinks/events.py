"""TensorBoard event files: records with checksums, each written as one block."""

from __future__ import annotations

import os
import secrets
import struct
import time
from pathlib import Path
from typing import Any

from msprobe_engine.errors import MissingExtraError
from msprobe_engine.sinks.crc32c import masked_crc32c
from msprobe_engine.sinks.files import AppendFile


class EventFile:
    """A new event file.

    Args:
        directory: where; it is there. TensorBoard reads one file per directory.
        label: a word of the file name, ``rank3``.
        purpose: what the file is for, in errors.

    Raises:
        MissingExtraError: the package tensorboard is not installed.
        SinkError: the file cannot be made.
    """

    def __init__(self, directory: Path, label: str, purpose: str) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise MissingExtraError("tensorboard", "tensorboard", f"{purpose}: writing event files") from error
        self._event: Any = event_pb2.Event
        self.summary: Any = summary_pb2.Summary
        """Makes an empty summary, to be filled and given to `append`."""
        # TensorBoard looks for "tfevents" in the name and sorts by it; the host name that others put there tells nothing more.
        name = f"events.out.tfevents.{int(time.time()):010d}.{label}.{os.getpid()}.{secrets.token_hex(2)}"
        self._file = AppendFile(directory / name, exclusive=True)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def append(self, step: int, summary: Any) -> None:
        """Add one event.

        Raises:
            SinkError: it could not be written; the file ends with the event before it.
        """
        self._write(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _write(self, event: Any) -> None:
        data: bytes = event.SerializeToString()
        # TFRecord: length, masked CRC of the length, data, masked CRC of the data.
        length = struct.pack("<Q", len(data))
        self._file.append(b"".join((length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data)))))


def utf8(tag: str) -> str:
    """A name that UTF-8 cannot hold would cost the whole event."""
    return tag if tag.isascii() else tag.encode("utf-8", "backslashreplace").decode("utf-8")
