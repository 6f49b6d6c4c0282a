"""Element types of tensors: their names, the bytes of an element, and what rounding to them does.

A type has one plain name, torch's without ``torch.``. Dump files have ``torch.float32`` (PyTorch) or ``Float32`` (MindSpore), numpy
``float32``; numpy has no bfloat16 and no float8, whose values come widened to float32.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


class ElementType(NamedTuple):
    """One type.

    Attributes:
        size: bytes of an element.
        mindspore: as MindSpore prints it; empty: it has none.
        safetensors: as safetensors files have it; empty: they cannot.
        common: every version of safetensors from 0.4.5 on has it.
    """

    name: str
    size: int
    mindspore: str = ""
    safetensors: str = ""
    common: bool = True


TYPES = {
    kind.name: kind
    for kind in (
        ElementType("bool", 1, "Bool", "BOOL"),
        ElementType("uint8", 1, "UInt8", "U8"),
        ElementType("int8", 1, "Int8", "I8"),
        ElementType("int16", 2, "Int16", "I16"),
        ElementType("uint16", 2, "UInt16", "U16"),
        ElementType("int32", 4, "Int32", "I32"),
        ElementType("uint32", 4, "UInt32", "U32"),
        ElementType("int64", 8, "Int64", "I64"),
        ElementType("uint64", 8, "UInt64", "U64"),
        ElementType("float16", 2, "Float16", "F16"),
        ElementType("bfloat16", 2, "BFloat16", "BF16"),
        ElementType("float32", 4, "Float32", "F32"),
        ElementType("float64", 8, "Float64", "F64"),
        ElementType("float8_e4m3fn", 1, "Float8E4M3FN", "F8_E4M3"),
        ElementType("float8_e5m2", 1, "Float8E5M2", "F8_E5M2"),
        ElementType("float8_e8m0fnu", 1, "", "F8_E8M0", common=False),
        ElementType("float8_e4m3fnuz", 1, "", "F8_E4M3FNUZ", common=False),
        ElementType("float8_e5m2fnuz", 1, "", "F8_E5M2FNUZ", common=False),
        ElementType("complex64", 8, "Complex64", "C64", common=False),
        ElementType("complex128", 16, "Complex128"),
        ElementType("int4", 1, "Int4"),  # a byte each: packed only inside of Ascend's kernels
        ElementType("hifloat8", 1, "HiFloat8"),
        ElementType("float4_e2m1fn_x2", 1),
        ElementType("qint8", 1),
        ElementType("quint8", 1),
        ElementType("qint32", 4),
    )
}
_OTHER_NAMES = {"bool_": "bool", **{kind.mindspore.lower(): kind.name for kind in TYPES.values() if kind.mindspore}}


@dataclass(frozen=True, slots=True)
class FloatType:
    """A binary floating point type.

    Attributes:
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
    def eps(self) -> float:
        """Distance of 1.0 to the next number."""
        return math.ldexp(1.0, 1 - self.bits)

    @property
    def exponent_bits(self) -> int:
        return 8 * TYPES[self.name].size - self.bits

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal one."""
        return math.ldexp(1.0, self.least - self.bits + 1)

    @property
    def normal(self) -> float:
        """The smallest positive value of full precision."""
        return math.ldexp(1.0, self.least)


FLOATS = {
    kind.name: kind
    for kind in (
        FloatType("float64", 53, -1022, sys.float_info.max),
        FloatType("float32", 24, -126, 3.4028234663852886e38),
        FloatType("float16", 11, -14, 65504.0),
        FloatType("bfloat16", 8, -126, 3.3895313892515355e38),
        FloatType("float8_e4m3fn", 4, -6, 448.0, False),
        FloatType("float8_e4m3fnuz", 4, -7, 240.0, False),
        FloatType("float8_e5m2", 3, -14, 57344.0),
        FloatType("float8_e5m2fnuz", 3, -15, 57344.0, False),
    )
}
"""By plain name, and by the names that torch has for them and for complex types of them besides."""
FLOAT32 = FLOATS["float32"]
FLOATS |= {"half": FLOATS["float16"], "float": FLOAT32, "double": FLOATS["float64"], "complex": FLOATS["float64"]}
FLOATS |= {"complex32": FLOATS["float16"], "chalf": FLOATS["float16"], "complex64": FLOAT32, "complex128": FLOATS["float64"]}

SMALL_FLOATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Types that a value may underflow in."""


def plain_name(dtype: str) -> str:
    """``float32`` of ``torch.float32``, ``Float32``, ``mindspore.float32`` and ``float32``; ``float8_e5m2`` of ``Float8E5M2``."""
    name = dtype.rpartition(".")[2].lower()
    return _OTHER_NAMES.get(name, name)


def item_size(dtype: str) -> int | None:
    """Bytes of one element, None for an unknown type."""
    kind = TYPES.get(plain_name(dtype))
    return None if kind is None else kind.size


def float_type(dtype: str) -> FloatType | None:
    """The type of that name; that of the parts for a complex one; None for integers, bool and all else.

    Args:
        dtype: ``"torch.float16"``, ``"float16"``, ``"Float16"``; Python's ``float`` and ``complex`` are read as numpy does, 64 bits.
    """
    if dtype in ("float", "complex", "<class 'float'>", "<class 'complex'>"):
        return FLOATS["float64"]
    return FLOATS.get(plain_name(dtype))


@lru_cache(maxsize=256)
def is_bool(dtype: str | None) -> bool:
    """Truth values, as a dump of either framework calls them."""
    return plain_name(str(dtype)) == "bool"


def is_not_float(dtype: str) -> bool:
    """Integers, bool and text: they hold no NaN."""
    return plain_name(dtype).startswith(("int", "uint", "bool", "qint", "quint", "str"))


def other_form(one: str | None, other: str | None) -> bool:
    """Numbers on one side, integers or truth values on the other, like the two forms of a mask: their sizes say nothing of each other."""
    return (float_type(str(one)) is None) != (float_type(str(other)) is None)


def small_float_values(name: str) -> list[float]:
    """The value of each of the 256 codes of an 8-bit float. Formats: OCP OFP8 and MX specifications, and the ``fnuz`` variants
    (https://onnx.ai/onnx/technical/float8.html)."""
    if name == "float8_e8m0fnu":  # powers of two only, the last code is NaN
        return [math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan]
    kind = FLOATS[name]
    fraction_bits, last = kind.bits - 1, (1 << kind.exponent_bits) - 1
    values = []
    for code in range(256):
        exponent, fraction = code >> fraction_bits & last, code & ((1 << fraction_bits) - 1)
        value = math.ldexp(fraction + (bool(exponent) << fraction_bits), max(exponent, 1) - 1 + kind.least - fraction_bits)
        if kind.infinite and exponent == last:
            value = math.nan if fraction else math.inf
        elif code == 0x80 if name.endswith("fnuz") else not kind.infinite and code & 0x7F == 0x7F:
            value = math.nan
        values.append(-value if code & 0x80 else value)
    return values
