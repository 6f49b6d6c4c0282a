"""TensorBoard event files: records with checksums, each written as one block."""

from __future__ import annotations

import os
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.errors import needs_extra
from msprobe_engine.core.io.output_files import AppendFile
from msprobe_engine.core.io.safe_cells import utf8

Floats = npt.NDArray[np.float64]


class EventFile:
    """A new event file.

    Args:
        directory: where; it is there. TensorBoard reads one file per directory.
        label: a word of the file name, ``rank3``.
        purpose: what the file is for, in errors.

    Raises:
        MissingExtraError: tensorboard or google-crc32c is not installed. TensorBoard's own checksum goes byte by byte in Python and
            would hold the interpreter for a tenth of a second per step of 2000 tensors.
        SinkError: the file cannot be made.
    """

    def __init__(self, directory: Path, label: str, purpose: str) -> None:
        with needs_extra("tensorboard", "tensorboard", f"{purpose}: writing event files"):
            from tensorboard.compat.proto import event_pb2, summary_pb2
        with needs_extra("google-crc32c", "tensorboard", f"{purpose}: writing event files"):
            from google_crc32c import value as crc32c
        self._crc32c: Callable[[bytes], int] = crc32c
        self._event: Any = event_pb2.Event
        self.summary: Any = summary_pb2.Summary
        """Makes an empty summary, to be filled and given to `append`."""
        # TensorBoard looks for "tfevents" in the name and sorts by it; the host name that others put there tells nothing more.
        name = f"events.out.tfevents.{int(time.time()):010d}.{label}.{os.getpid()}.{secrets.token_hex(2)}"
        self._file = AppendFile(directory / name, exclusive=True)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    @property
    def size(self) -> int:
        return self._file.size

    def append(self, step: int, tags: Sequence[bytes], values: Sequence[float] | Floats, summary: Any = None) -> None:
        """Add one event.

        Args:
            step: int64.
            tags: what `tag_bytes` made of the tag of every value.
            values: as many numbers; float32 in the file.
            summary: further values.

        Raises:
            SinkError: it could not be written; the file ends with the event before it.
        """
        # Put together by hand: an object per value costs ten times as much. Fields of a message may come in pieces.
        with np.errstate(over="ignore"):
            numbers = np.asarray(values, np.float64).astype("<f4").tobytes()
        parts = [b""] * (2 * len(tags))
        parts[::2] = tags
        parts[1::2] = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
        scalars = b"".join(parts)
        more = b"" if summary is None else summary.SerializeToString()
        head = self._event(wall_time=time.time(), step=step).SerializeToString()
        self._write(b"".join((head, b"\x2a", _varint(len(scalars) + len(more)), scalars, more)))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        # TFRecord: length, masked CRC of the length, data, masked CRC of the data.
        length = struct.pack("<Q", len(data))
        self._file.append(b"".join((length, self._masked_crc(length), data, self._masked_crc(data))))

    def _masked_crc(self, data: bytes) -> bytes:
        """The CRC-32C as TFRecord files hold it: rotated right by 15 bits and shifted by a constant."""
        crc = self._crc32c(data)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def tag_bytes(tag: str) -> bytes:
    """All of a value with this tag but its four bytes (`Summary.Value`: tag 1, simple_value 2)."""
    name = utf8(tag).encode()
    inner = b"\x0a" + _varint(len(name)) + name + b"\x15"
    return b"\x0a" + _varint(len(inner) + 4) + inner


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)
