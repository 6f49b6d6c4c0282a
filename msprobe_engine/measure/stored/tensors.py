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


def differences(target: Array, target_dtype: str, golden: Array, golden_dtype: str, atol: float = 0.0, rtol: float = 0.0) -> Sums:
    """Compare two blocks of memory.

    Args:
        target, golden: as many elements each, contiguous, as words of their element type's size (`word_type`).
        target_dtype, golden_dtype: plain names.
        atol, rtol: of `Sums.beyond`.
    """
    target_name, golden_name = plain_name(target_dtype), plain_name(golden_dtype)
    target_code, golden_code = _CODES.get(target_name), _CODES.get(golden_name)
    if _kernel is not None and target_code is not None and golden_code is not None:
        out = np.zeros((), _SUMS)
        out["at"], out["atol"], out["rtol"] = -1, atol, rtol
        _kernel.diff(target.ctypes.data, target_code, golden.ctypes.data, golden_code, target.size, out.ctypes.data)
        sums = Sums(*out.item()[:13])
        if _WIDE.isdisjoint((target_name, golden_name)) or (target_name == golden_name and not sums.changed):
            return sums  # else the kernel has rounded integers to float64
    return in_numpy(target.reshape(-1), target_name, golden.reshape(-1), golden_name, atol, rtol)


def in_numpy(target: Array, target_dtype: str, golden: Array, golden_dtype: str, atol: float = 0.0, rtol: float = 0.0) -> Sums:
    """`differences` without the kernel: for machines without a compiler, for complex numbers, and for types that have no values here."""
    total = Sums()
    for start in range(0, target.size, _PIECE):
        target_words, golden_words = target[start : start + _PIECE], golden[start : start + _PIECE]
        piece = _piece(target_words, target_dtype, golden_words, golden_dtype, atol, rtol)
        if piece.at >= 0:
            piece.at += start
        total.add(piece)
    return total


def _piece(target_words: Array, target_dtype: str, golden_words: Array, golden_dtype: str, atol: float, rtol: float) -> Sums:
    same_type = target_dtype == golden_dtype
    sums = Sums()
    mask = None
    if same_type:
        size = target_words.dtype.itemsize
        mask = (
            target_words != golden_words if size <= 8 else (target_words.view("u8") != golden_words.view("u8")).reshape(-1, 2).any(axis=1)
        )
        sums.changed = int(np.count_nonzero(mask))
    if not values_known(target_dtype) or not values_known(golden_dtype):
        sums.beyond, sums.at = sums.changed, int(mask.argmax()) if mask is not None and sums.changed else -1
        return sums
    with np.errstate(all="ignore"):
        target, golden = values(target_words, target_dtype), values(golden_words, golden_dtype)
        target_rest, golden_rest = _rest(target_words, target_dtype), _rest(golden_words, golden_dtype)
        target_nan, golden_nan = np.isnan(target), np.isnan(golden)
        agree = ((target == golden) & (target_rest == golden_rest)) | (target_nan & golden_nan)
        if not same_type:
            sums.changed = int(np.count_nonzero(~agree))
            if sums.changed:
                sums.unrounded = int(np.count_nonzero(~(agree | _rounds(target, target_dtype, golden, golden_dtype))))
        sums.nan_a, sums.nan_b = int(target_nan.sum()), int(golden_nan.sum())
        sums.inf_a, sums.inf_b = int(np.isinf(target).sum()), int(np.isinf(golden).sum())
        usable = np.isfinite(target) & np.isfinite(golden)
        gap = np.where(usable, np.abs((target - golden) + (target_rest - golden_rest)), 0.0)
        sums.beyond = int(np.count_nonzero(np.where(usable, gap > atol + rtol * np.abs(target), ~agree)))
        target, golden = np.where(usable, target, 0.0), np.where(usable, golden, 0.0)
        sums.dd, sums.ab = float(np.dot(gap, gap)), float(np.vdot(target, golden).real)
        sums.aa, sums.bb = float(np.vdot(target, target).real), float(np.vdot(golden, golden).real)
        if gap.size and gap.max() > 0.0:
            sums.at = int(gap.argmax())
            sums.max = float(gap[sums.at])
        elif sums.changed:
            sums.at = int((mask if mask is not None else ~agree).argmax())
    return sums


def values(words: Array, dtype: str) -> Array:
    """What words of an element type stand for, float64 or complex128; of a type of which `values_known` says so."""
    element_decoder = decoder(dtype)
    assert element_decoder is not None
    raw = words.view(np.dtype(element_decoder.words)) if words.dtype != element_decoder.words else words
    made = raw if element_decoder.values is None else element_decoder.values(raw)
    return made.astype(np.complex128 if made.dtype.kind == "c" else np.float64)


def _rest(words: Array, dtype: str) -> Array | float:
    """What `values` leaves out of integers of 64 bits: their values less these as float64, exactly."""
    if dtype not in _WIDE:
        return 0.0
    raw = words.view(np.dtype(dtype))
    top, low = (raw >> 32).astype(np.float64) * 2.0**32, (raw & 0xFFFFFFFF).astype(np.float64)
    rest: Array = low - (raw.astype(np.float64) - top)
    return rest


def _rounds(target: Array, target_dtype: str, golden: Array, golden_dtype: str) -> Array:
    """Where rounding the wider of the two to the type of the other makes them equal."""
    if np.iscomplexobj(target) or np.iscomplexobj(golden):
        return np.zeros(target.shape, bool)
    wide, narrow, name = (
        (golden, target, target_dtype)
        if (item_size(target_dtype) or 0) < (item_size(golden_dtype) or 0)
        else (target, golden, golden_dtype)
    )
    if name in ("float16", "float32"):
        rounded = wide.astype(np.float32).astype(name).astype(np.float64)
    elif name == "bfloat16":
        bits = wide.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    else:
        return np.zeros(target.shape, bool)
    same: Array = rounded == narrow
    return same
