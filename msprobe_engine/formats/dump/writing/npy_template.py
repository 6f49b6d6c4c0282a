"""``.npy`` files of tensors from their bytes: a header per dtype and shape, then the elements.

Format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html (version 1.0). numpy has no type for bfloat16 and 8-bit
floats; they are written as float32, which holds all their values (bfloat16 so in the existing tool, too). Elements that no type of
numpy can hold are written as the unsigned integers of their bits.
"""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Sequence

import numpy as np

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.tensors.decoding import Array, decoder


class NpyTemplate:
    """Makes files of tensors of one dtype and shape.

    Args:
        dtype: as dump files have it, ``BFloat16``.

    Attributes:
        head: file content before the elements.
        overhead: bytes of the file besides those of the tensor.
        checksum: False: `tail` needs none.

    Raises:
        DumpFormatError: the dtype is not known.
    """

    checksum = False

    def __init__(self, dtype: str, shape: Sequence[int]) -> None:
        size = item_size(dtype)
        if size is None:
            raise DumpFormatError(f"tensors of type {dtype} cannot be written as .npy: the size of their elements is not known")
        self._decoder = decoder(dtype)
        words = np.dtype(f"u{size}") if self._decoder is None else np.dtype(self._decoder.words)
        self._words = words
        self._shape = tuple(shape)
        kind = words if self._decoder is None or self._decoder.values is None else np.dtype(np.float32)
        made = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            made, {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": self._shape}
        )
        self.head = made.getvalue()
        self.overhead = len(self.head) + math.prod(self._shape) * (kind.itemsize - words.itemsize)

    def tail(self, _crc: int) -> bytes:
        """Nothing stands behind the elements."""
        return b""

    def widen_elements(self, address: int, nbytes: int) -> Array | None:
        """The elements as the file has them, flat; None: they are the bytes themselves.

        Args:
            address, nbytes: of the tensor's bytes, in C order.
        """
        if self._decoder is None or self._decoder.values is None:
            return None
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.empty(0, np.uint8)
        return self._decoder.values(raw.view(self._words))

    def array(self, raw: bytes | bytearray | memoryview | Array) -> Array:
        """What a file of these bytes is read as.

        Raises:
            DumpFormatError: they are not those of the shape.
        """
        flat = np.frombuffer(raw, self._words)
        try:
            shaped = flat.reshape(self._shape)
        except ValueError:
            raise DumpFormatError(f"{flat.nbytes} bytes are no elements of shape {list(self._shape)}") from None
        return shaped if self._decoder is None or self._decoder.values is None else self._decoder.values(shaped)
