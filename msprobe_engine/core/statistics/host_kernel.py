"""Statistics rows of host memory: the C kernel when it was built, otherwise numpy with the same results (slow, but exact).

The kernel is an optional part of the installation; `available` says which one runs. Both write rows as
`msprobe_engine.core.statistics.rows` defines them and digests as `msprobe_engine.core.statistics.digest` does.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import threading
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from msprobe_engine.core.dtypes import TYPES, small_float_values
from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import digest as _digest
from msprobe_engine.core.statistics import rows as _rows

_kernel: Any
try:
    _kernel = importlib.import_module("msprobe_engine.native._rowstats")
except ImportError:
    _kernel = None

available: bool = _kernel is not None
"""True when the C kernel is there."""

NAMES = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
CODES: dict[str, int] = {name: code for code, name in enumerate(NAMES)}
"""Element type, as frameworks call it, to the kernel's dtype code."""

ITEMSIZE = tuple(TYPES[name].size for name in NAMES)
_INTEGERS = range(CODES["int8"], CODES["bool"] + 1)
_FP8 = CODES["float8_e4m3fn"]
_PLAIN = {c: np.dtype(n) for n, c in CODES.items() if not n.startswith(("bfloat", "float8"))}
_ROW_BYTES = 8 * _rows.WORDS

WANT_DIGEST, WANT_CRC, WANT_XOR, WANT_MOMENTS, WANT_BELOW, WANT_EPS = 1, 4, 8, 16, 32, 64
"""What a row gets besides the statistics; add them up. BELOW needs a limit: `want_below`. Moments and checksums exclude each other."""

_FLAG_OF = (
    (WANT_DIGEST, _rows.HAS_DIGEST), (WANT_CRC, _rows.HAS_CRC), (WANT_XOR, _rows.HAS_XOR),
    (WANT_MOMENTS, _rows.HAS_MOMENTS), (WANT_BELOW, _rows.HAS_BELOW), (WANT_EPS, _rows.HAS_EPS),
)  # fmt: skip
_LIMIT_SHIFT = 8
_LIMITS_MOST = 4096  # MAX_LIMITS of the kernel
WANT_LIMIT = WANT_BELOW | WANT_EPS | (_LIMITS_MOST - 1) << _LIMIT_SHIFT
"""All that `want_below` gives."""
_limits: dict[float, int] = {}
_lock = threading.Lock()


def want_below(limit: float, *, as_zeros: bool = False) -> int:
    """The part of `want` that asks for BELOW with `limit`. Limits are kept for the life of the process.

    Args:
        limit: above 0; elements with an absolute value strictly below it are counted. Integers are compared as float64.
        as_zeros: the count stands for zeros (flag HAS_EPS of the row).

    Raises:
        UsageError: the limit is not above 0, or there have been 4096 others.
    """
    if not limit > 0.0:
        raise UsageError(f"the limit is {limit!r}; allowed: numbers above 0")
    with _lock:
        slot = _limits.get(limit)
        if slot is None:
            slot = len(_limits)
            if slot == _LIMITS_MOST:
                raise UsageError(f"more than {_LIMITS_MOST} different limits in one process; use fewer")
            if _kernel is not None:
                _kernel.set_limit(slot, limit)
            _limits[limit] = slot
    return WANT_BELOW | (WANT_EPS if as_zeros else 0) | slot << _LIMIT_SHIFT


def limit_of(want: int) -> float:
    """The limit of a `want` made by `want_below`; 0 without one."""
    return list(_limits)[want >> _LIMIT_SHIFT] if want & WANT_BELOW else 0.0


def reduce(ptr: int, numel: int, code: int, out_ptr: int, want: int, index0: int) -> None:
    """Write the row of `numel` contiguous elements at address `ptr` to the 128 bytes at `out_ptr`.

    Args:
        code: element type, a value of `CODES`.
        want: sum of `WANT_DIGEST`, `WANT_CRC`, `WANT_XOR`, `WANT_MOMENTS` and a `want_below`; 0 for statistics alone.
        index0: global index of the first element, for the digest of a shard.
    """
    if _kernel is not None:
        _kernel.reduce(ptr, numel, code, out_ptr, want, index0)
        return
    _address(out_ptr)[:] = row_of(bytes_at(ptr, (numel,), (1,), code), code, want, index0)


def kernel() -> Any:
    """The module of the C kernel, None where it was not built."""
    return _kernel


def functions() -> tuple[Callable[..., None], Callable[..., None]]:
    """`reduce` and `reduce_strided` without the Python frame around the kernel, for hot paths that call by position."""
    return (_kernel.reduce, _kernel.reduce_strided) if _kernel is not None else (reduce, reduce_strided)


def sample_function() -> Callable[[int, int], int]:
    """``sample(ptr, bytes)``: a number made of at most 32 words of eight bytes spread evenly over host memory (of all of it up to 256
    bytes). Another number means that the memory was written to; a write that leaves these words as they are is not seen."""
    return _kernel.sample if _kernel is not None else _sample


def _sample(ptr: int, size: int) -> int:
    places = range(0, max(size, 1), 8) if size <= 256 else [(size - 8) * i // 31 for i in range(32)]
    return hash(b"".join(ctypes.string_at(ptr + at, min(8, size - at)) for at in places))


def reduce_strided(ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], code: int, out_ptr: int, want: int, index0: int) -> None:
    """Like `reduce` for memory with any strides, counted in elements; positions are those of the logical C order."""
    if _kernel is not None:
        _kernel.reduce_strided(ptr, shape, strides, code, out_ptr, want, index0)
        return
    _address(out_ptr)[:] = row_of(bytes_at(ptr, shape, strides, code), code, want, index0)


def reduce_into(rows: _rows.Rows, row: int, data: npt.NDArray[Any], dtype: str = "", *, digest: bool = False, index0: int = 0) -> None:
    """Write the statistics of an array to ``rows[row]``.

    Args:
        rows: [n, 16] float64, C order.
        data: any strides. Its bits are read as `dtype`; without `dtype` as its own numpy type.
        dtype: a name of `NAMES`, for types numpy does not have (``bfloat16`` in a uint16 array, ``float8_e5m2`` in a uint8 one).

    Raises:
        UsageError: the type is unknown or its size is not that of the elements of `data`.
    """
    name = dtype or data.dtype.name
    code = CODES.get(name)
    if code is None or ITEMSIZE[code] != data.dtype.itemsize:
        raise UsageError(f"reduce_into: no kernel for '{name}' in elements of {data.dtype.itemsize} bytes; known types: {', '.join(NAMES)}")
    packed = np.ascontiguousarray(data)
    reduce(packed.ctypes.data, packed.size, code, rows.ctypes.data + row * _ROW_BYTES, WANT_DIGEST if digest else 0, index0)


def crc32(address: int, nbytes: int, value: int = 0) -> int:
    """``zlib.crc32`` of the `nbytes` bytes at `address`, going on from `value`. The kernel takes the processor's own instructions
    where there are any; either way other threads run meanwhile when there are many bytes."""
    if _kernel is not None:
        crc: int = _kernel.crc32(address, nbytes, value)
        return crc
    return zlib.crc32((ctypes.c_uint8 * nbytes).from_address(address), value) if nbytes else value


def xor64(raw: npt.NDArray[np.uint8]) -> int:
    """XOR of the 64-bit little-endian words of `raw` (flat), the last one filled up with zeros."""
    words = np.concatenate([raw, np.zeros(-raw.size % 8, np.uint8)]).view("<u8")
    return int(np.bitwise_xor.reduce(words)) if words.size else 0


def row_of(raw: npt.NDArray[np.uint8], code: int, want: int, index0: int) -> npt.NDArray[np.float64]:
    """The numpy version: row ([16] float64) of the elements whose bytes are `raw`; `want` as in `reduce`."""
    row = _rows.empty(1)
    ints = _rows.as_int64(row)[0]
    count = raw.size // ITEMSIZE[code]
    ints[_rows.COUNT] = count
    ints[_rows.FLAGS] = _rows.WRITTEN | wanted_flags(want)
    if want & WANT_CRC:
        ints[_rows.CRC] = zlib.crc32(raw.data)
    if want & WANT_XOR:
        row.view(np.uint64)[0, _rows.XOR] = xor64(raw)
    if want & WANT_DIGEST:
        words: npt.NDArray[Any] = raw.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}[ITEMSIZE[code]])
        row.view(np.uint64)[0, _rows.DIGEST] = _digest.digest_array(words, index0)
    values = real_values(raw, code)
    if code in _INTEGERS:
        ints[_rows.FLAGS] |= _rows.HAS_INTEGERS
        if count:
            low, high = int(values.min()), int(values.max())
            if high > np.iinfo(np.int64).max:
                ints[_rows.FLAGS] &= ~_rows.HAS_INTEGERS
            else:
                ints[_rows.IMIN], ints[_rows.IMAX] = low, high
        values = values.astype(np.float64)
    ints[_rows.NANS] = np.isnan(values).sum()
    ints[_rows.POS_INF] = np.isposinf(values).sum()
    ints[_rows.NEG_INF] = np.isneginf(values).sum()
    ints[_rows.ZEROS] = (values == 0).sum()
    finite = values[np.isfinite(values)].astype(np.float64)
    if finite.size:
        with np.errstate(over="ignore", invalid="ignore"):
            row[0, _rows.MIN], row[0, _rows.MAX] = finite.min(), finite.max()
            row[0, _rows.SUM], row[0, _rows.SUMSQ] = finite.sum(), np.square(finite).sum()
            if want & WANT_MOMENTS:
                row[0, _rows.SUM3], row[0, _rows.SUM4] = (finite * finite * finite).sum(), np.square(np.square(finite)).sum()
    if want & WANT_BELOW:
        with np.errstate(invalid="ignore"):  # a NaN that signals
            ints[_rows.BELOW] = (np.abs(values.astype(np.float64)) < limit_of(want)).sum()
    first: npt.NDArray[np.float64] = row[0]
    return first


def wanted_flags(want: int) -> int:
    """The FLAGS of a row that has what `want` asks for."""
    return sum(flag for bit, flag in _FLAG_OF if want & bit)


def bytes_at(ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], code: int) -> npt.NDArray[np.uint8]:
    """The bytes of elements in memory, in C order, flat. Strides are counted in elements."""
    if math.prod(shape) == 0:
        return np.empty(0, np.uint8)
    item = ITEMSIZE[code]
    last = sum((n - 1) * s for n, s in zip(shape, strides)) + 1
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (last * item)).from_address(ptr)).view(f"V{item}")
    packed = np.ascontiguousarray(np.lib.stride_tricks.as_strided(memory, shape, [s * item for s in strides]))
    return packed.reshape(-1).view(np.uint8)


def real_values(raw: npt.NDArray[np.uint8], code: int) -> npt.NDArray[Any]:
    """`decode`, with the absolute value for complex types (NaN where a part is NaN)."""
    values = decode(raw, code)
    if values.dtype.kind != "c":
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.hypot(values.real.astype(np.float64), values.imag.astype(np.float64))
    return np.where(np.isnan(values.real) | np.isnan(values.imag), np.nan, size)


def decode(raw: npt.NDArray[np.uint8], code: int) -> npt.NDArray[Any]:
    """The elements whose bytes are `raw`, as an array of a type numpy has and that holds every value exactly."""
    if code == CODES["bfloat16"]:
        wide: npt.NDArray[np.uint32] = np.left_shift(raw.view(np.uint16), 16, dtype=np.uint32)
        return wide.view(np.float32)
    if code >= _FP8:
        values: npt.NDArray[np.float32] = fp8_table(code)[raw]
        return values
    if code == CODES["bool"]:
        truth: npt.NDArray[np.uint8] = np.not_equal(raw, 0).astype(np.uint8)
        return truth
    return raw.view(_PLAIN[code])


@lru_cache(None)
def fp8_table(code: int) -> npt.NDArray[np.float32]:
    """Value of each of the 256 bytes of an 8-bit float type, [256] float32."""
    return np.array(small_float_values(NAMES[code]), np.float32)


def _address(out_ptr: int) -> npt.NDArray[np.float64]:
    return np.ctypeslib.as_array((ctypes.c_double * _rows.WORDS).from_address(out_ptr))
