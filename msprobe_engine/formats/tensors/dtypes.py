"""Element types of saved tensors: how many bytes an element takes, and how its bytes become a numpy array.

Names are those of dump files: ``torch.float32`` (PyTorch), ``Float32`` (MindSpore), ``float32`` (numpy). numpy has no type for
bfloat16 and float8; every value of theirs is a float32 value too, so they are read as float32 without loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class _Small(NamedTuple):
    """A float of at most eight bits: sign, exponent and fraction bits, exponent bias, what the last codes mean."""

    exponent: int
    fraction: int
    bias: int
    specials: str
    """``ieee``: Inf and NaN in the last binade; ``fn``: all ones is NaN, no Inf; ``fnuz``: minus zero is NaN, no Inf."""


_SAME = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
_PLAIN = {name: name for name in (*_SAME, "complex64", "complex128")} | {"bool_": "bool", "int4": "int8"}  # MindSpore's int4: a byte each
_SMALL = {
    "float8_e4m3fn": _Small(4, 3, 7, "fn"),
    "float8_e5m2": _Small(5, 2, 15, "ieee"),
    "float8_e4m3fnuz": _Small(4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": _Small(5, 2, 16, "fnuz"),
}
_ALIASES = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
_BYTES = dict.fromkeys((*_SMALL, "float8_e8m0fnu", "hifloat8", "float4_e2m1fn_x2", "qint8", "quint8"), 1) | {"bfloat16": 2, "qint32": 4}


def plain_name(dtype: str) -> str:
    """``float32`` of ``torch.float32``, ``Float32``, ``mindspore.float32`` and ``float32``; ``float8_e5m2`` of ``Float8E5M2``."""
    name = dtype.rpartition(".")[2].lower()
    return _ALIASES.get(name, name)


def item_size(dtype: str) -> int | None:
    """Bytes of one element, None for an unknown type."""
    name = plain_name(dtype)
    if name in _PLAIN:
        return np.dtype(_PLAIN[name]).itemsize
    return _BYTES.get(name)


class Decoder(NamedTuple):
    """How the bytes of a tensor are read: as `words`, then by `values` (None: the words are the values)."""

    words: npt.DTypeLike
    values: Callable[[Array], Array] | None


def decoder(dtype: str) -> Decoder | None:
    """The decoder of an element type; None: numpy cannot hold it (packed 4-bit floats, quantized integers, unknown types)."""
    name = plain_name(dtype)
    if name in _PLAIN:
        return Decoder(np.dtype(_PLAIN[name]), None)
    if name == "bfloat16":
        return Decoder(np.dtype(np.uint16), _bfloat16)
    if name == "float8_e8m0fnu" or name in _SMALL:
        table = small_float_values(name)
        return Decoder(np.dtype(np.uint8), lambda words: table[words])
    return None


def _bfloat16(words: Array) -> Array:
    wide: Array = np.left_shift(words.astype(np.uint32), np.uint32(16))  # numpy 1 makes int64 of one number and a plain 16
    return wide.view(np.float32)


@lru_cache(maxsize=8)
def small_float_values(name: str) -> npt.NDArray[np.float32]:
    """The value of each of the 256 codes of an 8-bit float, [256] float32 (OCP 8-bit floating point specification; the ``fnuz``
    types as torch has them)."""
    if name == "float8_e8m0fnu":  # powers of two only, the last code is NaN
        return np.array([2.0 ** (code - 127) for code in range(255)] + [math.nan], np.float32)
    kind = _SMALL[name]
    values = []
    for code in range(256):
        exponent = code >> kind.fraction & ((1 << kind.exponent) - 1)
        fraction = code & ((1 << kind.fraction) - 1)
        if exponent:
            value = math.ldexp((1 << kind.fraction) + fraction, exponent - kind.bias - kind.fraction)
        else:
            value = math.ldexp(fraction, 1 - kind.bias - kind.fraction)
        if kind.specials == "ieee" and exponent == (1 << kind.exponent) - 1:
            value = math.nan if fraction else math.inf
        elif (kind.specials == "fn" and code & 0x7F == 0x7F) or (kind.specials == "fnuz" and code == 0x80):
            value = math.nan
        values.append(-value if code & 0x80 else value)
    return np.array(values, np.float32)


def word_type(dtype: str) -> np.dtype[Any]:
    """What the elements of a type are held as in memory: unsigned words of their size; 16-byte ones as pairs."""
    size = item_size(dtype) or 1
    return np.dtype(f"u{size}") if size <= 8 else np.dtype("c16")


@lru_cache(maxsize=256)
def is_not_float(dtype: str) -> bool:
    """Integers, bool and text: they hold no NaN."""
    return dtype.rpartition(".")[2].lower().startswith(("int", "uint", "bool", "qint", "quint", "str"))
