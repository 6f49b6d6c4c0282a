"""Equality without reading: the CRC-32 that ``torch.save`` leaves behind every storage of its zip files.

Each storage is a stored member of the zip, followed by a data descriptor: ``PK\\x07\\x08``, CRC-32, and the size twice, in 4 bytes or, of
large ones, in 8 (APPNOTE.TXT of the zip format, 4.3.9). So the CRC of a tensor that is a storage of its own lies right behind its last
byte, in items of ``.distcp`` files as well. ``torch.serialization.set_crc32_options(False)`` leaves 0 there: that says nothing.

A CRC-32 misses one of 2**32 changes by chance, and none that lies within 32 bits. It is no proof: only ``--quick`` asks for it.
"""

from __future__ import annotations

import struct

import numpy as np

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.formats.checkpoint.model import Box, StoredTensor, strides_of
from msprobe_engine.formats.tensors.file_reads import FileReads, Unreadable

_MAGIC = b"PK\x07\x08"
_SHORT, _LONG = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")


def same_crc(a: StoredTensor, b: StoredTensor, reads: FileReads) -> bool | None:
    """Are two tensors the same by the CRCs of their storages? None: they have none, or were cut differently."""
    if a.dtype != b.dtype or a.shape != b.shape or a.copies or b.copies or len(a.boxes) != len(b.boxes) or not a.boxes:
        return None
    width = item_size(a.dtype)
    if width is None:
        return None
    same = True
    for box_a, box_b in zip(sorted(a.boxes, key=_first), sorted(b.boxes, key=_first)):
        if (box_a.offsets, box_a.sizes) != (box_b.offsets, box_b.sizes):
            return None
        crc_a, crc_b = _crc(box_a, width, reads), _crc(box_b, width, reads)
        if crc_a is None or crc_b is None:
            return None
        same = same and crc_a == crc_b
    return same


def _first(box: Box) -> tuple[int, ...]:
    return box.offsets


def _crc(box: Box, width: int, reads: FileReads) -> int | None:
    """That of the storage, if the box is one whole storage in C order."""
    nbytes = box.numel * width
    if not nbytes or box.strides != strides_of(box.sizes):
        return None
    behind = np.empty(_LONG.size, np.uint8)
    try:
        reads.read(box.file, box.start + nbytes, behind)
    except Unreadable:
        return None
    for form in (_SHORT, _LONG):
        magic, crc, packed, size = form.unpack(behind[: form.size].tobytes())
        if magic == _MAGIC and packed == size == nbytes:
            return int(crc) or None
    return None
