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


def same_crc(target: StoredTensor, golden: StoredTensor, reads: FileReads) -> bool | None:
    """Are two tensors the same by the CRCs of their storages? None: they have none, or were cut differently."""
    if (
        target.dtype != golden.dtype
        or target.shape != golden.shape
        or target.copies
        or golden.copies
        or len(target.boxes) != len(golden.boxes)
        or not target.boxes
    ):
        return None
    width = item_size(target.dtype)
    if width is None:
        return None
    same = True
    for target_box, golden_box in zip(sorted(target.boxes, key=_first), sorted(golden.boxes, key=_first)):
        if (target_box.offsets, target_box.sizes) != (golden_box.offsets, golden_box.sizes):
            return None
        target_crc, golden_crc = _crc(target_box, width, reads), _crc(golden_box, width, reads)
        if target_crc is None or golden_crc is None:
            return None
        same = same and target_crc == golden_crc
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
