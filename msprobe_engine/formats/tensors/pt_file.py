"""Reads one tensor from a ``.pt`` file without torch and without running what the file says.

The format is that of ``torch.save`` since torch 1.6: an uncompressed zip archive with ``{top}/data.pkl`` (a pickle that describes
the tensor), ``{top}/data/{key}`` (the bytes of its storage) and ``{top}/byteorder``. The pickle is not loaded but read by
`msprobe_engine.formats.tensors.unpickle`: nothing that it names is imported or called, and only what describes one tensor is accepted.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import ArchiveError, DumpFormatError
from msprobe_engine.core.io.archives import read_member, read_members, stored_begin
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.regular_files import OddFileError
from msprobe_engine.formats.tensors.decoding import Array, decoder
from msprobe_engine.formats.tensors.pt_parts import ARCHIVE, STORAGES, is_size, is_view, reach
from msprobe_engine.formats.tensors.unpickle import Wrong, load

_MAX_PICKLE = 1 << 16  # the description of one tensor takes about 200 bytes
_REBUILD_V2, _REBUILD_V3 = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"
_PARAMETER, _UNTYPED, _ORDERED = "torch._utils _rebuild_parameter", "torch.storage UntypedStorage", "collections OrderedDict"


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        values: the elements, in the shape of the tensor; bfloat16 and float8 as float32, which holds all their values.
        dtype: element type in the file, as ``torch.bfloat16``.
    """

    values: Array
    dtype: str


class _Global(NamedTuple):
    """A name in the pickle, ``module name``."""

    name: str


class _Storage(NamedTuple):
    dtype: str | None
    """None: bytes without a type."""
    key: str


class _Described(NamedTuple):
    """A tensor as the pickle describes it."""

    storage: _Storage
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
        dtype: element type, as ``bfloat16``.
        offset: first element of the tensor in the storage.
        shape, strides: in elements.
        conjugate, negative: the elements in the file are the conjugates, the negatives of the tensor's.
        big_endian: byte order of the elements.
    """

    start: int
    nbytes: int
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugate: bool
    negative: bool
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
    with _in_words(path):
        described, order, data = _members(file)
        start = stored_begin(file, data)
        width = item_size(described.dtype) or 1
        if start + data.file_size > size or data.file_size % width:
            raise Wrong(f"has a storage of {data.file_size} bytes, which does not fit elements of {width} bytes or the file")
        _check_reach(described, data.file_size // width)
        return PlacedTensor(start, data.file_size, *described[1:], big_endian=order.strip() == b"big")


def read_pt(path: Path) -> StoredTensor:
    """The tensor in a ``.pt`` file.

    Raises:
        DumpFormatError: it cannot be read, is damaged, holds anything but one plain tensor, or is of a type numpy cannot hold.
    """
    with _in_words(path), open_input(path) as file:
        return _read(file, os.fstat(file.fileno()).st_size)


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """What goes wrong with a file becomes an error that names it."""
    try:
        yield
    except Wrong as error:
        raise DumpFormatError(f"{path}: {error}") from None
    except ArchiveError as error:
        raise DumpFormatError(
            f"{path}: is no tensor file or is damaged: it {error}; was the process killed while it was written?"
        ) from None
    except OddFileError as error:
        raise DumpFormatError(f"{path}: is no regular file ({error.strerror})") from None
    except FileNotFoundError:
        raise DumpFormatError(f"{path}: is not there; it was removed or never written (disk full, killed run)") from None
    except OSError as error:
        raise DumpFormatError(f"{path}: cannot be read ({error.strerror or error}); check owner and mode") from None
    except (RuntimeError, ValueError, KeyError, OverflowError) as error:
        raise DumpFormatError(f"{path}: is no tensor file or is damaged ({error}); was the process killed while it was written?") from None


def _members(file: BinaryIO) -> tuple[_Described, bytes, zipfile.ZipInfo]:
    """The description, the byte order and the member that holds the storage."""
    members = read_members(file, ARCHIVE)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise Wrong(f"has {len(pickles)} members called data.pkl; a file of torch.save has one")
    top = pickles[0][: -len("data.pkl")]
    described = _describe(read_member(file, members[pickles[0]], _MAX_PICKLE))
    order = read_member(file, members[top + "byteorder"], 16) if top + "byteorder" in members else b"little"
    data = members.get(f"{top}data/{described.storage.key}")
    if data is None:
        raise Wrong(f"has no member data/{described.storage.key[:80]}, which its description names")
    return described, order, data


def _read(file: BinaryIO, size: int) -> StoredTensor:
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


def _view(flat: Array, described: _Described) -> Array:
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


def _check_reach(described: _Described, elements: int) -> None:
    if reach(described.offset, described.shape, described.strides) > elements:
        raise Wrong(f"describes a tensor of shape {list(described.shape)} that reaches behind its {elements} elements")


@lru_cache(maxsize=1024)
def _describe(data: bytes) -> _Described:
    """The one tensor that a pickle describes."""
    return _tensor(load(data, _OneTensor())[0])


class _OneTensor:
    """`msprobe_engine.formats.tensors.unpickle.Hooks` that know tensors and nothing else."""

    def named(self, module: str, name: str) -> _Global:
        return _Global(f"{module} {name}")

    def called(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return _called(function, arguments if not keywords else ())

    def persistent(self, identity: Any) -> _Storage:
        return _storage(identity)

    def built(self, value: Any, state: Any) -> Any:
        raise Wrong(
            f"sets the state of a {type(value).__name__} ({type(state).__name__}); only plain tensors are read, and nothing is executed"
        )

    def extended(self, value: Any, elements: list[Any]) -> None:
        raise Wrong(f"appends {len(elements)} values to a {type(value).__name__}; only plain tensors are read, and nothing is executed")

    def updated(self, value: Any, pairs: list[tuple[Any, Any]]) -> None:
        raise Wrong(f"sets {len(pairs)} items of a {type(value).__name__}; only plain tensors are read, and nothing is executed")


def _called(function: Any, arguments: Any) -> Any:
    """What a call in the pickle stands for; only the calls that describe a tensor are known, and none is made."""
    name = function.name if isinstance(function, _Global) else "a value"
    if name == _ORDERED and arguments == ():
        return ()  # hooks of a tensor: a saved one has none
    if name == _PARAMETER and isinstance(arguments, tuple) and arguments and isinstance(arguments[0], _Described):
        return arguments[0]
    if name in (_REBUILD_V2, _REBUILD_V3) and isinstance(arguments, tuple) and len(arguments) >= 6:
        return _rebuilt(name == _REBUILD_V3, arguments)
    raise Wrong(f"calls {name!r} in its pickle; only plain tensors are read, and nothing is executed. Do not trust it")


def _storage(identity: Any) -> _Storage:
    """``("storage", type, key, device, number of elements)``; of untyped ones the number of bytes."""
    if isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage" and isinstance(identity[1], _Global):
        _, kind, key, _, count = identity
        known = STORAGES.get(kind.name.removeprefix("torch ")) if kind.name.startswith("torch ") else None
        if (known or kind.name == _UNTYPED) and isinstance(key, str) and is_size(count):
            return _Storage(known, key)
    raise Wrong(f"has an unknown storage {str(identity)[:120]}; load it as a torch tensor")


def _rebuilt(typed: bool, arguments: tuple[Any, ...]) -> _Described:
    """``(storage, offset, shape, strides, requires grad, hooks[, dtype][, metadata])``"""
    storage, offset, shape, strides = arguments[:4]
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    rest = arguments[6:]
    if typed and rest and isinstance(rest[0], _Global):
        dtype, rest = rest[0].name.removeprefix("torch "), rest[1:]
    metadata = rest[0] if rest and isinstance(rest[0], dict) else {}
    if not (isinstance(storage, _Storage) and dtype and is_view(offset, shape, strides)):
        raise Wrong(f"has a tensor with shape {str(shape)[:80]} and strides {str(strides)[:80]}, which cannot be")
    return _Described(storage, dtype, offset, shape, strides, metadata.get("conj") is True, metadata.get("neg") is True)


def _tensor(value: Any) -> _Described:
    if not isinstance(value, _Described):
        raise Wrong(f"holds a {type(value).__name__}, no tensor")
    return value
