"""How far two tensors are apart: sums over blocks, added up in any order, and what is told of them in the end.

A C kernel (``_tensordiff.c``) takes the sums in one pass and lets other threads run meanwhile; where it was not built, numpy does the same.
Both add in float64; norms of equal stretches of 8- and 16-bit types are good to 1e-6.

Differences of integers are exact, whatever their size. The numbers, with a and b as float64 and over the elements that are finite on both
sides:

* ``l2`` = ||a - b||, ``rel_norm`` = ||a - b|| / ||a||, ``cos`` = a.b / (||a|| ||b||): 1 when both are all zeros, None when one is;
* ``max_abs`` = the largest \\|a - b|, and where; when it is 0, where the first element changed (to NaN or Inf, or the sign of a zero);
* ``changed``: elements whose bits differ (-0.0 and 0.0 do), of two element types those whose values differ;
* ``beyond``: elements with \\|a - b| > atol + rtol \\|a|, or NaN or Inf where the other side has something else;
* ``unrounded``: of two element types, the elements that rounding to the narrower one does not make equal. 0 with ``changed`` > 0: one
  side is the other, rounded.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import item_size, plain_name
from msprobe_engine.formats.tensors.decoding import decoder

Array = npt.NDArray[Any]

_kernel: Any
try:
    _kernel = importlib.import_module("msprobe_engine.native._tensordiff")
except ImportError:
    _kernel = None

available: bool = _kernel is not None
"""True when the C kernel is there."""

_NAMES = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_CODES = {name: code for code, name in enumerate(_NAMES)}
_WIDE = frozenset({"int64", "uint64"})
"""Types of which not every value is a float64."""
_INTEGERS = ("changed", "beyond", "nan_a", "inf_a", "nan_b", "inf_b", "at", "unrounded")
_FLOATS = ("dd", "ab", "aa", "bb", "max", "atol", "rtol", "reserved")
_SUMS = np.dtype([(name, np.int64) for name in _INTEGERS] + [(name, np.float64) for name in _FLOATS])
"""The structure of the kernel."""
_PIECE = 1 << 16
"""Elements that numpy takes at a time."""


@dataclass(slots=True)
class Sums:
    """What blocks of a pair of tensors have given so far. `at` is the position of the largest difference in the block it was found in."""

    changed: int = 0
    beyond: int = 0
    nan_a: int = 0
    inf_a: int = 0
    nan_b: int = 0
    inf_b: int = 0
    at: int = -1
    unrounded: int = 0
    dd: float = 0.0
    ab: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    max: float = 0.0

    def add(self, other: Sums) -> bool:
        """Add those of another block; True when its largest difference is the largest now."""
        for name in ("changed", "beyond", "nan_a", "inf_a", "nan_b", "inf_b", "unrounded"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dd += other.dd
        self.ab += other.ab
        self.aa += other.aa
        self.bb += other.bb
        if other.at >= 0 and (self.at < 0 or other.max > self.max):
            self.max, self.at = max(self.max, other.max), other.at
            return True
        return False

    @property
    def l2(self) -> float:
        return math.sqrt(self.dd)

    @property
    def rel_norm(self) -> float | None:
        """None when a is all zeros and b is not."""
        if self.dd == 0.0:
            return 0.0
        return math.sqrt(self.dd) / math.sqrt(self.aa) if self.aa else None

    @property
    def cos(self) -> float | None:
        """None when one side is all zeros and the other is not, and when squares of the elements are beyond float64."""
        if self.dd == 0.0 or self.aa == self.bb == 0.0:
            return 1.0
        if not self.aa or not self.bb or not math.isfinite(self.aa * self.bb) or not math.isfinite(self.ab):
            return None
        return max(-1.0, min(1.0, self.ab / (math.sqrt(self.aa) * math.sqrt(self.bb))))


def values_known(dtype: str) -> bool:
    """Can the elements of this type be taken apart? Of others (packed 4-bit floats, quantized integers) only the bits are compared."""
    return decoder(dtype) is not None


def differences(a: Array, dtype_a: str, b: Array, dtype_b: str, atol: float = 0.0, rtol: float = 0.0) -> Sums:
    """Compare two blocks of memory.

    Args:
        a, b: as many elements each, contiguous, as words of their element type's size (`word_type`).
        dtype_a, dtype_b: plain names.
        atol, rtol: of `Sums.beyond`.
    """
    name_a, name_b = plain_name(dtype_a), plain_name(dtype_b)
    code_a, code_b = _CODES.get(name_a), _CODES.get(name_b)
    if _kernel is not None and code_a is not None and code_b is not None:
        out = np.zeros((), _SUMS)
        out["at"], out["atol"], out["rtol"] = -1, atol, rtol
        _kernel.diff(a.ctypes.data, code_a, b.ctypes.data, code_b, a.size, out.ctypes.data)
        sums = Sums(*out.item()[:13])
        if _WIDE.isdisjoint((name_a, name_b)) or (name_a == name_b and not sums.changed):
            return sums  # else the kernel has rounded integers to float64
    return in_numpy(a.reshape(-1), name_a, b.reshape(-1), name_b, atol, rtol)


def in_numpy(a: Array, dtype_a: str, b: Array, dtype_b: str, atol: float = 0.0, rtol: float = 0.0) -> Sums:
    """`differences` without the kernel: for machines without a compiler, for complex numbers, and for types that have no values here."""
    total = Sums()
    for first in range(0, a.size, _PIECE):
        words_a, words_b = a[first : first + _PIECE], b[first : first + _PIECE]
        piece = _piece(words_a, dtype_a, words_b, dtype_b, atol, rtol)
        if piece.at >= 0:
            piece.at += first
        total.add(piece)
    return total


def _piece(words_a: Array, dtype_a: str, words_b: Array, dtype_b: str, atol: float, rtol: float) -> Sums:
    same_type = dtype_a == dtype_b
    sums = Sums()
    mask = None
    if same_type:
        size = words_a.dtype.itemsize
        mask = words_a != words_b if size <= 8 else (words_a.view("u8") != words_b.view("u8")).reshape(-1, 2).any(axis=1)
        sums.changed = int(np.count_nonzero(mask))
    if not values_known(dtype_a) or not values_known(dtype_b):
        sums.beyond, sums.at = sums.changed, int(mask.argmax()) if mask is not None and sums.changed else -1
        return sums
    with np.errstate(all="ignore"):
        x, y = values(words_a, dtype_a), values(words_b, dtype_b)
        rest_x, rest_y = _rest(words_a, dtype_a), _rest(words_b, dtype_b)
        nan_x, nan_y = np.isnan(x), np.isnan(y)
        agree = ((x == y) & (rest_x == rest_y)) | (nan_x & nan_y)
        if not same_type:
            sums.changed = int(np.count_nonzero(~agree))
            if sums.changed:
                sums.unrounded = int(np.count_nonzero(~(agree | _rounds(x, dtype_a, y, dtype_b))))
        sums.nan_a, sums.nan_b = int(nan_x.sum()), int(nan_y.sum())
        sums.inf_a, sums.inf_b = int(np.isinf(x).sum()), int(np.isinf(y).sum())
        usable = np.isfinite(x) & np.isfinite(y)
        gap = np.where(usable, np.abs((x - y) + (rest_x - rest_y)), 0.0)
        sums.beyond = int(np.count_nonzero(np.where(usable, gap > atol + rtol * np.abs(x), ~agree)))
        x, y = np.where(usable, x, 0.0), np.where(usable, y, 0.0)
        sums.dd, sums.ab = float(np.dot(gap, gap)), float(np.vdot(x, y).real)
        sums.aa, sums.bb = float(np.vdot(x, x).real), float(np.vdot(y, y).real)
        if gap.size and gap.max() > 0.0:
            sums.at = int(gap.argmax())
            sums.max = float(gap[sums.at])
        elif sums.changed:
            sums.at = int((mask if mask is not None else ~agree).argmax())
    return sums


def values(words: Array, dtype: str) -> Array:
    """What words of an element type stand for, float64 or complex128; of a type of which `values_known` says so."""
    found = decoder(dtype)
    assert found is not None
    raw = words.view(np.dtype(found.words)) if words.dtype != found.words else words
    made = raw if found.values is None else found.values(raw)
    return made.astype(np.complex128 if made.dtype.kind == "c" else np.float64)


def _rest(words: Array, dtype: str) -> Array | float:
    """What `values` leaves out of integers of 64 bits: their values less these as float64, exactly."""
    if dtype not in _WIDE:
        return 0.0
    raw = words.view(np.dtype(dtype))
    top, low = (raw >> 32).astype(np.float64) * 2.0**32, (raw & 0xFFFFFFFF).astype(np.float64)
    rest: Array = low - (raw.astype(np.float64) - top)
    return rest


def _rounds(x: Array, dtype_a: str, y: Array, dtype_b: str) -> Array:
    """Where rounding the wider of the two to the type of the other makes them equal."""
    if np.iscomplexobj(x) or np.iscomplexobj(y):
        return np.zeros(x.shape, bool)
    wide, narrow, name = (y, x, dtype_a) if (item_size(dtype_a) or 0) < (item_size(dtype_b) or 0) else (x, y, dtype_b)
    if name in ("float16", "float32"):
        rounded = wide.astype(np.float32).astype(name).astype(np.float64)
    elif name == "bfloat16":
        bits = wide.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    else:
        return np.zeros(x.shape, bool)
    same: Array = rounded == narrow
    return same
