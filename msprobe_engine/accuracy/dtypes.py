"""What rounding to a type does: the numbers of every floating point type that a tensor may have, by its name.

numpy has no bfloat16 and no float8: their values come widened to float32, and what they were is told by a name such as
``"torch.bfloat16"`` or ``"BFloat16"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FloatType:
    """A binary floating point type.

    Attributes:
        name: as torch calls it, without ``torch.``.
        bits: of the significand, the leading one included.
        least: exponent of the smallest normal number.
        largest: the largest finite value.
        infinite: it has infinities; where it has none, too large values become NaN or the largest one.
    """

    name: str
    bits: int
    least: int
    largest: float
    infinite: bool = True

    @property
    def round_off(self) -> float:
        """Largest relative error of rounding to nearest."""
        return math.ldexp(1.0, -self.bits)

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal one."""
        return math.ldexp(1.0, self.least - self.bits + 1)

    @property
    def normal(self) -> float:
        """The smallest positive value of full precision."""
        return math.ldexp(1.0, self.least)


_TYPES = {
    kind.name: kind
    for kind in (
        FloatType("float64", 53, -1022, float(np.finfo(np.float64).max)),
        FloatType("float32", 24, -126, float(np.finfo(np.float32).max)),
        FloatType("float16", 11, -14, 65504.0),
        FloatType("bfloat16", 8, -126, 3.3895313892515355e38),
        FloatType("float8_e4m3fn", 4, -6, 448.0, False),
        FloatType("float8_e4m3fnuz", 4, -7, 240.0, False),
        FloatType("float8_e5m2", 3, -14, 57344.0),
        FloatType("float8_e5m2fnuz", 3, -15, 57344.0, False),
    )
}
_ALIASES = {
    "complex32": "float16", "chalf": "float16", "complex64": "float32", "complex128": "float64", "half": "float16", "float": "float32",
    "double": "float64", "complex": "float64",
}  # fmt: skip
FLOAT32 = _TYPES["float32"]


def plain(dtype: str) -> str:
    """``"torch.BFloat16"`` -> ``"bfloat16"``."""
    return dtype.rpartition(".")[2].lower()


def float_type(dtype: str) -> FloatType | None:
    """The type of that name; that of the parts for a complex one; None for integers, bool and all else.

    Args:
        dtype: ``"torch.float16"``, ``"float16"``, ``"Float16"``; Python's ``float`` and ``complex`` are read as numpy does, 64 bits.
    """
    name = plain(dtype)
    if dtype in ("float", "complex", "<class 'float'>", "<class 'complex'>"):
        return _TYPES["float64"]
    return _TYPES.get(_ALIASES.get(name, name))


def round_to(values: Array, kind: FloatType) -> Array:
    """Values rounded to nearest even of a type, as float64 (complex128 for complex values); too large ones become infinite.

    Subnormal numbers of the type are kept. Exact for values that are float64 themselves.
    """
    if np.iscomplexobj(values):
        wide = values.astype(np.complex128)
        rounded: Array = np.empty_like(wide)
        rounded.real, rounded.imag = round_to(wide.real, kind), round_to(wide.imag, kind)
        return rounded
    x = values.astype(np.float64)
    if kind.bits == 53:
        return x
    exponent = np.maximum(np.frexp(x)[1] - 1, kind.least)
    unit = np.ldexp(1.0, exponent - kind.bits + 1)
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.rint(x / unit) * unit
        rounded = np.where(np.isfinite(x), rounded, x)
        return np.where(np.abs(rounded) > kind.largest, np.copysign(np.inf, rounded), rounded)
