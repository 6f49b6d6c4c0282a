"""Saved tensors as flat blocks of elements, for comparing them without holding one whole.

All three formats are read: ``.pt``, ``.npy`` and packed shards. The data of a file are read where they are, block by block, into memory
that is used again; nothing in a file is executed, links are not followed, and offsets are checked against the size of the file.
Views with odd strides are mapped, which needs a file that nobody cuts off meanwhile.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import item_size, plain_name
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.input_files import open_input
from msprobe_engine.core.io.npy_file import read_header
from msprobe_engine.formats.tensors.decoding import decoder
from msprobe_engine.formats.tensors.pt_file import locate_pt
from msprobe_engine.formats.tensors.reader import NPY, SAFETENSORS, TensorFiles, TensorSource

Array = npt.NDArray[Any]
_LARGEST_NPY_HEADER = 10_000
_BFLOAT16 = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '<E2', 'fortran_order': False, 'shape': \(((?:\d{1,18},? ?){0,64})\),? ?\}", re.DOTALL
)
_MOST_REPEATED = 1 << 32
"""Elements of a view with strides of 0 (``expand``) that are looked at one by one; a few bytes could stand for any number of them."""


class _Place(NamedTuple):
    """Where elements are in a file. `strides` in bytes; None: C order without gaps."""

    start: int
    words: np.dtype[Any]
    values: Callable[[Array], Array] | None
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    nbytes: int
    first: int = 0
    conjugate: bool = False
    negative: bool = False


class Elements:
    """The elements of one saved tensor, in C order. Use it as a context manager.

    Attributes:
        dtype: element type, as ``bfloat16``.
        size: number of elements.
    """

    def __init__(self, path: Path, file: BinaryIO, place: _Place) -> None:
        self._path, self._file, self._place = path, file, place
        self.dtype, self.shape = place.dtype, place.shape
        self.size = int(np.prod(place.shape, dtype=object)) if place.shape else 1
        self._view: Array | None = None

    def __enter__(self) -> Elements:
        return self

    def __exit__(self, *_: object) -> None:
        self._view = None
        self._file.close()

    def read(self, start: int, count: int, memory: bytearray) -> Array:
        """`count` elements from `start` on, [count], in the numpy type that holds them (bfloat16 and float8: float32).

        Args:
            memory: room for the bytes, enlarged when it is too small; the result may lie in it.

        Raises:
            DumpFormatError: the file ends before, or cannot be read.
        """
        place = self._place
        if not count:
            words: Array = np.empty(0, place.words)
        elif place.strides is None:
            words = self._contiguous(start, count, memory)
        else:
            words = self._map_file().flat[start : start + count]
        if not place.words.isnative:
            words = words.astype(place.words.newbyteorder("="))
        values = words if place.values is None else place.values(words)
        if place.conjugate:
            values = np.conj(values)
        return -values if place.negative else values

    def _contiguous(self, start: int, count: int, memory: bytearray) -> Array:
        item = self._place.words.itemsize
        nbytes = count * item
        if len(memory) < nbytes:
            memory.extend(bytes(nbytes - len(memory)))
        room: Any = np.frombuffer(memory, np.uint8, nbytes)
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(self._file.fileno(), [room[done:]], self._place.start + start * item + done)
            except OSError as error:
                raise DumpFormatError(f"{self._path}: cannot be read ({error.strerror}); check the disk") from None
            if not got:
                raise DumpFormatError(f"{self._path}: ends before the tensor does; it was cut off")
            done += got
        words: Array = room.view(self._place.words)
        return words

    def _map_file(self) -> Array:
        if self._view is None:
            place = self._place
            assert place.strides is not None
            whole = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            flat = np.frombuffer(whole, place.words, place.nbytes // place.words.itemsize, place.start)
            self._view = np.lib.stride_tricks.as_strided(flat[place.first :], place.shape, place.strides, writeable=False)
        return self._view


class InMemoryTensor:
    """A tensor in memory, to be read as `Elements` are."""

    def __init__(self, array: Array, dtype: str) -> None:
        self.dtype, self.shape, self.size = dtype, array.shape, array.size
        self._flat = array.reshape(-1)

    def __enter__(self) -> InMemoryTensor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, start: int, count: int, memory: bytearray) -> Array:  # noqa: ARG002  (stands in for Elements)
        """As `Elements.read`."""
        return self._flat[start : start + count]


Readable = Elements | InMemoryTensor
"""What can be compared."""


def open_elements(files: TensorFiles, name: str) -> Elements:
    """The saved tensor of this ``data_name``.

    Raises:
        UsageError: there is no such tensor.
        DumpFormatError: its file is damaged, is a link, or holds anything but one tensor of numbers.
    """
    return _open(files.source(name))


def open_file(path: Path) -> Elements:
    """The tensor in a ``.pt`` or ``.npy`` file.

    Raises:
        DumpFormatError: as `open_elements`, or there is no such file.
    """
    return _open(TensorSource(path.name, path, NPY if path.suffix == ".npy" else "pt", 0, 0))


def check_dumped(tensor: Readable, name: str, shape: Any, dtype: str | None) -> None:
    """Hold a saved tensor against what its dump says of it: bfloat16 and float8 may be saved as float32, dimensions of 1 are not looked at.

    Args:
        name: of the file, for the message.
        shape, dtype: as dump.json has them; what is no shape and no known type is not looked at.

    Raises:
        DumpFormatError: the file holds another tensor.
    """
    said = plain_name(dtype or "")
    widened = tensor.dtype == "float32" and said.startswith(("bfloat16", "float8"))
    other_type = item_size(said) is not None and tensor.dtype != said and not widened
    other_shape = isinstance(shape, list) and [n for n in shape if n != 1] != [n for n in tensor.shape if n != 1]
    if other_type or other_shape:
        raise DumpFormatError(
            f"{name}: holds {tensor.dtype} of shape {list(tensor.shape)}, and its dump.json says {said} of shape {shape}; the file is of "
            "another tensor"
        )


def whole(tensor: Readable) -> Array:
    """All elements in the tensor's shape."""
    return tensor.read(0, tensor.size, bytearray()).reshape(tensor.shape)


def join(tensors: Iterable[Elements], axis: int) -> InMemoryTensor:
    """Tensors joined along a dimension, as 26.2.0 joins q, k and v: dimensions of size 1 are dropped first.

    Raises:
        DumpFormatError: the shapes do not fit together.
    """
    with ExitStack() as stack:
        parts = [stack.enter_context(tensor) for tensor in tensors]
        arrays = [np.squeeze(whole(part)) for part in parts]
        try:
            return InMemoryTensor(np.concatenate(arrays, axis=axis), parts[0].dtype)
        except ValueError:
            shapes = ", ".join(str(list(array.shape)) for array in arrays)
            raise DumpFormatError(f"tensors of the shapes {shapes} cannot be joined along dimension {axis}") from None


def _open(source: TensorSource) -> Elements:
    path = source.path
    try:
        file = open_input(path, follow=False)
    except FileNotFoundError:
        raise DumpFormatError(f"{path}: is not there; it was removed or never written (disk full, killed run)") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DumpFormatError(f"{path}: cannot be read ({reason}); a link is not followed, check owner and mode") from None
    try:
        size = os.fstat(file.fileno()).st_size
        if source.format == NPY:
            return Elements(path, file, _npy(file, path, size))
        return Elements(path, file, _locate_packed(source) if source.format == SAFETENSORS else _pt(file, path, size))
    except BaseException:
        file.close()
        raise


def _locate_packed(source: TensorSource) -> _Place:
    assert source.dtype is not None
    assert source.shape is not None
    words, values = _decoder(source.dtype, source.path)
    if int(np.prod(source.shape, dtype=object)) * words.itemsize != source.nbytes:
        raise DumpFormatError(f"{source.path}: '{source.name[:120]}' has {source.nbytes} bytes, which do not fit its shape")
    return _Place(source.offset, words, values, plain_name(source.dtype), source.shape, None, source.nbytes)


def _pt(file: BinaryIO, path: Path, size: int) -> _Place:
    found = locate_pt(file, path, size)
    view = found.view
    words, values = _decoder(view.dtype, path)
    if found.big_endian:
        words = words.newbyteorder(">")
    item = words.itemsize
    place = _Place(found.start, words, values, view.dtype, view.shape, None, found.nbytes, 0, view.conjugate, view.negative)
    if _in_order(view.shape, view.strides):
        return place._replace(start=found.start + view.offset * item)
    count = int(np.prod(view.shape, dtype=object))
    if count > _MOST_REPEATED and count * item > found.nbytes:
        raise DumpFormatError(f"{path}: is a view of {count:,} elements on {found.nbytes:,} bytes; at most {_MOST_REPEATED:,} are compared")
    return place._replace(strides=tuple(step * item for step in view.strides), first=view.offset)


def _npy(file: BinaryIO, path: Path, size: int) -> _Place:
    """Format: numpy's NEP 1."""
    # Start of the data and shape of an ``.npy`` that MindSpore's kernel dump wrote of bfloat16 (``<E2``), which numpy does not know
    file.seek(0)
    found = _BFLOAT16.match(file.read(1024))
    file.seek(0)
    own = None if found is None else (10 + int.from_bytes(found[1], "little"), tuple(int(n) for n in found[2].split(b",") if n.strip()))
    if own is not None:
        start, sizes = own
        count = int(np.prod(sizes, dtype=object)) if sizes else 1
        if start + 2 * count > size:
            raise DumpFormatError(f"{path}: ends before the tensor does; it was cut off")
        return _Place(start, *_decoder("bfloat16", path), "bfloat16", sizes, None, 2 * count)

    def header() -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        file.seek(0)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(file, max_header_size=_LARGEST_NPY_HEADER)

    try:
        shape, fortran, dtype = read_header(header)
    except Exception as error:  # the header is Python text: what numpy says of a damaged one is of many types
        raise DumpFormatError(f"{path}: is no numpy file or is damaged ({str(error)[:120]})") from None
    if dtype.hasobject or dtype.kind not in "biufc":
        raise DumpFormatError(f"{path}: holds {str(dtype)[:80]}; only numbers can be compared, and nothing in it is executed")
    start = file.tell()
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if any(n < 0 for n in shape) or start + count * dtype.itemsize > size:
        raise DumpFormatError(f"{path}: ends before the tensor does; it was cut off")
    place = _Place(start, dtype, None, dtype.name, shape, None, count * dtype.itemsize)
    if not fortran or count == 0 or len(shape) < 2:
        return place
    steps = [dtype.itemsize]
    for n in shape[:-1]:
        steps.append(steps[-1] * n)
    return place._replace(strides=tuple(steps))


def _decoder(dtype: str, path: Path) -> tuple[np.dtype[Any], Callable[[Array], Array] | None]:
    found = decoder(dtype)
    if found is None:
        raise DumpFormatError(f"{path}: holds elements of type {dtype[:80]}, for which there is no arithmetic here")
    return np.dtype(found.words), found.values


def _in_order(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(strides)):
        if n != 1 and step != expected:
            return not all(shape)
        expected *= n
    return True
