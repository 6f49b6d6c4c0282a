"""The wire format: frames of a fixed prefix, a JSON header and a payload.

Prefix, 32 bytes, big endian: magic ``MSPF``, version (1 byte), kind (1 byte), flags (2 bytes), sequence (8 bytes), length of the header
(4 bytes), length of the payload (8 bytes), CRC-32 of the 28 bytes before (4 bytes). Then the header (UTF-8 JSON, an object; nothing
when its length is 0), the payload, and with flag 1 the CRC-32 of header and payload (4 bytes). Only a `MESSAGE` has a payload.

Every length is checked before memory is taken, in `FrameReader`, which knows no socket: it is fed with bytes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from msprobe_engine.core.errors import TransportError
from msprobe_engine.core.io.json_text import parse_json

VERSION = 1
_MAGIC = b"MSPF"
_PREFIX = struct.Struct(">4sBBHQIQI")
_CHECKED = struct.Struct(">4sBBHQIQ")
_CRC = struct.Struct(">I")
PREFIX_BYTES = _PREFIX.size
WITH_CRC = 1
CONTROL_HEADER_BYTES = 64 << 10
MESSAGE_HEADER_BYTES = 16 << 20
_STAGE = 128 << 10
_DIRECT = 32 << 10
"""From here on a payload is received where it will stay, not into the stage."""
_NEXT = 4 << 10
"""After a message that was received in place: enough for the next one's beginning, so that the rest of it is not copied either."""


class Kind(IntEnum):
    """What a frame is. Client to server: HELLO, MESSAGE, ALIVE, END; back: WELCOME, REFUSED, ACK, ALIVE, ENDED."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    MESSAGE = 4
    ACK = 5
    ALIVE = 6
    END = 7
    ENDED = 8


class Frame(NamedTuple):
    """One frame that has arrived. `header` is still text (see `parse_header`); `memory` is what was given to the reader for the payload."""

    kind: Kind
    sequence: int
    header: bytes
    payload: memoryview
    memory: Any = None


class Need(NamedTuple):
    """The reader waits for memory for a message: a payload of `payload` bytes (`FrameReader.give`); `size` with the header."""

    payload: int
    size: int


def encode_header(header: Mapping[str, Any]) -> bytes:
    """The header as bytes.

    Raises:
        TypeError, ValueError: it holds what JSON does not have, or itself.
    """
    return json.dumps(header, ensure_ascii=False, separators=(",", ":"), check_circular=False).encode("utf-8", "surrogatepass")


def parse_header(text: bytes) -> dict[str, Any]:
    """The header as an object.

    Raises:
        TransportError: it is no JSON object.
    """
    if not text:
        return {}
    try:
        header = parse_json(text.decode("utf-8", "surrogatepass"))
    except ValueError as error:
        raise TransportError(f"a header of {len(text)} bytes is no JSON ({type(error).__name__}: {str(error)[:100]})") from None
    if not isinstance(header, dict):
        raise TransportError(f"a header is a JSON {type(header).__name__}, not an object")
    return header


def encode_prefix(kind: Kind, sequence: int, header_bytes: int, payload_bytes: int, flags: int = 0) -> bytes:
    """The first 32 bytes of a frame."""
    text = _CHECKED.pack(_MAGIC, VERSION, kind, flags, sequence, header_bytes, payload_bytes)
    return text + _CRC.pack(zlib.crc32(text))


def encode_control(kind: Kind, header: Mapping[str, Any] | None = None, sequence: int = 0) -> bytes:
    """A whole frame without payload."""
    text = encode_header(header) if header else b""
    return encode_prefix(kind, sequence, len(text), 0) + text


def checksum(header: bytes, buffers: Iterable[bytes | bytearray | memoryview]) -> bytes:
    """What follows the payload when a frame has flag 1."""
    value = zlib.crc32(header)
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return _CRC.pack(value)


class FrameReader:
    """Bytes to frames. Fill `target`, say with `parse_received` how much, and go through what comes out.

    Args:
        kinds: what the other end may send; it can be changed (`expect`) between frames.
        message_bytes: largest header and payload of a message together.

    A frame's payload is a view of what was given with `give`, or of nothing.
    """

    def __init__(self, kinds: Iterable[Kind], message_bytes: int = 0) -> None:
        self.kinds = frozenset(kinds)
        self.message_bytes = message_bytes
        self._stage = memoryview(bytearray(_STAGE))
        self._begin = self._end = 0
        self._prefix: tuple[Kind, int, int, int, int] | None = None
        self._header: bytes | None = None
        self._long: bytearray | None = None
        self._long_end = 0
        self._payload: memoryview | None = None
        self._payload_end = 0
        self._memory: Any = None
        self._large = False
        self.bytes = 0

    @property
    def inside(self) -> int:
        """Bytes of the frame that has begun and is not complete; 0 between frames."""
        if self._prefix is None:
            return self._end - self._begin
        return PREFIX_BYTES + self._prefix[2] + self._prefix[3]

    def target(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._long is not None:
            return memoryview(self._long)[self._long_end :]
        if (payload := self._direct()) is not None:
            return payload[self._payload_end :]
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end == _STAGE or self._begin > _STAGE // 2:
            remaining = self._end - self._begin
            self._stage[:remaining] = bytes(self._stage[self._begin : self._end])
            self._begin, self._end = 0, remaining
        return self._stage[self._end : self._end + _NEXT] if self._large else self._stage[self._end :]

    def parse_received(self, count: int) -> Iterator[Frame | Need]:
        """Take `count` bytes that were put into `target`. After a `Need`, `give` memory and go on with ``parse_received(0)``.

        Raises:
            TransportError: this is no frame, or none that is allowed here; the connection is of no use any more.
        """
        self.bytes += count
        if self._long is not None:
            self._long_end += count
        elif self._direct() is not None:
            self._payload_end += count
        else:
            self._end += count
        while (part := self._next()) is not None:
            yield part
            if isinstance(part, Need):
                return

    def give(self, view: memoryview, memory: Any = None) -> None:
        """Memory for the payload that a `Need` spoke of: `view` of exactly that size; `memory` comes back with the frame.

        Nothing is taken for a message before this, neither for its header.
        """
        self._payload, self._payload_end, self._memory = view, 0, memory

    def _direct(self) -> memoryview | None:
        """The payload, when what comes next can go there without the stage."""
        if self._payload is None or self._header is None or self._begin != self._end:
            return None
        return self._payload if len(self._payload) - self._payload_end >= _DIRECT else None

    def _next(self) -> Frame | Need | None:
        if self._prefix is None:
            if self._end - self._begin < PREFIX_BYTES:
                if self._end - self._begin >= len(_MAGIC):  # what is something else may be shorter than a prefix
                    _check_magic(bytes(self._stage[self._begin : self._begin + len(_MAGIC)]))
                return None
            self._prefix = _parse_prefix(self._consume(PREFIX_BYTES), self.kinds, self.message_bytes)
        kind, flags, header_bytes, payload_bytes, sequence = self._prefix
        if kind == Kind.MESSAGE and self._payload is None:
            return Need(payload_bytes, header_bytes + payload_bytes)
        if self._header is None and not self._read_header(header_bytes):
            return None
        payload = self._payload
        if payload is not None and not self._read_payload(payload):
            return None
        if flags & WITH_CRC and not self._read_checksum(payload):
            return None
        assert self._header is not None
        self._large = payload_bytes >= _DIRECT
        frame = Frame(kind, sequence, self._header, payload if payload is not None else memoryview(b""), self._memory)
        self._prefix = self._header = self._payload = self._memory = None
        return frame

    def _consume(self, count: int) -> memoryview:
        view = self._stage[self._begin : self._begin + count]
        self._begin += count
        return view

    def _read_header(self, size: int) -> bool:
        if self._long is not None:
            if self._long_end < size:
                return False
            self._header, self._long = bytes(self._long), None
            return True
        if self._end - self._begin >= size:
            self._header = bytes(self._consume(size))
            return True
        if size > _STAGE // 2:  # grows with what arrives would cost copies; the limit is what keeps this small
            self._long, self._long_end = bytearray(size), self._end - self._begin
            self._long[: self._long_end] = self._consume(self._long_end)
        return False

    def _read_payload(self, payload: memoryview) -> bool:
        missing = len(payload) - self._payload_end
        count = min(missing, self._end - self._begin)
        if count:
            payload[self._payload_end : self._payload_end + count] = self._consume(count)
            self._payload_end += count
        return count == missing

    def _read_checksum(self, payload: memoryview | None) -> bool:
        if self._end - self._begin < _CRC.size:
            return False
        assert self._header is not None
        if bytes(self._consume(_CRC.size)) != checksum(self._header, () if payload is None else (payload,)):
            raise TransportError("a frame was changed on its way (the CRC-32 of its contents is wrong)")
        return True


def parse_message(text: memoryview) -> Frame:
    """A message that is a file: all of `text` is its one frame.

    Raises:
        TransportError: it is not.
    """
    if len(text) < PREFIX_BYTES:
        raise TransportError(f"{len(text)} bytes are no message; the file was cut off")
    kind, flags, header_bytes, payload_bytes, sequence = _parse_prefix(text[:PREFIX_BYTES], frozenset((Kind.MESSAGE,)), len(text))
    end = PREFIX_BYTES + header_bytes + payload_bytes
    if len(text) != end + (_CRC.size if flags & WITH_CRC else 0):
        raise TransportError(f"a message of {end} bytes is in a file of {len(text)}; the file was cut off or is another one's")
    header, payload = bytes(text[PREFIX_BYTES : PREFIX_BYTES + header_bytes]), text[PREFIX_BYTES + header_bytes : end]
    if flags & WITH_CRC and bytes(text[end:]) != checksum(header, (payload,)):
        raise TransportError("the message was changed on its way (the CRC-32 of its contents is wrong)")
    return Frame(kind, sequence, header, payload)


def _parse_prefix(text: memoryview, kinds: frozenset[Kind], message_bytes: int) -> tuple[Kind, int, int, int, int]:
    magic, version, kind, flags, sequence, header_bytes, payload_bytes, crc = _PREFIX.unpack(text)
    _check_magic(magic)
    if zlib.crc32(text[: _CHECKED.size]) != crc:
        raise TransportError("the beginning of a frame was changed on its way (its CRC-32 is wrong)")
    if version != VERSION:
        raise TransportError(
            f"the other end speaks version {version} of the protocol, this one {VERSION}; install the same msprobe on both hosts"
        )
    if kind not in kinds:
        raise TransportError(f"a frame of kind {kind} has no place here")
    limit = MESSAGE_HEADER_BYTES if kind == Kind.MESSAGE else CONTROL_HEADER_BYTES
    if header_bytes > limit:
        raise TransportError(f"a header of {header_bytes} bytes is announced, {limit} are allowed")
    if payload_bytes and kind != Kind.MESSAGE:
        raise TransportError(f"a frame of kind {kind} announces a payload of {payload_bytes} bytes, and has none")
    if kind == Kind.MESSAGE and header_bytes + payload_bytes > message_bytes:
        raise TransportError(f"a message of {header_bytes + payload_bytes} bytes is announced, {message_bytes} are allowed")
    if flags & ~WITH_CRC:
        raise TransportError(f"flags {flags:#x} of a frame are unknown")
    return Kind(kind), flags, header_bytes, payload_bytes, sequence


def _check_magic(magic: bytes) -> None:
    if magic[:2] in (b"\x15\x03", b"\x16\x03"):
        raise TransportError("the other end speaks TLS, this one does not: set tls_path on both hosts, or on none")
    if magic != _MAGIC:
        raise TransportError(f"this is no frame of msprobe (it begins with {magic!r}); is it another program that talks here?")
