"""Reads one tensor from a ``.pt`` file without torch and without running what the file says.

The format is that of ``torch.save`` since torch 1.6: an uncompressed zip archive with ``{top}/data.pkl`` (a pickle that describes
the tensor), ``{top}/data/{key}`` (the bytes of its storage) and ``{top}/byteorder``. The pickle is not loaded but read by
`msprobe_engine.formats.tensors.unpickle`: nothing that it names is imported or called, and only what describes one tensor is accepted.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.io.archives import read_member, read_members, stored_begin
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.formats.tensors.decoding import Array, decoder
from msprobe_engine.formats.tensors.opaque_objects import Inert
from msprobe_engine.formats.tensors.pickle_machine import Wrong
from msprobe_engine.formats.tensors.pt_parts import ARCHIVE, guard_torch_file, reach
from msprobe_engine.formats.tensors.torch_pickle import CONJUGATE, LAZY, NEGATIVE, FileTensor, Storage, TorchHooks
from msprobe_engine.formats.tensors.unpickle import load

_MAX_PICKLE = 1 << 16  # the description of one tensor takes about 200 bytes
_SOMEWHERE = Path()
"""The description says which storage it is, and the directory of the archive where that is."""


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        values: the elements, in the shape of the tensor; bfloat16 and float8 as float32, which holds all their values.
        dtype: element type in the file, as ``torch.bfloat16``.
    """

    values: Array
    dtype: str


class TensorView(NamedTuple):
    """A tensor as a view of its storage.

    Attributes:
        dtype: element type, as ``bfloat16``.
        offset: first element of the tensor in the storage.
        shape, strides: in elements.
        conjugate, negative: the elements in the file are the conjugates, the negatives of the tensor's.
    """

    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugate: bool
    negative: bool


class PlacedTensor(NamedTuple):
    """Where the elements of a tensor are in its file.

    Attributes:
        start, nbytes: its storage in the file, bytes.
        big_endian: byte order of the elements.
    """

    start: int
    nbytes: int
    view: TensorView
    big_endian: bool


def locate_pt(file: BinaryIO, path: Path, size: int) -> PlacedTensor:
    """Where the tensor of an open ``.pt`` file is; nothing of it is read, and checksums are not looked at.

    Args:
        file: opened for reading.
        path: its name in messages.
        size: of the file, bytes.

    Raises:
        DumpFormatError: it is damaged, or holds anything but one plain tensor.
    """
    with guard_torch_file(path):
        described, order, data = _members(file)
        start = stored_begin(file, data)
        width = item_size(described.dtype) or 1
        if start + data.file_size > size or data.file_size % width:
            raise Wrong(f"has a storage of {data.file_size} bytes, which does not fit elements of {width} bytes or the file")
        _check_reach(described, data.file_size // width)
        return PlacedTensor(start, data.file_size, described, order.strip() == b"big")


def read_pt(path: Path) -> StoredTensor:
    """The tensor in a ``.pt`` file.

    Raises:
        DumpFormatError: it cannot be read, is damaged, holds anything but one plain tensor, or is of a type numpy cannot hold.
    """
    with guard_torch_file(path), open_input(path) as file:
        return _read_tensor(file, os.fstat(file.fileno()).st_size)


def _members(file: BinaryIO) -> tuple[TensorView, bytes, zipfile.ZipInfo]:
    """The description, the byte order and the member that holds the storage."""
    members = read_members(file, ARCHIVE)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise Wrong(f"has {len(pickles)} members called data.pkl; a file of torch.save has one")
    top = pickles[0][: -len("data.pkl")]
    key, described = _describe(read_member(file, members[pickles[0]], _MAX_PICKLE))
    order = read_member(file, members[top + "byteorder"], 16) if top + "byteorder" in members else b"little"
    data = members.get(f"{top}data/{key}")
    if data is None:
        raise Wrong(f"has no member data/{key[:80]}, which its description names")
    return described, order, data


def _read_tensor(file: BinaryIO, size: int) -> StoredTensor:
    described, order, data = _members(file)
    begin = stored_begin(file, data)
    found = decoder(described.dtype)
    width = item_size(described.dtype)
    if found is None or width is None:
        raise Wrong(f"holds elements of type {described.dtype}, for which numpy has no type; load it as a torch tensor")
    words = np.dtype(found.words)
    if data.file_size % words.itemsize or data.file_size > size:
        raise Wrong(f"has a storage of {data.file_size} bytes, which does not fit elements of {words.itemsize} bytes or the file")
    flat = np.empty(data.file_size // words.itemsize, words)
    file.seek(begin)
    _read_into(file, data.CRC, flat.view(np.uint8).data)
    if order.strip() == b"big":
        flat = flat.byteswap()
    values = _view(found.values(flat) if found.values is not None else flat, described)
    if described.conjugate:
        values = np.conj(values)
    if described.negative:
        values = -values
    return StoredTensor(values, f"torch.{described.dtype}")


def _read_into(file: BinaryIO, checksum: int, buffer: memoryview) -> None:
    done = 0
    while done < len(buffer):
        part = file.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not part:
            raise Wrong(f"ends after {done} of {len(buffer)} bytes of data; it was cut off")
        done += part
    if zlib.crc32(buffer) != checksum:
        raise Wrong("has data whose checksum is not that of the directory; it is damaged")


def _view(flat: Array, described: TensorView) -> Array:
    shape, strides, offset = described.shape, described.strides, described.offset
    if any(n == 0 for n in shape):
        return np.empty(shape, flat.dtype)
    _check_reach(described, len(flat))
    expected, contiguous = 1, True
    for n, step in zip(reversed(shape), reversed(strides)):
        contiguous &= n == 1 or step == expected
        expected *= n
    if contiguous:
        return flat[offset : offset + expected].reshape(shape)
    steps = tuple(step * flat.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], shape, steps, writeable=False)


def _check_reach(described: TensorView, elements: int) -> None:
    if reach(described.offset, described.shape, described.strides) > elements:
        raise Wrong(f"describes a tensor of shape {list(described.shape)} that reaches behind its {elements} elements")


@lru_cache(maxsize=1024)
def _describe(data: bytes) -> tuple[str, TensorView]:
    """The one tensor that a pickle describes, behind the key of its storage."""
    keys: list[str] = []

    def locate(key: str, dtype: str, *_: Any) -> Storage:
        keys.append(key)
        return Storage(dtype, _SOMEWHERE, 0, 1 << 62)

    hooks = TorchHooks(locate)
    value, _ = load(data, hooks)
    if hooks.refused:
        names = ", ".join(sorted(hooks.refused)[:8])
        raise Wrong(f"names {names} in its pickle; only plain tensors are read, and nothing is executed. Do not trust it")
    lazy: tuple[Any, ...] = ()
    if isinstance(value, Inert) and value.cls == LAZY and value.args:
        value, lazy = value.args[0], value.args[1:]
    if not isinstance(value, FileTensor) or len(keys) != 1:
        kind = value.cls if isinstance(value, Inert) else type(value).__name__
        raise Wrong(f"holds a {kind}, no tensor; only plain tensors are read, and nothing is executed")
    offset = value.start // (item_size(value.dtype) or 1)
    return keys[0], TensorView(value.dtype, offset, value.shape, value.strides, CONJUGATE in lazy, NEGATIVE in lazy)
