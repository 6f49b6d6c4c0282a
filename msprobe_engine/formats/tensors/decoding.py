"""How the bytes of saved tensors become numpy arrays.

Every value of bfloat16 and float8 is a float32 value too, so they are read as float32 without loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import item_size, plain_name
from msprobe_engine.core.statistics.host_kernel import CODES, fp8_table

Array = npt.NDArray[Any]


class Decoder(NamedTuple):
    """How the bytes of a tensor are read: as `words`, then by `values` (None: the words are the values)."""

    words: npt.DTypeLike
    values: Callable[[Array], Array] | None


def decoder(dtype: str) -> Decoder | None:
    """The decoder of an element type; None: numpy cannot hold it (packed 4-bit floats, quantized integers, unknown types)."""
    name = plain_name(dtype)
    if name == "int4":
        name = "int8"
    if name not in CODES:
        return None
    if name == "bfloat16":
        return Decoder(np.dtype(np.uint16), _bfloat16)
    if name.startswith("float8"):
        table = fp8_table(CODES[name])
        return Decoder(np.dtype(np.uint8), lambda words: table[words])
    return Decoder(np.dtype(name), None)


def _bfloat16(words: Array) -> Array:
    wide: Array = np.left_shift(words.astype(np.uint32), np.uint32(16))  # numpy 1 makes int64 of one number and a plain 16
    return wide.view(np.float32)


def word_type(dtype: str) -> np.dtype[Any]:
    """What the elements of a type are held as in memory: unsigned words of their size; 16-byte ones as pairs."""
    size = item_size(dtype) or 1
    return np.dtype(f"u{size}") if size <= 8 else np.dtype("c16")
