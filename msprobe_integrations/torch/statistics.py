"""Rows of one step: where they lie until the step ends, and the two ways to fill them.

`RowBuffer` (`msprobe_integrations.common.row_memory`) is host memory that the C kernel writes to. `DeviceRows` is the same on another
device, filled by `reduce_device` with torch operators only: nothing is read from the device, no branch depends on its values. Words that
the host knows (COUNT, FLAGS) are put in when the rows have arrived.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from msprobe_engine import digest as _digest
from msprobe_engine import hostkernel
from msprobe_engine import rows as _rows
from msprobe_engine.rows import Rows
from msprobe_integrations.torch import device_trust

if TYPE_CHECKING:
    from msprobe_integrations.torch.device_launch import RowLauncher

_ROW_BYTES = 8 * _rows.WORDS
PIECE = 1 << 22  # elements per pass of `reduce_device`: bounds its temporary memory to a few tens of MiB
CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in hostkernel.CODES.items() if hasattr(torch, name)}
"""torch dtype to the kernel's code; types that are missing have no statistics."""

_INTEGER = frozenset(d for d, c in CODES.items() if hostkernel.NAMES[c].startswith(("int", "uint", "bool")))
_FLOAT8 = frozenset(d for d, c in CODES.items() if hostkernel.NAMES[c].startswith("float8"))


class DeviceRows:
    """Rows of one step on one device, in the order of reduction.

    Attributes:
        places: row number in the step of each device row; counts, flags: its COUNT and FLAGS, known to the host.
        streams: streams that wrote rows; the copy has to follow all of them.
    """

    def __init__(self, like: torch.Tensor, capacity: int) -> None:
        self._like = weakref.ref(like)
        self.device = like.device
        self._capacity = capacity
        self._lock = threading.Lock()
        self._module: Any = None if self.device.type == "cpu" else getattr(torch, self.device.type, None)
        self._made: Any = None
        self._follow: set[Any] = set()
        self._joined: set[int] = set()  # handles of streams of `_follow` that are in `streams`
        self._addresses: list[int] = []
        self.chunks: list[torch.Tensor] = [self._chunk(like)]
        self.places: list[int] = []
        self.counts: list[int] = []
        self.flags: list[int] = []
        self.streams: set[Any] = set()

    def _chunk(self, like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            made = like.new_zeros((self._capacity, _rows.WORDS), dtype=torch.float64)
        if hasattr(self._module, "Event"):
            stream = self._module.current_stream(self.device)
            self._made = self._module.Event()
            self._made.record(stream)
            self._follow = {stream}
        self._joined.clear()
        return made

    def take(self, like: torch.Tensor, place: int, count: int, flags: int) -> torch.Tensor:
        """The next device row, [16] float64, for row `place` of the step, to be written on the present stream."""
        with self._lock:
            at = self._enter(like, place, count, flags)
            self._join()
            return self.chunks[at // self._capacity][at % self._capacity]

    def take_address(self, like: torch.Tensor, place: int, count: int, flags: int, stream: int) -> int:
        """As `take`, the address of the row; `stream`: handle of the present stream."""
        with self._lock:
            at = self._enter(like, place, count, flags)
            if stream not in self._joined:
                self._join()
                self._joined.add(stream)
            chunk, number = divmod(at, self._capacity)
            if chunk >= len(self._addresses):
                self._addresses = [one.data_ptr() for one in self.chunks]
            return self._addresses[chunk] + number * _ROW_BYTES

    def cancel(self, address: int) -> None:
        """The row at an address of `take_address` becomes that of no elements."""
        with self._lock:
            for chunk, first in enumerate(self._addresses):
                if first <= address < first + self._capacity * _ROW_BYTES:
                    self.counts[chunk * self._capacity + (address - first) // _ROW_BYTES] = 0

    def _enter(self, like: torch.Tensor, place: int, count: int, flags: int) -> int:
        at = len(self.places)
        self.places.append(place)
        self.counts.append(count)
        self.flags.append(flags)
        if at >= len(self.chunks) * self._capacity:
            self.chunks.append(self._chunk(like))
        return at

    def _join(self) -> None:
        """The present stream writes rows."""
        if not hasattr(self._module, "current_stream"):
            return
        stream = self._module.current_stream(self.device)
        self.streams.add(stream)
        if self._made is not None and stream not in self._follow:
            stream.wait_event(self._made)  # else zeros, or work on what was in this memory before, could come after the row
            self._follow.add(stream)

    def filled(self) -> torch.Tensor:
        """All rows taken, [n, 16] float64, still on the device."""
        whole = self.chunks[0] if len(self.chunks) == 1 else torch.cat(self.chunks)
        return whole[: len(self.places)]

    def scatter(self, host: Rows, out: Rows) -> None:
        """Put the rows that arrived (`host`, [n, 16]) to their places in the step's rows, with the words the host knows."""
        ints = _rows.as_int64(host)
        ints[:, _rows.COUNT] = self.counts
        ints[:, _rows.FLAGS] = np.array(self.flags, np.int64) & ~(ints[:, _rows.FLAGS] & _rows.HAS_INTEGERS)
        no_limits = ints[:, _rows.FLAGS] & _rows.HAS_INTEGERS == 0
        ints[no_limits, _rows.IMIN], ints[no_limits, _rows.IMAX] = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        nothing = ints[:, _rows.COUNT] == 0
        if nothing.any():
            flags = ints[nothing, _rows.FLAGS]
            host[nothing] = _rows.empty(1)
            ints[nothing, _rows.FLAGS] = flags
        out[self.places] = host


def host_flags(dtype: torch.dtype, want: int) -> int:
    """FLAGS of a row as far as the host knows them; `want` as in `hostkernel.reduce`."""
    return _rows.WRITTEN | hostkernel.wanted_flags(want) | (_rows.HAS_INTEGERS if dtype in _INTEGER else 0)


def reduce_cpu(tensor: torch.Tensor, out_ptr: int, want: int, index0: int = 0) -> None:
    """Row of a strided CPU tensor by the C kernel, written to address `out_ptr`. No operator of the framework runs."""
    code = CODES[tensor.dtype]
    if tensor.is_contiguous():
        hostkernel.reduce(tensor.data_ptr(), tensor.numel(), code, out_ptr, want, index0)
    else:
        hostkernel.reduce_strided(tensor.data_ptr(), tensor.shape, tensor.stride(), code, out_ptr, want, index0)


LAUNCHERS: dict[tuple[torch.device, torch.dtype], dict[int, RowLauncher]] = {}
"""What starts the Triton kernel for tensors of a type on a device, by what is wanted; filled by `device_launch`."""
_KERNEL_WORDS = hostkernel.WANT_DIGEST | hostkernel.WANT_MOMENTS | hostkernel.WANT_BELOW


def reduce_device(tensor: torch.Tensor, row: torch.Tensor, want: int, index0: int = 0) -> None:
    """Row of a strided tensor on any device, written in place to `row` ([16] float64 on the same device): by the Triton kernel of
    `device_kernel` on GPUs and NPUs where Triton works and reads the type, else by torch operators. Never waits for the tensor.
    `want` as in `hostkernel.reduce`, without checksums.
    COUNT and FLAGS, and IMIN and IMAX of floats, are left to the host; for uint64 FLAGS says (HAS_INTEGERS) when the values do not
    fit int64."""
    with torch.no_grad():
        n = tensor.numel()
        if n == 0 or (tensor.device.type in device_trust.DEVICES and _by_kernel(tensor, row, want, index0)):
            return
        flat = tensor.detach().reshape(-1)
        if n <= PIECE:
            _piece(flat, row, want, index0)
            return
        starts = range(0, n, PIECE)
        parts = row.new_zeros((len(starts), _rows.WORDS))
        for part, at in enumerate(starts):
            _piece(flat[at : at + PIECE], parts[part], want, index0 + at)
        merge_parts(parts, row, want)


def _by_kernel(tensor: torch.Tensor, row: torch.Tensor, want: int, index0: int) -> bool:
    """Let the Triton kernel write the row. False when it cannot."""

    def check() -> str | None:
        from msprobe_integrations.torch import device_check, device_kernel  # import Triton

        return device_check.check(tensor.device, tensor.dtype, want) if tensor.dtype in device_kernel.KINDS else None

    def launch() -> None:
        from msprobe_integrations.torch import device_launch

        device_launch.reduce(tensor, row, want, index0)

    return device_trust.by_kernel(
        tensor.device, ("row", tensor.dtype, want & _KERNEL_WORDS), f"statistics of {tensor.dtype} tensors", check, launch
    )


def merge_parts(parts: torch.Tensor, row: torch.Tensor, want: int) -> None:
    """Merge the rows `parts` ([k, 16], all taken with `want`) into `row`, on the device."""
    ints, words = parts.view(torch.int64), row.view(torch.int64)
    torch.sum(ints[:, _rows.NANS : _rows.MIN], 0, out=words[_rows.NANS : _rows.MIN])
    torch.amin(parts[:, _rows.MIN], 0, out=row[_rows.MIN])
    torch.amax(parts[:, _rows.MAX], 0, out=row[_rows.MAX])
    torch.sum(parts[:, _rows.SUM : _rows.IMIN], 0, out=row[_rows.SUM : _rows.IMIN])
    torch.amin(ints[:, _rows.IMIN], 0, out=words[_rows.IMIN])
    torch.amax(ints[:, _rows.IMAX : _rows.FLAGS + 1], 0, out=words[_rows.IMAX : _rows.FLAGS + 1])
    if want & hostkernel.WANT_MOMENTS:
        torch.sum(parts[:, _rows.SUM3 : _rows.BELOW], 0, out=row[_rows.SUM3 : _rows.BELOW])
    if want & hostkernel.WANT_BELOW:
        torch.sum(ints[:, _rows.BELOW], 0, out=words[_rows.BELOW])


def _piece(flat: torch.Tensor, row: torch.Tensor, want: int, index0: int) -> None:
    """The row of at most `PIECE` elements. Results go to their words by ``out=``, without small tensors in between."""
    dtype = flat.dtype
    words = row.view(torch.int64)
    if want & hostkernel.WANT_DIGEST:
        _digest_piece(flat, index0, words[_rows.DIGEST])
    if dtype in _INTEGER:
        _integers(flat, row, words, want)
        return
    if dtype.is_complex:
        pair = torch.view_as_real(flat).to(torch.float64)
        real = torch.hypot(pair[:, 0], pair[:, 1]).masked_fill((pair != pair).any(1), float("nan"))
    else:
        real = flat.to(torch.float32) if dtype in _FLOAT8 else flat
    inf = float("inf")
    marks = real.new_empty((4, real.shape[0]), dtype=torch.bool)
    torch.ne(real, real, out=marks[0])
    torch.eq(real, inf, out=marks[1])
    torch.eq(real, -inf, out=marks[2])
    torch.eq(real, 0, out=marks[3])
    if flat.device.type == "cpu":  # where its vectorised counting takes a third of the time of a sum of truth values
        words[_rows.NANS : _rows.DIGEST].copy_(torch.stack([torch.count_nonzero(mark) for mark in marks.unbind()]))
    else:
        torch.sum(marks, 1, out=words[_rows.NANS : _rows.DIGEST])
    row[_rows.MIN].copy_(torch.nan_to_num(real, inf, inf, inf).amin())
    row[_rows.MAX].copy_(torch.nan_to_num(real, -inf, -inf, -inf).amax())
    kept = torch.nan_to_num(real, 0.0, 0.0, 0.0).to(torch.float64)
    if want & hostkernel.WANT_BELOW:
        _below(real.to(torch.float64), words, want)
    _sums(kept, row, want)


def _sums(kept: torch.Tensor, row: torch.Tensor, want: int) -> None:
    """The sums of powers of `kept` (float64, without NaN and Inf; used up)."""
    torch.sum(kept, 0, out=row[_rows.SUM])
    if not want & hostkernel.WANT_MOMENTS:
        torch.sum(kept.square_(), 0, out=row[_rows.SUMSQ])
        return
    squares = kept.square()
    torch.sum(squares, 0, out=row[_rows.SUMSQ])
    torch.sum(kept.mul_(squares), 0, out=row[_rows.SUM3])
    torch.sum(squares.square_(), 0, out=row[_rows.SUM4])


def _below(real: torch.Tensor, words: torch.Tensor, want: int) -> None:
    """BELOW of `real` (float64: a narrower type would round the limit)."""
    torch.sum(real.abs() < hostkernel.limit_of(want), 0, out=words[_rows.BELOW])


def _integers(flat: torch.Tensor, row: torch.Tensor, words: torch.Tensor, want: int) -> None:
    unsigned = flat.dtype == torch.uint64
    wide = flat.view(torch.int64) if unsigned else flat.to(torch.int64)
    limits, extremes = words[_rows.IMIN : _rows.FLAGS], row[_rows.MIN : _rows.SUM]
    torch.amin(wide, 0, out=limits[0])
    torch.amax(wide, 0, out=limits[1])
    real = wide.to(torch.float64)
    if unsigned:  # the same bits: negative stands for 2**63 and more
        real = torch.where(wide < 0, real + 2.0**64, real)
        torch.amin(real, 0, out=extremes[0])
        torch.amax(real, 0, out=extremes[1])
        over = limits[0] < 0
        words[_rows.FLAGS].copy_(over * _rows.HAS_INTEGERS)
        limits[0].masked_fill_(over, torch.iinfo(torch.int64).max)
        limits[1].masked_fill_(over, torch.iinfo(torch.int64).min)
    else:
        extremes.copy_(limits)
    torch.sum(wide == 0, 0, out=words[_rows.ZEROS])
    if want & hostkernel.WANT_BELOW:
        _below(real, words, want)
    _sums(real, row, want)


def _digest_piece(flat: torch.Tensor, index0: int, out: torch.Tensor) -> None:
    """`msprobe_engine.digest` with int64 operators, which wrap, into `out` (0-dim int64). Temporary memory: 16 bytes per word."""
    size = flat.dtype.itemsize
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    if not flat.is_contiguous():  # an expanded dimension: bits can only be reread from real memory
        flat = flat.contiguous()
    if size == 1:
        words = flat.view(torch.uint8).to(torch.int64)
    elif size == 2:
        words = flat.view(torch.int16).to(torch.int64) & 0xFFFF
    else:
        words = flat.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    j0 = index0 * _digest.words_per_element(size)
    head = j0 % _digest.BLOCK
    blocks = -(-(head + words.shape[0]) // _digest.BLOCK)
    grid = torch.nn.functional.pad(words ^ _digest.XOR, (head, blocks * _digest.BLOCK - head - words.shape[0])).view(blocks, _digest.BLOCK)
    first = j0 // _digest.BLOCK
    lanes = torch.arange(_digest.SEED, _digest.SEED + _digest.BLOCK, dtype=torch.int64, device=grid.device)
    weights = _splitmix64(torch.cat([lanes, torch.arange(first, first + blocks, dtype=torch.int64, device=grid.device)]))
    w32 = ((weights[: _digest.BLOCK] >> 32) & 0xFFFFFFFF) | 1
    torch.sum((grid * w32).sum(1) * (weights[_digest.BLOCK :] | 1), 0, out=out)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    z = x + _signed(0x9E3779B97F4A7C15)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & ((1 << 33) - 1))
