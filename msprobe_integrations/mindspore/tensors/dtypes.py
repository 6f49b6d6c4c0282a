"""Element types of MindSpore, as its tensors print them and dump files have them, and the kernel that reads them.

======================================== ==========================================================================
MindSpore                                in memory
======================================== ==========================================================================
``Float64`` ... ``Bool``, ``Complex128`` as numpy has them
``BFloat16``                             two bytes, the upper half of a float32
``Float8E4M3FN``, ``Float8E5M2``         one byte, as torch has them
``Int4``                                 one byte for one element (packed only inside the kernels of Ascend)
``HiFloat8``                             one byte; no statistics here: the format is Ascend's own
======================================== ==========================================================================
"""

from __future__ import annotations

from msprobe_engine.core.dtypes import plain_name
from msprobe_engine.core.statistics.host_kernel import CODES

_FLOATS = ("Float64", "Float32", "Float16", "BFloat16", "Float8E4M3FN", "Float8E5M2", "Complex64", "Complex128")
_INTEGERS = ("Int64", "Int32", "Int16", "Int8", "UInt64", "UInt32", "UInt16", "UInt8", "Bool")
KERNEL: dict[str, int] = {name: CODES[plain_name(name)] for name in (*_FLOATS, *_INTEGERS)} | {"Int4": CODES["int8"]}
"""Element type to the code of the statistics kernel; types that are missing have no statistics."""
WITHOUT_KERNEL = ("HiFloat8",)
"""Types that have bytes and no statistics."""
