"""Tensors as ``.npy`` files and as bytes, on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import item_size, plain_name
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.io.output_files import WholeFile
from msprobe_engine.formats.dump.writing.npy_template import NpyTemplate
from msprobe_engine.formats.tensors.decoding import decoder
from msprobe_engine.formats.tensors.reader import load_numpy
from msprobe_integrations.mindspore.tensors.memory import memory_of

_TYPES: dict[str, str] = {  # those whose name in mindspore is not the printed one in lower case
    "Bool": "bool_",
    "Int4": "qint4x2",
}


def bytes_of(tensor: Any) -> npt.NDArray[np.uint8]:
    """A copy of the bytes of the elements, in C order, flat. Waits for the tensor.

    Raises:
        UsageError: it has none: not initialised, or of a type that is not known.
        RuntimeError: an operator of the training has failed (`memory.training_errors`).
    """
    return memory_of(tensor).raw()


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """A tensor as the array that its ``.npy`` file has, a copy.

    Raises:
        UsageError: as `bytes_of`.
    """
    return NpyTemplate(str(tensor.dtype), tuple(tensor.shape)).array(bytes_of(tensor))


def write(tensor: Any, path: Path) -> None:
    """Write a tensor as ``.npy``, mode 0640.

    Raises:
        UsageError: as `bytes_of`.
    """
    array = array_of(tensor)
    with WholeFile(path) as whole:
        np.save(whole.file, array, allow_pickle=False)


def load(path: Path) -> Any:
    """The tensor in a ``.npy`` file, of numpy's type. Executes nothing of the file.

    Raises:
        DumpFormatError: the file is not there or damaged.
    """
    return mindspore.Tensor(load_numpy(Path(path)))


def from_bytes(data: bytes | bytearray | memoryview, dtype: str, shape: Sequence[int]) -> Any:
    """A tensor from its bytes in C order.

    Args:
        dtype: as dump files have it, ``BFloat16``.

    Raises:
        DumpFormatError: there is no such type, or the bytes are not those of the shape.
    """
    kind = getattr(mindspore, _TYPES.get(dtype, plain_name(dtype)), None)
    size = item_size(dtype)
    whole = tuple(shape)
    if kind is None or size is None:
        raise DumpFormatError(
            f"dtype {dtype!r} is unknown to mindspore {mindspore.__version__}; read the dump with the version that wrote it"
        )
    if len(data) != size * int(np.prod(whole, dtype=np.int64)):
        raise DumpFormatError(f"{len(data)} bytes are no tensor of {dtype} and shape {list(whole)}")
    raw = np.frombuffer(bytearray(data), np.uint8)
    decoding = decoder(dtype)
    if decoding is None or decoding.values is not None or dtype == "Int4":
        # A tensor of a type that numpy does not have: its memory is made, then filled
        made = mindspore.Tensor(np.zeros(whole, np.float32), kind)
        if raw.size:
            np.ctypeslib.as_array((ctypes.c_uint8 * raw.size).from_address(memory_of(made).pointer))[:] = raw
        return made
    return mindspore.Tensor(raw.view(decoding.words).reshape(whole))
