"""``.pt`` files without calling ``torch.save`` for each: one sample per dtype and shape that torch wrote itself, into which the bytes of
a tensor and their checksum are put. The result is the file that ``torch.save`` would have written, byte for byte.

A ``.pt`` file is a ZIP archive of stored (not compressed) records; layout: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
(version 6.3.10, sections 4.3 and 4.5) and torch's ``caffe2/serialize/inline_container.cc``. What depends on the tensor's bytes:

* the CRC-32 of the record ``data/0``, behind it and in the central directory;
* the last 20 digits of the record ``.data/serialization_id``, a hash over the CRC-32 of all records, and the CRC-32 of that record.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from msprobe_engine.core.errors import DumpFormatError

_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = 30  # bytes of a local header before name and extra field
_END, _END64 = b"PK\x05\x06", b"PK\x06\x06"
_CRC = struct.Struct("<I")
_DIGITS = 20
_M64 = (1 << 64) - 1


class Sample(NamedTuple):
    """A file that torch wrote for one tensor, without the bytes of the tensor.

    Attributes:
        head, tail: what stands before and after the bytes of the tensor.
        nbytes: how many bytes belong between them. What CRC-32 the file holds for them does not matter.
    """

    head: bytes
    nbytes: int
    tail: bytes


def split_sample(content: bytes) -> Sample:
    """The sample in a whole file.

    Raises:
        DumpFormatError: it is no file as torch writes it for one tensor.
    """
    try:
        (found,) = [record for record in _records(content, 0) if record[0].partition("/")[2].startswith("data/")]
        start = found[1] + _LOCAL + sum(struct.unpack_from("<HH", content, found[1] + 26))
    except (struct.error, ValueError, IndexError) as error:
        raise DumpFormatError(f"a .pt file that torch wrote is not understood ({error})") from None
    return Sample(content[:start], found[2], content[start + found[2] :])


class PtTemplate:
    """Makes files of tensors of one dtype and shape.

    Attributes:
        head: file content before the bytes of the tensor.
        nbytes: bytes of the tensor.
        overhead: bytes of the file besides those.
        checksum: True: `tail` needs the checksum of the bytes.

    Raises:
        DumpFormatError: the sample is no file as torch writes it.
    """

    checksum = True

    def __init__(self, sample: Sample) -> None:
        self.nbytes = sample.nbytes
        self.overhead = len(sample.head) + len(sample.tail)
        head, self._tail = bytearray(sample.head), bytearray(sample.tail)
        self._places: list[int] = []
        self._id_text = -1
        self._id_places: list[int] = []
        self._seed = 0
        self._after: list[int] = []
        try:
            self._parse_tail(head, sample.nbytes)
        except (struct.error, ValueError, IndexError) as error:
            raise DumpFormatError(f"a .pt file that torch wrote is not understood ({error})") from None
        self.head = bytes(head)

    def tail(self, crc: int) -> bytearray:
        """File content behind the bytes of the tensor.

        Args:
            crc: CRC-32 of the bytes of the tensor.
        """
        tail = self._tail.copy()
        for place in self._places:
            _CRC.pack_into(tail, place, crc)
        if self._id_text >= 0:
            seed = _combine(self._seed, crc)
            for other in self._after:
                seed = _combine(seed, other)
            start = self._id_text
            tail[start + _DIGITS : start + 2 * _DIGITS] = b"%020d" % seed
            own = zlib.crc32(memoryview(tail)[start : start + 2 * _DIGITS])
            for place in self._id_places:
                _CRC.pack_into(tail, place, own)
        return tail

    def widen_elements(self, _address: int, _nbytes: int) -> None:
        """The file has the bytes of the tensor as they are."""

    def _parse_tail(self, head: bytearray, nbytes: int) -> None:
        skipped = len(head) + nbytes  # distance of a place in the tail from the beginning of the file
        tail, found, payload = self._tail, b"", False
        for name, local, size, crc, at in _records(tail, skipped):
            kind = name.partition("/")[2]
            record = head if local < len(head) else tail
            start = local - (0 if record is head else skipped)
            content = start + _LOCAL + sum(struct.unpack_from("<HH", record, start + 26))
            if kind.startswith("data/"):
                if (content, size) != (len(head), nbytes) or payload or (nbytes and tail[:4] != b"PK\x07\x08"):
                    raise ValueError(f"record {name!r} is not where the bytes of the tensor are")
                payload = True
                # in the data descriptor right behind the bytes (there is none when there are no bytes), and in the central directory
                self._places = [4, at] if nbytes else [at]
                continue
            if kind == ".data/serialization_id" and size == 2 * _DIGITS and record is tail:
                self._id_text, self._id_places = content, [content + size + 4, at]
                found = bytes(tail[content : content + size])
                continue
            right = zlib.crc32(record[content : content + size])
            if right != crc:  # torch was told to leave checksums out; without them unzip refuses the file
                _CRC.pack_into(record, content + size + 4, right)
                _CRC.pack_into(tail, at, right)
            if payload:
                self._after.append(right)
            else:
                self._seed = _combine(self._seed, right)
        if not payload:
            raise ValueError("there is no record 'data/0'")
        if self._id_text >= 0:
            sample_crc = _CRC.unpack_from(tail, self._places[-1])[0]
            if self.tail(sample_crc)[self._id_text : self._id_text + 2 * _DIGITS] != found:
                # checksums were left out, or another torch hashes otherwise: the id of the sample stays, nothing depends on it
                for place in self._id_places:
                    _CRC.pack_into(tail, place, zlib.crc32(found))
                self._id_text = -1


def _combine(seed: int, value: int) -> int:
    """``c10::hash_combine`` for 64-bit words."""
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _M64)


def _records(tail: bytes | bytearray, skipped: int) -> list[tuple[str, int, int, int, int]]:
    """Of every record: name, offset of its local header, size, CRC-32, and where in `tail` the central directory has this CRC-32."""
    end = tail.rindex(_END)
    count, start = struct.unpack_from("<H", tail, end + 10)[0], struct.unpack_from("<I", tail, end + 16)[0]
    end64 = tail.rfind(_END64, 0, end)
    if end64 >= 0:
        count, _, start = struct.unpack_from("<3Q", tail, end64 + 32)
    at = start - skipped
    records = []
    for _ in range(count):
        fields = _CENTRAL.unpack_from(tail, at)
        signature, crc, size, local = fields[0], fields[7], fields[9], fields[16]
        name_bytes, extra_bytes, comment_bytes = fields[10:13]
        if signature != b"PK\x01\x02":
            raise ValueError("the central directory is damaged")
        name = tail[at + _CENTRAL.size : at + _CENTRAL.size + name_bytes].decode()
        extra = tail[at + _CENTRAL.size + name_bytes :][:extra_bytes]
        size, local = _wide(extra, fields[8], size, local)
        records.append((name, local, size, crc, at + 16))
        at += _CENTRAL.size + name_bytes + extra_bytes + comment_bytes
    return sorted(records, key=lambda record: record[1])


def _wide(extra: bytes | bytearray, packed: int, size: int, local: int) -> tuple[int, int]:
    """Size and offset of a record, from the ZIP64 extra field where the 32-bit fields are full (4.5.3)."""
    full = 0xFFFFFFFF
    if full not in (size, local):
        return size, local
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            values = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = values.pop(0) if size == full else size
            packed = values.pop(0) if packed == full else packed
            local = values.pop(0) if local == full else local
            return size, local
        at += 4 + length
    raise ValueError("a record is larger than its fields")
