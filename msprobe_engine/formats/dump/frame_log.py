"""The frame log: one raw write at the step boundary, so that a process killed right afterwards has lost nothing.

Layout of ``.frame.bin``, little endian:

    header   8s magic "MSPFLOG1", I step, i rank, 9 x Q (bytes of head text, template, stack.json, construct.json, packed
             layout; number of operations, tensors, float scalars, rows), I crc32 of the packed layout, I crc32 of the rest,
             I crc32 of the header
    layout   zlib: template text, operations ([n, 4] int32), stack.json, construct.json
    rest     head text (dump.json up to "data": ), slots int32, float scalars float64, rows [m, 16] float64

Nothing in it is executed; every length and checksum is verified before use.

The mark of a step that is not finished (``.incomplete``) says which one it is, and why it is not when the run itself knows::

    {"step": 5, "rank": 0, "pid": 4711, "start": "2026-01-31T12:00:00Z"[, "why": "ENOSPC"]}
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from msprobe_engine.core.errors import DumpFormatError, TextError
from msprobe_engine.core.io.input_files import read_input
from msprobe_engine.core.io.json_text import parse_json
from msprobe_engine.core.io.output_files import write_all
from msprobe_engine.core.io.regular_files import open_regular
from msprobe_engine.core.statistics.rows import WORDS, Rows
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats import loss_causes
from msprobe_engine.formats.dump import layout
from msprobe_engine.formats.dump.writing import text as _text
from msprobe_engine.formats.dump.writing.text import Float64, Int32, Template

_MAGIC = b"MSPFLOG1"
_HEADER = struct.Struct("<8sIi9QIII")
_LOST = "the step cannot be recovered from it"
_LIMIT = 1 << 31  # of any part, and of the layout: what a template can have, and no decompression bomb
_PER_SLOT = 4
"""Most operations of a tensor (statistics, two checksums, what follows them); each can be some hundred bytes of text."""


class PackedLayout(NamedTuple):
    """The part of the log that is the same as long as the layout is."""

    packed: bytes
    sizes: tuple[int, int, int, int]
    """Bytes of template, stack.json, construct.json; number of operations."""
    crc: int


def pack(template: Template, stack: bytes, construct: bytes) -> PackedLayout:
    """Compress what does not change from step to step."""
    ops = template.ops.astype("<i4").tobytes()
    packed = zlib.compress(b"".join((template.text, ops, stack, construct)), 1)
    return PackedLayout(packed, (len(template.text), len(stack), len(construct), len(template.ops)), zlib.crc32(packed))


def encode(layout: PackedLayout, step: int, rank: int, head: bytes, slots: Int32, floats: Float64, rows: Rows) -> list[bytes | memoryview]:
    """The parts of the file, for one `os.writev`."""
    body: list[bytes | memoryview] = [head, *(memoryview(part.reshape(-1).view(np.uint8).data) for part in (slots, floats, rows))]
    crc = 0
    for part in body:
        crc = zlib.crc32(part, crc)
    text, stack, construct, n_ops = layout.sizes
    numbers = (len(head), text, stack, construct, len(layout.packed), n_ops, len(slots), len(floats), len(rows))
    header = _HEADER.pack(_MAGIC, step & 0xFFFFFFFF, rank, *numbers, layout.crc, crc, 0)[:-4]
    return [header, struct.pack("<I", zlib.crc32(header)), layout.packed, *body]


@dataclass(frozen=True)
class LoggedFrame:
    step: int
    rank: int
    head: bytes
    template: Template
    slots: Int32
    floats: Float64
    rows: Rows
    stack: bytes
    construct: bytes

    def dump_json(self, where: str = "frame log") -> bytes:
        """The text of dump.json.

        Raises:
            DumpFormatError: the parts do not belong together; `where` is named.
        """
        try:
            return self.head + _text.render(self.template, self.slots, self.rows, self.floats) + b"\n}"
        except ValueError as error:
            raise DumpFormatError(f"{where}: the parts of the frame log do not fit together ({error}); {_LOST}") from None


def decode(data: bytes, where: str) -> LoggedFrame:
    """Read a frame log.

    Raises:
        DumpFormatError: cut off, damaged or of another version; `where` is named.
    """
    if len(data) < _HEADER.size or not data.startswith(_MAGIC[:7]):
        raise DumpFormatError(f"{where}: not a frame log, or cut off in its header ({len(data)} bytes); {_LOST}")
    magic, step, rank, *numbers, crc_layout, crc_body, crc_header = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise DumpFormatError(
            f"{where}: frame log of version {magic[7:]!r}, known is {_MAGIC[7:]!r}; read it with the version that wrote it"
        )
    n_head, n_text, n_stack, n_construct, n_packed, n_ops, n_slots, n_floats, n_rows = numbers
    size = n_text + 16 * n_ops + n_stack + n_construct
    too_much = max(*numbers, size) > _LIMIT or n_ops > _PER_SLOT * n_slots + n_floats
    if zlib.crc32(data[: _HEADER.size - 4]) != crc_header or too_much:
        raise DumpFormatError(f"{where}: the header of the frame log is damaged; {_LOST}")
    expected = _HEADER.size + n_packed + n_head + 4 * n_slots + 8 * n_floats + 8 * WORDS * n_rows
    if len(data) != expected:
        raise DumpFormatError(f"{where}: the frame log has {len(data)} of {expected} bytes, it was cut off; {_LOST}")
    packed, rest = data[_HEADER.size : _HEADER.size + n_packed], data[_HEADER.size + n_packed :]
    if zlib.crc32(packed) != crc_layout or zlib.crc32(rest) != crc_body:
        raise DumpFormatError(f"{where}: the checksum of the frame log is wrong; {_LOST}")
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(packed, size + 1)
    except zlib.error as error:
        raise DumpFormatError(f"{where}: the layout in the frame log cannot be unpacked ({error})") from None
    if len(plain) != size:
        raise DumpFormatError(f"{where}: the layout in the frame log has {len(plain)} bytes, its header says {size}")
    text, ops, stack, construct = _split_sections(plain, n_text, 16 * n_ops, n_stack, n_construct)
    head, slots, floats, rows = _split_sections(rest, n_head, 4 * n_slots, 8 * n_floats, 8 * WORDS * n_rows)
    template = Template(text, np.frombuffer(ops, "<i4").reshape(-1, 4))
    matrix = np.frombuffer(rows, "<f8").reshape(-1, WORDS)
    return LoggedFrame(step, rank, head, template, np.frombuffer(slots, "<i4"), np.frombuffer(floats, "<f8"), matrix, stack, construct)


def _split_sections(data: bytes, *sizes: int) -> list[bytes]:
    parts, at = [], 0
    for size in sizes:
        parts.append(data[at : at + size])
        at += size
    return parts


_MOST_BYTES = 4096
_EMPTY = Sentence("its mark is empty, as one is that was made on a full disk")


def line(step: int, rank: int | None, why: str = "") -> bytes:
    start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    content: dict[str, object] = {"step": step, "rank": rank, "pid": os.getpid(), "start": start}
    return (json.dumps(content | ({"why": why} if why else {})) + "\n").encode()


def tell_why(directory: str, step: int, rank: int | None, why: str) -> None:
    """Put the cause into the mark, in place: a full disk has no room for another file. Never raises: what cannot be told here, the log
    tells."""
    with contextlib.suppress(OSError):
        fd = open_regular(f"{directory}/{layout.MARKER}", os.O_WRONLY | os.O_CREAT)
        try:
            content = line(step, rank, why)
            write_all(fd, [content])
            os.ftruncate(fd, len(content))
        finally:
            os.close(fd)


def why_unfinished(directory: Path) -> str:
    """Why the run could not finish the step in the directory of a rank, in words; empty when nothing tells."""
    try:
        content = read_input(directory / layout.MARKER, _MOST_BYTES, follow=False)
        if not content:
            return _EMPTY
        document = parse_json(content)
    except (OSError, TextError):
        return ""
    said = loss_causes.sentences(loss_causes.parse_causes(document.get("why"))) if isinstance(document, dict) else []
    return said[0] if said else ""
