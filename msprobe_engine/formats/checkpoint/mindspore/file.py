"""Files of ``mindspore.save_checkpoint``: ``.ckpt`` and ``.safetensors``. What they hold, and where; no tensor data are read.

A ``.ckpt`` is a message ``Checkpoint { repeated Value value = 1 }`` of ``Value { string tag = 1; TensorProto tensor = 2; MapTensorProto
maptensor = 3 }`` and ``TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }``
(``mindspore/train/checkpoint_pb2.py``). A tensor of more than 512 MiB lies in several values of one tag. Behind the message there may be
``crc_num`` and ten bytes of a CRC-32 (``mindspore/train/serialization.py``).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from msprobe_engine.core.dtypes import item_size, plain_name
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.damaged_files import guard_opening
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.log import printable
from msprobe_engine.formats.checkpoint.mindspore.proto_wire import BYTES, Field, Source, WireError
from msprobe_engine.formats.checkpoint.model import Box, Index, flat, whole
from msprobe_engine.formats.tensors.decoding import decoder
from msprobe_engine.formats.tensors.safetensors_file import read_safetensors

ENCRYPTED = (b"\xd8\x5e\x3a\x7f", b"\xd9\x5e\x3a\x7f", b"\xda\x5e\x3a\x7f")
"""First bytes of files that were saved with ``enc_key``: AES-CBC, AES-GCM, SM4-CBC."""
_CRC, _CRC_BYTES = b"crc_num", 10
_MAX_DIMS, _MAX_VALUES = 64, 5_000_000
_LONGEST_TEXT = 4096


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file.

    Attributes:
        shape, dtype: as of a `StoredTensor`.
        boxes: where its elements lie.
    """

    shape: Index
    dtype: str
    boxes: tuple[Box, ...]


@dataclass
class MindSporeFile:
    """What a file holds.

    Attributes:
        tensors: by tag.
        notes, problems: as of a `Checkpoint`.
    """

    path: Path
    tensors: dict[str, FileTensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class _Pieces:
    dims: list[int]
    kind: str
    places: list[tuple[int, int]]


def read_file(path: Path) -> MindSporeFile:
    """What a file of either format holds; a file that was cut off gives what is before, and a problem.

    Raises:
        DumpFormatError: it cannot be read, is encrypted, or is something else.
    """
    if path.suffix == ".safetensors":
        safe = read_safetensors(path)
        tensors = {name: FileTensor(t.shape, t.dtype, whole(t.shape, t.file, t.start, t.strides)) for name, t in safe.tensors.items()}
        notes = [f"{path}: {name} is of a type that is not known; it is compared as bytes" for name in safe.raw]
        return MindSporeFile(path, tensors, notes=notes)
    with guard_opening(path), open_input(path) as opened:
        return _read_file(Source(opened, os.fstat(opened.fileno()).st_size), path)


def _read_file(source: Source, path: Path) -> MindSporeFile:
    found = MindSporeFile(path)
    end = source.size
    head = source.bytes(0, min(4, end))
    if head in ENCRYPTED:
        raise DumpFormatError(
            f"{path}: is encrypted (saved with enc_key); nothing of it can be compared. Save it in the open with "
            "mindspore.load_checkpoint(path, dec_key=...) and mindspore.save_checkpoint"
        )
    if end >= len(_CRC) + _CRC_BYTES and source.bytes(end - len(_CRC) - _CRC_BYTES, end - _CRC_BYTES) == _CRC:
        end -= len(_CRC) + _CRC_BYTES
        found.notes.append(f"{path}: carries a CRC-32 of the file, which is not checked here")
    pieces: dict[str, _Pieces] = {}
    maps = 0
    try:
        for number, value in enumerate(source.fields(0, end)):
            if number >= _MAX_VALUES:
                raise WireError(f"holds more than {_MAX_VALUES} values")
            if (value.number, value.kind) != (1, BYTES):
                raise WireError(f"has a field {value.number} at byte {value.start}, where a value should be")
            maps += not _add_tensor(source, value, pieces)
    except WireError as error:
        if not pieces:
            raise DumpFormatError(f"{path}: {error}; it is no checkpoint of MindSpore, or was cut off or damaged") from None
        found.problems.append(
            f"{path}: {error}; it was cut off or is damaged, and what is behind cannot be compared ({len(pieces)} entries were read)"
        )
    if maps:
        found.notes.append(f"{path}: {maps} parts of hash tables (MapParameter) are not compared")
    if not pieces and not maps:
        raise DumpFormatError(f"{path}: holds no values; the process was killed while it was written, or it is something else")
    for tag, held in pieces.items():
        _finish(source, tag, held, found)
    return found


def _add_tensor(source: Source, value: Field, pieces: dict[str, _Pieces]) -> bool:
    """Adds what a value holds; False: it holds no tensor."""
    tag, tensor = None, None
    for inner in source.fields(value.start, value.end):
        if inner.number == 1:
            tag = source.text(inner)
        elif inner.number == 2 and inner.kind == BYTES:
            tensor = inner
    if tag is None:
        raise WireError(f"has a value without a tag at byte {value.start}")
    if tensor is None:
        return False
    dims: list[int] = []
    kind, place = "", (tensor.end, tensor.end)
    for inner in source.fields(tensor.start, tensor.end):
        if inner.number == 1:
            dims += source.numbers(inner)
        elif inner.number == 2:
            kind = source.text(inner)
        elif inner.number == 3 and inner.kind == BYTES:
            place = inner.start, inner.end
    if len(dims) > _MAX_DIMS or any(n < 0 or n >= 1 << 48 for n in dims):
        raise WireError(f"has dimensions {str(dims)[:80]} of {tag[:80]!r} at byte {tensor.start}")
    before = pieces.setdefault(tag, _Pieces(dims, kind, []))
    if (before.dims, before.kind) != (dims, kind):
        raise WireError(f"has two values {tag[:80]!r} of {before.kind} {before.dims} and {kind} {dims} at byte {tensor.start}")
    before.places.append(place)
    return True


def _finish(source: Source, tag: str, held: _Pieces, found: MindSporeFile) -> None:
    """Makes an entry of the pieces of a tag."""
    total = sum(end - start for start, end in held.places)
    name = printable(tag)
    if held.kind == "str":
        if total > _LONGEST_TEXT:
            found.notes.append(f"{found.path}: {name} is a text of {total} bytes and is not compared")
        else:
            found.texts[name] = b"".join(source.bytes(*place) for place in held.places).decode("utf-32-le", "replace")
        return
    dtype = plain_name(held.kind)
    width = item_size(dtype)
    dims = () if held.dims == [0] else tuple(held.dims)
    if width is None:
        found.notes.append(f"{found.path}: {name} is of type {printable(held.kind)}, which is not known; it is compared as bytes")
        dtype, width, dims = "uint8", 1, (total,)
    if total != math.prod(dims) * width or any((end - start) % width for start, end in held.places):
        found.problems.append(
            f"{found.path}: {name} has {total} bytes and should have {math.prod(dims) * width} for {dtype} {list(dims)}; it was "
            "cut off or is damaged, and is not compared"
        )
        return
    if len(held.places) == 1:
        found.tensors[name] = FileTensor(dims, dtype, whole(dims, found.path, held.places[0][0]))
        return
    boxes: list[Box] = []
    first = 0
    for start, end in held.places:
        count = (end - start) // width
        boxes += flat(dims, first, count, found.path, start, width)
        first += count
    found.tensors[name] = FileTensor(dims, dtype, tuple(boxes))


def number_of(held: FileTensor) -> Any:
    """The value of a tensor of one element; None: it cannot be read."""
    known = decoder(held.dtype)
    if known is None or len(held.boxes) != 1 or math.prod(held.shape) != 1:
        return None
    box, dtype = held.boxes[0], np.dtype(known.words)
    try:
        with open_input(box.file) as opened:
            data = os.pread(opened.fileno(), dtype.itemsize, box.start)
    except OSError:
        return None
    if len(data) < dtype.itemsize:
        return None
    words = np.frombuffer(data, dtype)
    value = (known.values(words) if known.values is not None else words)[0]
    return float(str(value)) if value.dtype == np.float32 else value.item()  # 0.01 and not what lies nearest to it in 32 bits
