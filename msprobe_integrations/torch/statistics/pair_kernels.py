"""Rows of values made of two tensors (`msprobe_engine.core.statistics.pairs`) and histograms (`msprobe_engine.core.statistics.histograms`)
of torch tensors.

On the CPU by the C kernel, on GPUs by Triton kernels (`device.pair_launch`, `device.histogram`), both without temporary tensors. On other
devices by torch operators in pieces of a quarter of `rows.PIECE` elements, because several values of eight bytes exist per element:
a few tens of MiB of temporary memory. Two tensors that do not lie in the same order are copied piece by piece. Nothing is read from the
device.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from msprobe_engine.core.statistics import histograms, host_kernel, pairs
from msprobe_engine.core.statistics import rows as _rows
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.statistics.device import trust as device_trust
from msprobe_integrations.torch.statistics.device_rows import Taker
from msprobe_integrations.torch.statistics.rows import CODES, reduce_device
from msprobe_integrations.torch.statistics.scaled_sums import split_digits
from msprobe_integrations.torch.tensors.devices import widest
from msprobe_integrations.torch.tensors.stretches import distinct, stretch

if TYPE_CHECKING:
    from msprobe_integrations.torch.statistics.device.pair_launch import PairLauncher


class Correction(NamedTuple):
    """(1 - beta**step)**power of a number of steps (at least 1) that is on a device: computed where a kernel or an operator needs it."""

    step: torch.Tensor
    beta: float
    power: float

    def __pow__(self, power: float) -> Correction:
        return self._replace(power=self.power * power)

    def value(self) -> torch.Tensor:
        """float64 on the device (to 1e-7 in float32 where it has no float64), 0-dim."""
        steps = self.step.detach().to(widest(self.step)).clamp(min=1.0)
        return torch.pow(-torch.expm1(steps * _log(self.beta)), self.power)

    def __float__(self) -> float:
        return float(self.value())


Factor = float | Correction
"""A constant of a pair."""
Factors = tuple[Factor, Factor, float]
PairKey = tuple[torch.device, int, torch.dtype, torch.dtype, torch.dtype | None, int]
"""Device, operation, types of both tensors and of the number of steps where it is on the device, `pair_want`."""
PAIR_LAUNCHERS: dict[PairKey, PairLauncher] = {}
"""What starts the Triton kernel for pairs of a kind; filled by `device.pair_launch`."""

PAIRED = frozenset(dtype for dtype, code in CODES.items() if code in pairs.CODES)
"""Types that may be paired."""
_WITHOUT = ~(host_kernel.WANT_DIGEST | host_kernel.WANT_CRC | host_kernel.WANT_XOR)
_SPREAD = 1024
_INF, _MINUS_INF = 0x7FF0 << 48, -(0x10 << 48)
"""Bits of float64."""


def pair_type(a: torch.Tensor, b: torch.Tensor) -> torch.dtype:
    """Type of the values made of `a` and `b`."""
    return torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32


def pair_want(want: int) -> int:
    """`want` without what a row of a pair does not have."""
    return want & _WITHOUT


def pair_cpu(op: int, a: torch.Tensor, b: torch.Tensor, c: Factors, out_ptr: int, want: int) -> None:
    """Write the row of a pair of CPU tensors of as many elements, of types in `PAIRED`, to address `out_ptr`."""
    numbers = (float(c[0]), float(c[1]), float(c[2]))
    rows = None
    for x, y in _alike(a, b, statistics.PIECE):
        one = np.zeros((1, _rows.WORDS))
        to = out_ptr if x.numel() == a.numel() else one.ctypes.data
        pairs.reduce(op, x.data_ptr(), CODES[x.dtype], y.data_ptr(), CODES[y.dtype], x.numel(), to, pair_want(want), numbers)
        if to != out_ptr:
            rows = one if rows is None else _rows.merge(rows, one)
    if rows is not None:
        ctypes.memmove(out_ptr, rows.ctypes.data, rows.nbytes)


def pair_device(op: int, a: torch.Tensor, b: torch.Tensor, c: Factors, take: Taker, want: int) -> None:
    """Write the rows of a pair of tensors on one device. Never waits."""
    want = pair_want(want)
    if a.numel() == 0:
        take(0)
        return
    if a.device.type in device_trust.DEVICES and _by_kernel(op, a, b, c, take, want):
        return
    made = pair_type(a, b)
    numbers = [x.value() if isinstance(x, Correction) else x for x in c]
    for x, y in stretches_of(a, b):
        reduce_device(_values(op, x, y, numbers, made), take, want)


def _by_kernel(op: int, a: torch.Tensor, b: torch.Tensor, c: Factors, take: Taker, want: int) -> bool:
    """Let the Triton kernel write the rows. False when it cannot."""
    numbers = factors(c, a.device)
    if numbers is None:
        return False
    step = c[0].step.dtype if isinstance(c[0], Correction) else None
    key = (a.device, op, a.dtype, b.dtype, step, want)

    def check() -> str:
        from msprobe_integrations.torch.statistics.device import check as device_check  # imports Triton

        return device_check.check_pair(key)

    def launch() -> None:
        from msprobe_integrations.torch.statistics.device import pair_launch as device_pair_launch

        for x, y in _alike(a, b, statistics.PIECE):
            device_pair_launch.launcher(key).reduce(x, y, take(x.numel()), numbers)

    given = take.given
    kind = ("pair", *key[1:5], want & (host_kernel.WANT_MOMENTS | host_kernel.WANT_BELOW))
    if device_trust.by_kernel(a.device, kind, f"updates of {a.dtype} and {b.dtype} tensors", check, launch):
        return True
    take.cancel(given)
    return False


def factors(c: Factors, device: torch.device) -> tuple[int, int, int, int] | None:
    """The constants of a pair on `device` as the kernels take them: bits of three float64 and 0; with a number of steps there the
    logarithms of the betas in place of the first two, and its address. None: the kernels cannot be told."""
    c0, c1, c2 = c
    address = 0
    if isinstance(c0, Correction) or isinstance(c1, Correction):
        if not (isinstance(c0, Correction) and isinstance(c1, Correction) and c0.step is c1.step and (c0.power, c1.power) == (-1.0, -0.5)):
            return None
        step = c0.step
        if type(step) is not torch.Tensor or step.numel() != 1 or step.device != device or (address := step.data_ptr()) == 0:
            return None
        c0, c1 = _log(c0.beta), _log(c1.beta)
    return *struct.unpack("<3q", struct.pack("<3d", c0, c1, c2)), address


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _alike(a: torch.Tensor, b: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both flat, with elements that belong together at the same place: as they lie when that is in the same order, else in pieces of
    `size` elements, of which what is not contiguous is copied."""
    a, b, n = a.detach(), b.detach(), a.numel()
    if a.is_contiguous() and b.is_contiguous():
        yield a.view(-1), b.view(-1)
    elif a.shape == b.shape and a.stride() == b.stride() and torch.ops.aten.is_non_overlapping_and_dense.default(a):
        yield a.as_strided((n,), (1,)), b.as_strided((n,), (1,))
    else:
        for at in range(0, n, size):
            yield stretch(a, at, min(at + size, n)), stretch(b, at, min(at + size, n))


def stretches_of(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of as many elements, flat, a quarter of `rows.PIECE` of both at a time."""
    size = statistics.PIECE // 4
    for x, y in _alike(a, b, size):
        for at in range(0, x.numel(), size):
            yield x[at : at + size], y[at : at + size]


def _values(op: int, a: torch.Tensor, b: torch.Tensor, c: Sequence[Any], made: torch.dtype) -> torch.Tensor:
    """`msprobe_engine.core.statistics.pairs.values` with torch operators."""
    if op == pairs.RATIO:
        x, divisor = a.to(made) * c[0], b.to(made).sqrt().mul_(c[1]).add_(c[2])
        none = divisor == 0
        return torch.where(none, x * 0, x / divisor.masked_fill_(none, 1))
    if op == pairs.AGREE:
        same = (torch.sign(a).to(made) * torch.sign(b).to(made)).add_(1.0).mul_(0.5)
        return same.masked_fill((a != a) | (b != b), float("nan"))  # of which torch says the sign 0
    total = _sum_of(a, c[0], b, c[1])
    if op == pairs.SIGN:
        total = torch.where(total != total, total, torch.sign(total))
    return total.to(made)


def _sum_of(a: torch.Tensor, c0: Any, b: torch.Tensor, c1: Any) -> torch.Tensor:
    """a c0 + b c1: in float64, or as if it were computed in float64 and rounded to float32."""
    if torch.float64 in (a.dtype, b.dtype) or widest(a) == torch.float64:
        double: torch.Tensor = a.to(torch.float64) * c0 + b.to(torch.float64) * c1
        return double
    a, b = a.to(torch.float32), b.to(torch.float32)
    (first, rest), (second, other) = _product(a, c0), _product(b, c1)
    total = first + second
    back = total - first
    lost = (first - (total - back)).add_(second - back)
    total = total.add_(lost.add_(rest).add_(other))
    return torch.where(total.abs() < math.inf, total, a * c0 + b * c1)


def _product(x: torch.Tensor, c: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of a float32 tensor and a constant: most of it exactly, and the rest."""
    head, tail = split_digits(x)
    if isinstance(c, torch.Tensor):
        first, rest = split_digits(c.to(torch.float32))
        return head * first, (tail * first).add_(x * rest)
    known = float(split_digits(torch.tensor(c, dtype=torch.float32))[0])
    return head * known, (tail * known).add_(x * (c - known))


def histogram_cpu(tensor: torch.Tensor, kind: str) -> Any:
    """Counts of a strided CPU tensor of a type in `CODES`, [bins] int64 (numpy)."""
    return histograms.count(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), CODES[tensor.dtype], kind)


def histogram_device(tensor: torch.Tensor, kind: str, takers: Sequence[Taker]) -> None:
    """Write the counts of a tensor to the rows of `takers`. Integer additions only: the same bits give the same counts in every run."""
    data, times = distinct(tensor)
    length = data.numel()
    if length and tensor.device.type in device_trust.DEVICES and _counted_by_kernel(data, times, kind, takers):
        return
    n, size = histograms.bins(kind), statistics.PIECE // 4
    # Neighbours count in different places, so that not all threads of a device wait for the same few words.
    places = torch.arange(min(size, length), device=data.device) % _SPREAD * (n + 1)
    total = torch.zeros(_SPREAD * (n + 1), dtype=torch.int64, device=data.device)
    one = torch.ones(1, dtype=torch.int64, device=data.device)
    for at in range(0, length, size):
        found = _bins(_real(stretch(data, at, min(at + size, length))), kind, n)
        total.scatter_add_(0, found + places[: found.shape[0]], one.expand(found.shape[0]))
    counts = torch.nn.functional.pad(total.view(_SPREAD, n + 1).sum(0)[:n], (0, len(takers) * histograms.PER_ROW - n))
    for take, words in zip(takers, counts.view(-1, histograms.PER_ROW)):
        row = take(length, times)
        row[1 : 1 + histograms.PER_ROW].copy_(words)
        row[_rows.MIN].fill_(_INF)
        row[_rows.MAX].fill_(_MINUS_INF)


def _counted_by_kernel(tensor: torch.Tensor, times: int, kind: str, takers: Sequence[Taker]) -> bool:
    """Let the Triton kernel count. False when it cannot."""

    def check() -> str | None:
        from msprobe_integrations.torch.statistics.device import check as device_check  # imports Triton

        return device_check.check_histogram(tensor.device, tensor.dtype, kind)

    def launch() -> None:
        from msprobe_integrations.torch.statistics.device import histogram as device_histogram
        from msprobe_integrations.torch.statistics.device import launch as device_launch

        n = tensor.numel()
        size = n if device_launch.reads(tensor, 0) else statistics.PIECE
        for at in range(0, n, size):
            part = tensor if size == n else stretch(tensor, at, min(at + size, n))
            device_histogram.count(part, kind, [take(part.numel(), times) for take in takers])

    what, given = f"histograms of {tensor.dtype} tensors", takers[0].given
    if device_trust.by_kernel(tensor.device, ("histogram", kind, tensor.dtype), what, check, launch):
        return True
    for take in takers:
        take.cancel(given)
    return False


def _real(flat: torch.Tensor) -> torch.Tensor:
    """As float64 or float32, in which no value comes to lie in another bin."""
    wide = torch.float64 if flat.dtype in (torch.float64, torch.complex128) else widest(flat)
    if flat.is_complex():
        pair = torch.view_as_real(flat).to(wide)
        return torch.hypot(pair[:, 0], pair[:, 1]).masked_fill((pair != pair).any(1), float("nan"))
    if flat.dtype == torch.uint64:
        signed = flat.view(torch.int64)
        return torch.where(signed < 0, 2.0**63, signed.to(wide))  # all of that size are in the last bin, or in none
    return flat.to(wide)


def _bins(real: torch.Tensor, kind: str, n: int) -> torch.Tensor:
    """Bin of every value (float64 or float32), `n` where it has none; int64."""
    size, double = real.abs(), real.dtype == torch.float64
    if kind == "linear":
        inside = size <= 1.0
        value = torch.where(inside, real, 0.0)
        if double:
            below = value.mul_(15.0).floor_()
        else:  # 15 x is 16 x - x, and what its rounding has lost says whether it is really below a whole number
            high = value * 16.0
            product = high - value
            below = product.floor()
            below.sub_(((below == product) & ((high - product) < value)).to(real.dtype))
        found = below.add_(15.0).to(torch.int64).clamp_(max=n - 1)
    else:
        inside = (size < float("inf")) & (size > 0)
        exponent = (real.view(torch.int64) >> 52) & 0x7FF if double else ((real.view(torch.int32) >> 23) & 0xFF) + (1023 - 127)
        found = exponent.to(torch.int64).sub_(1023 + histograms.LOWEST).clamp_(0, n - 1)
    return torch.where(inside, found, n)
