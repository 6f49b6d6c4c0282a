"""Rows of tensors on a device (Ascend), by operators of the framework there: nothing is copied to the host before the end of the step, and
then all rows by one copy.

A device row is a vector of float64 (`_WORDS`): counts are exact up to 2**53, and the limits of integers come in halves. What needs the
bytes of the elements (digest and checksums), and types that not every device computes with, is copied to the host at once instead. So is
what a device turns out not to compute rightly: each type is tried once on each device.
"""

from __future__ import annotations

import threading
from functools import reduce
from typing import Any

import mindspore
import numpy as np
from mindspore.ops import operations as P

from msprobe_engine.core.guard import raise_of_training
from msprobe_engine.core.log import warn_once
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_integrations.mindspore import environment

HOSTS = frozenset(("cpu",))
"""Devices whose memory the host reads."""
PIECE = 1 << 22
"""Elements per pass: bounds the temporary memory (float64 copies) to some hundred MiB."""
_FLOATS = frozenset(("Float64", "Float32", "Float16", "BFloat16"))
_INTEGERS = frozenset(("Int64", "Int32", "Int16", "Int8", "UInt8", "Bool"))
_NEED_BYTES = host_kernel.WANT_DIGEST | host_kernel.WANT_CRC | host_kernel.WANT_XOR
# instances of their own: what a capture puts in the place of functions does not see them
_cast, _sum, _least, _most = P.Cast(), P.ReduceSum(), P.ReduceMin(), P.ReduceMax()
_equal, _select, _finite, _less, _abs, _mul = P.Equal(), P.Select(), P.IsFinite(), P.Less(), P.Abs(), P.Mul()
_shift, _and, _reshape, _slice, _stack, _fill = P.RightShift(), P.BitwiseAnd(), P.Reshape(), P.Slice(), P.Stack(0), P.FillV2()
_NANS, _POS, _NEG, _ZEROS, _MIN, _MAX, _SUM, _SUMSQ, _SUM3, _SUM4, _BELOW, _LIMITS = range(12)
_WORDS = 16
_DOUBLE = {_rows.MIN: _MIN, _rows.MAX: _MAX, _rows.SUM: _SUM, _rows.SUMSQ: _SUMSQ}
_COUNTS = {_rows.NANS: _NANS, _rows.POS_INF: _POS, _rows.NEG_INF: _NEG, _rows.ZEROS: _ZEROS}


_trusted: dict[tuple[str, str], bool] = {}


def takes(tensor: Any, device: str, dtype: str, want: int) -> bool:
    """Is the row of such a tensor made on its device? The first tensor of a type waits for the device, which is tried.

    Raises:
        RuntimeError: of an operator of the training, which has failed before.
    """
    if device in HOSTS or want & _NEED_BYTES or (dtype not in _FLOATS and dtype not in _INTEGERS):
        return False
    trusted = _trusted.get((device, dtype))
    if trusted is None:
        tensor.data_ptr()  # from here on an error is not of an operator that came before
        problem = _problem(tensor.dtype, dtype in _INTEGERS)
        trusted = _trusted[(device, dtype)] = not problem
        if problem:
            warn_once(
                f"{dtype} on {device}",
                f"statistics of {dtype} tensors on '{device}' are taken on the host, which waits for every one of them: {problem}",
            )
    return trusted


def _problem(dtype: Any, integers: bool) -> str:
    """What is wrong with the row of the numbers 0, 1, 1 of this type; "" when nothing is."""
    try:
        with environment.no_grad():
            made = np.asarray(_piece(_cast(mindspore.Tensor([0.0, 1.0, 1.0]), dtype), integers, 0).asnumpy())
    except Exception as error:  # no such kernel
        raise_of_training(error)
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    right = np.zeros(_WORDS)
    right[_ZEROS], right[_MAX], right[_SUM], right[_SUMSQ], right[_LIMITS + 3] = 1, 1, 2, 2, int(integers)
    return "" if made.tolist() == right.tolist() else f"its operators give {made.tolist()} for 0, 1, 1"


def _number(value: float) -> Any:
    return mindspore.Tensor(value, mindspore.float64)


def _count(mark: Any) -> Any:
    return _sum(_cast(mark, mindspore.float64), ())


def _piece(flat: Any, integers: bool, want: int) -> Any:
    """The device row of at most `PIECE` elements, [16] float64, where they are."""
    real = _cast(flat, mindspore.float64)
    zero, inf = _number(0.0), _number(np.inf)
    words = [zero] * _WORDS
    finite = _finite(real)
    like = real.shape
    none = _fill(like, zero)
    kept = _select(finite, real, none)
    words[_NANS] = _number(float(np.prod(like))) - _count(_equal(real, real))
    words[_POS], words[_NEG] = _count(_equal(real, inf)), _count(_equal(real, _number(-np.inf)))
    words[_ZEROS] = _count(_equal(real, zero))
    words[_MIN] = _least(_select(finite, real, _fill(like, inf)), ())
    words[_MAX] = _most(_select(finite, real, _fill(like, _number(-np.inf))), ())
    square = _mul(kept, kept)
    words[_SUM], words[_SUMSQ] = _sum(kept, ()), _sum(square, ())
    if want & host_kernel.WANT_MOMENTS:
        words[_SUM3], words[_SUM4] = _sum(_mul(square, kept), ()), _sum(_mul(square, square), ())
    if want & host_kernel.WANT_BELOW:
        words[_BELOW] = _count(_less(_abs(real), _number(host_kernel.limit_of(want))))
    if integers:
        wide = _cast(flat, mindspore.int64)
        half, low = mindspore.Tensor(32, mindspore.int64), mindspore.Tensor(0xFFFFFFFF, mindspore.int64)
        limits = [_reshape(limit(wide, ()), (1,)) for limit in (_least, _most)]
        for word_number, part in enumerate(part for limit in limits for part in (_shift(limit, half), _and(limit, low))):
            words[_LIMITS + word_number] = _reshape(_cast(part, mindspore.float64), ())
    return _stack([_reshape(word, ()) for word in words])


def _words_of(pieces: Rows, numel: int, integers: bool, want: int) -> Rows:
    """The rows of a tensor's pieces ([k, 16] float64 on the host), merged to one, [1, 16]."""
    out = _rows.empty(len(pieces))
    ints = _rows.as_int64(out)
    for place, word in _DOUBLE.items():
        out[:, place] = pieces[:, word]
    for place, word in _COUNTS.items():
        ints[:, place] = pieces[:, word]
    if want & host_kernel.WANT_MOMENTS:
        out[:, _rows.SUM3 : _rows.SUM4 + 1] = pieces[:, _SUM3 : _SUM4 + 1]
    if want & host_kernel.WANT_BELOW:
        ints[:, _rows.BELOW] = pieces[:, _BELOW]
    ints[:, _rows.FLAGS] = _rows.WRITTEN | host_kernel.wanted_flags(want) | (_rows.HAS_INTEGERS if integers else 0)
    if integers:
        halves = pieces[:, _LIMITS : _LIMITS + 4].astype(np.int64)
        ints[:, _rows.IMIN], ints[:, _rows.IMAX] = (halves[:, 0] << 32) | halves[:, 1], (halves[:, 2] << 32) | halves[:, 3]
    ints[:, _rows.COUNT] = [min(PIECE, numel - number * PIECE) for number in range(len(pieces))]
    return reduce(_rows.merge, [out[i : i + 1] for i in range(len(out))])


class DeviceRows:
    """Rows of one step that are made on devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[int, int, bool, int, list[Any]]] = []
        self._table: Any = None
        self._event: Any = None

    def __bool__(self) -> bool:
        return bool(self._made)

    def start_reduction(self, tensor: Any, row: int, dtype: str, numel: int, want: int) -> None:
        """Start the reduction of a tensor of at least one element, for row `row` of the step. Waits for nothing."""
        integers = dtype in _INTEGERS
        with environment.no_grad():
            flat = _reshape(tensor, (numel,))
            if numel <= PIECE:
                pieces = [_piece(flat, integers, want)]
            else:
                pieces = [_piece(_slice(flat, (at,), (min(PIECE, numel - at),)), integers, want) for at in range(0, numel, PIECE)]
        with self._lock:
            self._made.append((row, numel, integers, want, pieces))

    def send(self) -> None:
        """The step is over: all rows become one table, which comes to the host by one copy."""
        with environment.no_grad():
            self._table = _stack([piece for *_, pieces in self._made for piece in pieces])
        event = getattr(getattr(mindspore, "runtime", None), "Event", None)
        if event is not None and str(getattr(self._table, "device", "CPU")) != "CPU":
            self._event = event()
            self._event.record()

    def ready(self) -> bool:
        """True when `scatter` will not wait."""
        return self._event is None or bool(self._event.query())

    def scatter(self, out: Rows) -> None:
        """Put the rows to their places in the step's rows, after `send`. Waits for the copy."""
        table: Rows = np.asarray(self._table.asnumpy(), np.float64)
        start = 0
        for row, numel, integers, want, pieces in self._made:
            out[row] = _words_of(table[start : start + len(pieces)], numel, integers, want)
            start += len(pieces)
