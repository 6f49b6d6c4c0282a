"""Reads the wire format of protocol buffers from a file, without the package and without reading what is long.

The format (https://protobuf.dev/programming-guides/encoding): a message is a row of fields, each a number with a wire type, followed by a
varint (type 0), 8 bytes (1), a length and so many bytes (2), or 4 bytes (5). Every length is held against the message it is in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from msprobe_engine.core.errors import DumpFormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_WINDOW = 16 << 10


class WireError(DumpFormatError):
    """Bytes that are no message; the message is without the file's name."""


class Field(NamedTuple):
    """A field of a message.

    Attributes:
        number: as in the ``.proto`` file.
        kind: wire type.
        value: of a varint; else 0.
        start, end: bytes of the file that it has.
    """

    number: int
    kind: int
    value: int
    start: int
    end: int


class Source:
    """Small reads from an open file at any place, a window at a time.

    Args:
        file: open for reading, binary.
        size: bytes it has.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._number = file.fileno()
        self._begin = 0
        self._window = b""

    def byte(self, at: int) -> int:
        """One byte.

        Raises:
            WireError: the file ends before it.
        """
        if not self._begin <= at < self._begin + len(self._window):
            self._begin, self._window = at, os.pread(self._number, _WINDOW, at)
            if not self._window:
                raise WireError(f"ends at byte {at}")
        return self._window[at - self._begin]

    def bytes(self, start: int, end: int) -> bytes:
        """A stretch of the file.

        Raises:
            WireError: it is longer than anything that is read here, or the file ends in it.
        """
        if end - start > _WINDOW:
            raise WireError(f"has a text of {end - start} bytes at byte {start}")
        if start == end:
            return b""
        self.byte(start)
        if end > self._begin + len(self._window):
            self._begin, self._window = start, os.pread(self._number, _WINDOW, start)
        found = self._window[start - self._begin : end - self._begin]
        if len(found) < end - start:
            raise WireError(f"ends at byte {start + len(found)}")
        return found

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """A number, and where it ends.

        Raises:
            WireError: it is longer than ten bytes or goes beyond `end`.
        """
        value = 0
        for place in range(10):
            if at + place >= end:
                raise WireError(f"is cut off at byte {end}")
            byte = self.byte(at + place)
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return value & (1 << 64) - 1, at + place + 1
        raise WireError(f"has a number of more than ten bytes at byte {at}")

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """The fields of the message in these bytes.

        Raises:
            WireError: they are no message.
        """
        at = start
        while at < end:
            key, at = self.varint(at, end)
            number, kind, value = key >> 3, key & 7, 0
            if kind == VARINT:
                begin = at
                value, at = self.varint(at, end)
            elif kind == BYTES:
                length, begin = self.varint(at, end)
                at = begin + length
            elif kind in (FIXED64, FIXED32):
                begin, at = at, at + (8 if kind == FIXED64 else 4)
            else:
                raise WireError(f"has a field of wire type {kind} at byte {at - 1}, which no message of today has")
            if number == 0 or at > end:
                raise WireError(
                    f"has a field at byte {begin} that goes beyond byte {end}" if number else f"has field number 0 at byte {begin}"
                )
            yield Field(number, kind, value, begin, at)

    def numbers(self, field: Field) -> list[int]:
        """The numbers of a repeated field of integers, packed or not; as signed 64-bit integers.

        Raises:
            WireError: the field is of another type.
        """
        if field.kind == VARINT:
            return [_to_signed(field.value)]
        if field.kind != BYTES:
            raise WireError(f"has a field of wire type {field.kind} at byte {field.start}, where numbers should be")
        found, at = [], field.start
        while at < field.end:
            value, at = self.varint(at, field.end)
            found.append(_to_signed(value))
        return found

    def text(self, field: Field) -> str:
        """A field of text.

        Raises:
            WireError: the field is of another type, or is no text.
        """
        if field.kind != BYTES:
            raise WireError(f"has a field of wire type {field.kind} at byte {field.start}, where text should be")
        try:
            return self.bytes(field.start, field.end).decode("utf-8")
        except UnicodeDecodeError:
            raise WireError(f"has bytes that are no text at byte {field.start}") from None


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
