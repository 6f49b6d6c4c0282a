"""The two ways to fill rows: the C kernel on the host, and on another device its own kernel or torch operators: nothing is read from the
device, no branch depends on its values."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from msprobe_engine.core.statistics import digest as _digest
from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.statistics import scaled_sums
from msprobe_integrations.torch.statistics.device import trust as device_trust
from msprobe_integrations.torch.statistics.device_rows import Taker, multiply
from msprobe_integrations.torch.tensors.devices import widest
from msprobe_integrations.torch.tensors.stretches import distinct, stretch

if TYPE_CHECKING:
    from msprobe_integrations.torch.statistics.device.launch import RowLauncher

PIECE = 1 << 21  # elements of 4 bytes per pass of `reduce_device`: bounds its temporary memory to less than 64 MiB, with a digest, too
CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in host_kernel.CODES.items() if hasattr(torch, name)}
"""torch dtype to the kernel's code; types that are missing have no statistics."""

_INTEGER = frozenset(d for d, c in CODES.items() if host_kernel.NAMES[c].startswith(("int", "uint", "bool")))
_DOUBLE = (torch.float64, torch.complex128)
_IN_ORDER = host_kernel.WANT_DIGEST | host_kernel.WANT_CRC | host_kernel.WANT_XOR
MANY = 1 << 20
_LEAST, _MOST = -(2**63), 2**63 - 1
_FLOAT8 = frozenset(d for d, c in CODES.items() if host_kernel.NAMES[c].startswith("float8"))


def host_flags(dtype: torch.dtype, want: int) -> int:
    """FLAGS of a row as far as the host knows them; `want` as in `host_kernel.reduce`."""
    return _rows.WRITTEN | host_kernel.wanted_flags(want) | (_rows.HAS_INTEGERS if dtype in _INTEGER else 0)


def reduce_cpu(tensor: torch.Tensor, out_ptr: int, want: int, index0: int = 0) -> None:
    """Row of a strided CPU tensor by the C kernel, written to address `out_ptr`. No operator of the framework runs; of what `is_repeated`,
    those that make a view."""
    code, times = CODES[tensor.dtype], 1
    if is_repeated(tensor) and not want & _IN_ORDER:
        tensor, times = distinct(tensor)
    if tensor.is_contiguous():
        host_kernel.reduce(tensor.data_ptr(), tensor.numel(), code, out_ptr, want, index0)
    else:
        host_kernel.reduce_strided(tensor.data_ptr(), tensor.shape, tensor.stride(), code, out_ptr, want, index0)
    if times > 1:
        row = np.ctypeslib.as_array((ctypes.c_double * _rows.WORDS).from_address(out_ptr)).reshape(1, _rows.WORDS)
        multiply(row, np.array([times], np.int64))


def is_repeated(tensor: torch.Tensor) -> bool:
    """Has a tensor many elements of which several are one in memory (``expand``)? Each is looked at once then: to make such a view costs
    the training nothing, however large it is."""
    return tensor.numel() >= MANY and 0 in tensor.stride()


LAUNCHERS: dict[tuple[torch.device, torch.dtype], dict[int, RowLauncher]] = {}
"""What starts the Triton kernel for tensors of a type on a device, by what is wanted; filled by `device.launch`."""
_KERNEL_WORDS = host_kernel.WANT_DIGEST | host_kernel.WANT_MOMENTS | host_kernel.WANT_BELOW


def reduce_device(tensor: torch.Tensor, take: Taker, want: int, index0: int = 0) -> None:
    """Rows of a strided tensor on any device, written in place: one by the Triton kernel of `device.kernel` on GPUs and NPUs where
    Triton works and reads the type, else one for each of its pieces by torch operators. Never waits for the tensor.
    `want` as in `host_kernel.reduce`, without checksums.
    COUNT and FLAGS, and IMIN and IMAX of floats, are left to the host; for uint64 FLAGS says (HAS_INTEGERS) when the values do not
    fit int64."""
    with torch.no_grad():
        data, times = (tensor.detach(), 1) if want & host_kernel.WANT_DIGEST else distinct(tensor)
        n = data.numel()
        if n == 0:
            take(0)
            return
        if tensor.device.type in device_trust.DEVICES and _by_kernel(tensor.device, data, times, take, want, index0):
            return
        share = 2 if want & _KERNEL_WORDS else 1  # other words take temporary tensors of their own
        share = share if widest(data) == torch.float64 else 2 * share
        size = PIECE * 4 // max(4, data.element_size()) // share
        for at in range(0, n, size):
            part = stretch(data, at, min(at + size, n))
            _piece(part, take(part.shape[0], times), want, index0 + at)


def _by_kernel(device: torch.device, tensor: torch.Tensor, times: int, take: Taker, want: int, index0: int) -> bool:
    """Let the Triton kernel write the row. False when it cannot."""

    def check() -> str | None:
        from msprobe_integrations.torch.statistics.device import check as device_check  # import Triton
        from msprobe_integrations.torch.statistics.device import kernel as device_kernel  # import Triton

        return device_check.check(device, tensor.dtype, want) if tensor.dtype in device_kernel.KINDS else None

    def launch() -> None:
        from msprobe_integrations.torch.statistics.device import launch as device_launch

        n = tensor.numel()
        size = n if device_launch.reads(tensor, want) else PIECE
        for at in range(0, n, size):
            part = tensor if size == n else stretch(tensor, at, min(at + size, n))
            device_launch.reduce(part, take(part.numel(), times), want, index0 + at)

    kind, given = ("row", tensor.dtype, want & _KERNEL_WORDS), take.given
    if device_trust.by_kernel(device, kind, f"statistics of {tensor.dtype} tensors", check, launch):
        return True
    take.cancel(given)
    return False


def _piece(flat: torch.Tensor, words: torch.Tensor, want: int, index0: int) -> None:
    """The row of at most `PIECE` elements. Results go to their words by ``out=``, without small tensors in between."""
    dtype = flat.dtype
    moments = bool(want & host_kernel.WANT_MOMENTS)
    if want & host_kernel.WANT_DIGEST:
        _digest_piece(flat, index0, words[_rows.DIGEST])
    if dtype in _INTEGER:
        _integers(flat, words, want)
        return
    wide = torch.float64 if dtype in _DOUBLE else widest(flat)
    if dtype.is_complex:
        pair = torch.view_as_real(flat).to(wide)
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
    low, high = torch.nan_to_num(real, inf, inf, inf).amin(), torch.nan_to_num(real, -inf, -inf, -inf).amax()
    if want & host_kernel.WANT_BELOW:
        _below(real, words, want)
    kept = torch.nan_to_num(real, 0.0, 0.0, 0.0)
    if wide == torch.float32:
        scaled_sums.write(kept, low, high, words, moments)
        return
    row = words.view(torch.float64)
    row[_rows.MIN].copy_(low)
    row[_rows.MAX].copy_(high)
    _sums(kept.to(torch.float64), row, moments)


def _sums(kept: torch.Tensor, row: torch.Tensor, moments: bool) -> None:
    """The sums of powers of `kept` (float64, without NaN and Inf; used up)."""
    torch.sum(kept, 0, out=row[_rows.SUM])
    if not moments:
        torch.sum(kept.square_(), 0, out=row[_rows.SUMSQ])
        return
    squares = kept.square()
    torch.sum(squares, 0, out=row[_rows.SUMSQ])
    torch.sum(kept.mul_(squares), 0, out=row[_rows.SUM3])
    torch.sum(squares.square_(), 0, out=row[_rows.SUM4])


def _below(real: torch.Tensor, words: torch.Tensor, want: int) -> None:
    """BELOW of floats: by their bits, because the limit may be subnormal, which some devices take for 0."""
    limit = np.float64(host_kernel.limit_of(want))
    if real.dtype == torch.float64:
        bits, smaller = real.view(torch.int64) & (2**63 - 1), int(limit.view(np.int64))
    else:
        with np.errstate(over="ignore"):
            short = np.float32(limit)
        short = np.nextafter(short, np.float32(np.inf)) if short < limit else short  # what is below the one is below the other
        bits, smaller = real.to(torch.float32).view(torch.int32) & (2**31 - 1), int(short.view(np.int32))
    torch.sum(bits < smaller, 0, out=words[_rows.BELOW])


def _integers(flat: torch.Tensor, words: torch.Tensor, want: int) -> None:
    unsigned, moments = flat.dtype == torch.uint64, bool(want & host_kernel.WANT_MOMENTS)
    wide = flat.view(torch.int64) if unsigned else flat.to(torch.int64)
    limits = words[_rows.IMIN : _rows.FLAGS]
    torch.amin(wide, 0, out=limits[0])
    torch.amax(wide, 0, out=limits[1])
    torch.sum(wide == 0, 0, out=words[_rows.ZEROS])
    if want & host_kernel.WANT_BELOW:
        last = math.ceil(min(host_kernel.limit_of(want), 2.0**65)) - 1
        if unsigned:  # the same bits: negative stands for 2**63 and more
            below = (wide ^ _LEAST) <= min(last + _LEAST, _MOST)
        else:
            below = (wide <= min(last, _MOST)) & (wide >= max(-last, _LEAST))
        torch.sum(below, 0, out=words[_rows.BELOW])
    if widest(flat) == torch.float64:
        row = words.view(torch.float64)
        extremes = row[_rows.MIN : _rows.SUM]
        real = wide.to(torch.float64)
        if unsigned:
            real = unsigned_real(wide)
            torch.amin(real, 0, out=extremes[0])
            torch.amax(real, 0, out=extremes[1])
        else:
            extremes.copy_(limits)
        _sums(real, row, moments)
    else:
        scaled_sums.write_integers(wide, unsigned, words, moments)
    if unsigned:
        over = limits[0] < 0
        words[_rows.FLAGS].copy_(over * _rows.HAS_INTEGERS)
        limits[0].masked_fill_(over, _MOST)
        limits[1].masked_fill_(over, _LEAST)


def _digest_piece(flat: torch.Tensor, index0: int, out: torch.Tensor) -> None:
    """`msprobe_engine.core.statistics.digest` with int64 operators, which wrap, into `out` (0-dim int64). Temporary memory: 16 bytes per
    word."""
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
        words = flat.as_strided(flat.shape, (1,)).view(torch.int32).to(torch.int64) & 0xFFFFFFFF  # one element may have any stride
    j0 = index0 * _digest.words_per_element(size)
    head = j0 % _digest.BLOCK
    blocks = -(-(head + words.shape[0]) // _digest.BLOCK)
    grid = torch.nn.functional.pad(words ^ _digest.XOR, (head, blocks * _digest.BLOCK - head - words.shape[0])).view(blocks, _digest.BLOCK)
    first = j0 // _digest.BLOCK
    lanes = torch.arange(_digest.SEED, _digest.SEED + _digest.BLOCK, dtype=torch.int64, device=grid.device)
    weights = _splitmix64(torch.cat([lanes, torch.arange(first, first + blocks, dtype=torch.int64, device=grid.device)]))
    w32 = ((weights[: _digest.BLOCK] >> 32) & 0xFFFFFFFF) | 1
    torch.sum((grid * w32).sum(1) * (weights[_digest.BLOCK :] | 1), 0, out=out)


def unsigned_real(wide: torch.Tensor) -> torch.Tensor:
    """The float64 nearest to each uint64 whose bits are `wide` (int64): a sum with 2**64 would round large ones twice."""
    half = (wide >> 1) & torch.iinfo(torch.int64).max | (wide & 1)
    return torch.where(wide < 0, half.to(torch.float64) * 2.0, wide.to(torch.float64))


def _to_signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    z = x + _to_signed(0x9E3779B97F4A7C15)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _to_signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _to_signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & ((1 << 33) - 1))
