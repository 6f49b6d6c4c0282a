"""Element types of MindSpore, as its tensors print them and dump files have them, and what holds their bytes.

======================================== ==========================================================================
MindSpore                                in memory, and for the kernel
======================================== ==========================================================================
``Float64`` ... ``Bool``, ``Complex128`` as numpy has them
``BFloat16``                             two bytes, the upper half of a float32
``Float8E4M3FN``, ``Float8E5M2``         one byte, as torch has them
``Int4``                                 one byte for one element (packed only inside the kernels of Ascend)
``HiFloat8``                             one byte; no statistics here: the format is Ascend's own
======================================== ==========================================================================
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from msprobe_engine.hostkernel import CODES, ITEMSIZE, NAMES, decode

_PLAIN = ("Float64", "Float32", "Float16", "BFloat16", "Int64", "Int32", "Int16", "Int8", "UInt64", "UInt32", "UInt16", "UInt8", "Bool")
_KERNEL_NAMES = {name: name.lower() for name in (*_PLAIN, "Complex64", "Complex128")} | {
    "Float8E4M3FN": "float8_e4m3fn",
    "Float8E5M2": "float8_e5m2",
    "Int4": "int8",
}
KERNEL: dict[str, int] = {name: CODES[kernel] for name, kernel in _KERNEL_NAMES.items()}
"""Element type to the code of the statistics kernel; types that are missing have no statistics."""
WITHOUT_KERNEL: dict[str, int] = {"HiFloat8": 1}
"""Types that have bytes (so many per element) and no statistics."""
_WIDENED = frozenset(CODES[name] for name in NAMES if name == "bfloat16" or name.startswith("float8"))


def item_size(dtype: str) -> int | None:
    """Bytes of one element, None for an unknown type."""
    code = KERNEL.get(dtype)
    return WITHOUT_KERNEL.get(dtype) if code is None else ITEMSIZE[code]


def file_type(dtype: str) -> str:
    """Type of the elements of a ``.npy`` file, as numpy calls it. numpy has no bfloat16 and no float8: they are written as float32,
    which holds all their values (bfloat16 so in the existing tool too); the codes of ``HiFloat8`` as uint8."""
    code = KERNEL.get(dtype)
    if code is None:
        return "uint8"
    return "float32" if code in _WIDENED else NAMES[code]


def file_values(words: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32] | None:
    """The float32 values of bytes that `file_type` widens; None for a type that is written as it is."""
    code = KERNEL.get(dtype)
    if code not in _WIDENED:
        return None
    values: npt.NDArray[np.float32] = decode(words, code)
    return values
