"""Rows of values made of two tensors (`msprobe_engine.pairs`) and histograms (`msprobe_engine.histograms`) of torch tensors.

On the CPU by the C kernel, on GPUs by Triton kernels (`device_pair_launch`, `device_histogram`), both without temporary tensors. On other
devices by torch operators in pieces of a quarter of `statistics.PIECE` elements, because several values of eight bytes exist per element:
a few tens of MiB of temporary memory. Nothing is read from the device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from msprobe_engine import histograms, hostkernel, pairs
from msprobe_engine import rows as _rows
from msprobe_integrations.torch import device_trust, statistics
from msprobe_integrations.torch.statistics import CODES, merge_parts, reduce_device

if TYPE_CHECKING:
    from msprobe_integrations.torch.device_pair_launch import PairLauncher


class Correction(NamedTuple):
    """(1 - beta**step)**power of a number of steps (at least 1) that is on a device: computed where a kernel or an operator needs it."""

    step: torch.Tensor
    beta: float
    power: float

    def __pow__(self, power: float) -> Correction:
        return self._replace(power=self.power * power)

    def value(self) -> torch.Tensor:
        """float64 on the device, 0-dim."""
        wide = self.step.detach().to(torch.float64).clamp(min=1.0)
        return torch.pow(1.0 - torch.pow(self.beta, wide), self.power)

    def __float__(self) -> float:
        return float(self.value())


Factor = float | Correction
"""A constant of a pair."""
Factors = tuple[Factor, Factor, float]
PairKey = tuple[torch.device, int, torch.dtype, torch.dtype, torch.dtype | None, int]
"""Device, operation, types of both tensors and of the number of steps where it is on the device, `pair_want`."""
PAIR_LAUNCHERS: dict[PairKey, PairLauncher] = {}
"""What starts the Triton kernel for pairs of a kind; filled by `device_pair_launch`."""

PAIRED = frozenset(dtype for dtype, code in CODES.items() if code in pairs.CODES)
"""Types that may be paired."""
_WITHOUT = ~(hostkernel.WANT_DIGEST | hostkernel.WANT_CRC | hostkernel.WANT_XOR)
_SPREAD = 1024


def pair_type(a: torch.Tensor, b: torch.Tensor) -> torch.dtype:
    """Type of the values made of `a` and `b`."""
    return torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32


def pair_want(want: int) -> int:
    """`want` without what a row of a pair does not have."""
    return want & _WITHOUT


def pair_cpu(op: int, a: torch.Tensor, b: torch.Tensor, c: Factors, out_ptr: int, want: int) -> None:
    """Write the row of a pair of CPU tensors of as many elements, of types in `PAIRED`, to address `out_ptr`."""
    a, b = _alike(a, b)
    numbers = (float(c[0]), float(c[1]), float(c[2]))
    pairs.reduce(op, a.data_ptr(), CODES[a.dtype], b.data_ptr(), CODES[b.dtype], a.numel(), out_ptr, pair_want(want), numbers)


def pair_device(op: int, a: torch.Tensor, b: torch.Tensor, c: Factors, row: torch.Tensor, want: int) -> None:
    """Write the row of a pair of tensors on one device to `row` ([16] float64 there). Never waits."""
    n = a.numel()
    if n == 0:
        return
    a, b = (x.detach().reshape(-1) for x in _alike(a, b))
    want = pair_want(want)
    if a.device.type in device_trust.DEVICES and _by_kernel(op, a, b, c, row, want):
        return
    made, size = pair_type(a, b), statistics.PIECE // 4
    numbers = [x.value() if isinstance(x, Correction) else x for x in c]
    starts = range(0, n, size)
    parts = row[None] if n <= size else row.new_zeros((len(starts), _rows.WORDS))
    for part, at in enumerate(starts):
        reduce_device(_values(op, a[at : at + size], b[at : at + size], numbers, made), parts[part], want)
    if n > size:
        merge_parts(parts, row, want)


def _by_kernel(op: int, a: torch.Tensor, b: torch.Tensor, c: Factors, row: torch.Tensor, want: int) -> bool:
    """Let the Triton kernel write the row. False when it cannot."""
    numbers = factors(c, a.device)
    if numbers is None:
        return False
    step = c[0].step.dtype if isinstance(c[0], Correction) else None
    key = (a.device, op, a.dtype, b.dtype, step, want)

    def check() -> str:
        from msprobe_integrations.torch import device_check  # imports Triton

        return device_check.check_pair(key)

    def launch() -> None:
        from msprobe_integrations.torch import device_pair_launch

        device_pair_launch.launcher(key).reduce(a, b, row, numbers)

    kind = ("pair", *key[1:5], want & (hostkernel.WANT_MOMENTS | hostkernel.WANT_BELOW))
    return device_trust.by_kernel(a.device, kind, f"updates of {a.dtype} and {b.dtype} tensors", check, launch)


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
        c0, c1 = (math.log(one.beta) if one.beta > 0 else -math.inf for one in (c0, c1))
    return *struct.unpack("<3q", struct.pack("<3d", c0, c1, c2)), address


def _alike(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in memory of the same order. Tensors that lie densely in the same order are taken as they lie."""
    if a.is_contiguous() and b.is_contiguous():
        return a, b
    if a.shape == b.shape and a.stride() == b.stride() and torch.ops.aten.is_non_overlapping_and_dense.default(a):
        return a.as_strided((a.numel(),), (1,)), b.as_strided((b.numel(),), (1,))
    return a.contiguous(), b.contiguous()


def _values(op: int, a: torch.Tensor, b: torch.Tensor, c: Sequence[Any], made: torch.dtype) -> torch.Tensor:
    """`msprobe_engine.pairs.values` with torch operators."""
    if op == pairs.RATIO:
        x, divisor = a.to(made) * c[0], b.to(made).sqrt().mul_(c[1]).add_(c[2])
        none = divisor == 0
        return torch.where(none, x * 0, x / divisor.masked_fill_(none, 1))
    if op == pairs.AGREE:
        same = (torch.sign(a).to(made) * torch.sign(b).to(made)).add_(1.0).mul_(0.5)
        return same.masked_fill((a != a) | (b != b), float("nan"))  # of which torch says the sign 0
    total: torch.Tensor = a.to(torch.float64) * c[0] + b.to(torch.float64) * c[1]
    if op == pairs.SIGN:
        total = torch.where(total != total, total, torch.sign(total))
    return total.to(made)


def histogram_cpu(tensor: torch.Tensor, kind: str) -> Any:
    """Counts of a strided CPU tensor of a type in `CODES`, [bins] int64 (numpy)."""
    return histograms.count(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), CODES[tensor.dtype], kind)


def histogram_device(tensor: torch.Tensor, kind: str, rows: list[torch.Tensor]) -> None:
    """Add the counts of a tensor to the words of `rows` ([16] float64 each, on its device). Integer additions only: the same bits
    give the same counts in every run."""
    if tensor.numel() and tensor.device.type in device_trust.DEVICES and _counted_by_kernel(tensor, kind, rows):
        return
    flat, n, size = tensor.detach().reshape(-1), histograms.bins(kind), statistics.PIECE // 4
    # Neighbours count in different places, so that not all threads of a device wait for the same few words.
    places = torch.arange(min(size, flat.shape[0]), device=flat.device) % _SPREAD * (n + 1)
    total = torch.zeros(_SPREAD * (n + 1), dtype=torch.int64, device=flat.device)
    one = torch.ones(1, dtype=torch.int64, device=flat.device)
    for at in range(0, flat.shape[0], size):
        found = _bins(_real(flat[at : at + size]), kind, n)
        total.scatter_add_(0, found + places[: found.shape[0]], one.expand(found.shape[0]))
    counts = torch.nn.functional.pad(total.view(_SPREAD, n + 1).sum(0)[:n], (0, len(rows) * histograms.PER_ROW - n))
    for row, words in zip(rows, counts.view(-1, histograms.PER_ROW)):
        row.view(torch.int64)[1 : 1 + histograms.PER_ROW].copy_(words)
        row[_rows.MIN].fill_(np.inf)
        row[_rows.MAX].fill_(-np.inf)


def _counted_by_kernel(tensor: torch.Tensor, kind: str, rows: list[torch.Tensor]) -> bool:
    """Let the Triton kernel count. False when it cannot."""

    def check() -> str | None:
        from msprobe_integrations.torch import device_check  # imports Triton

        return device_check.check_histogram(tensor.device, tensor.dtype, kind)

    def launch() -> None:
        from msprobe_integrations.torch import device_histogram

        device_histogram.count(tensor, kind, rows)

    what = f"histograms of {tensor.dtype} tensors"
    return device_trust.by_kernel(tensor.device, ("histogram", kind, tensor.dtype), what, check, launch)


def _real(flat: torch.Tensor) -> torch.Tensor:
    if flat.is_complex():
        pair = torch.view_as_real(flat).to(torch.float64)
        return torch.hypot(pair[:, 0], pair[:, 1]).masked_fill((pair != pair).any(1), float("nan"))
    if flat.dtype == torch.uint64:
        wide = flat.view(torch.int64)
        return torch.where(wide < 0, wide.to(torch.float64) + 2.0**64, wide.to(torch.float64))
    return flat.to(torch.float64)


def _bins(real: torch.Tensor, kind: str, n: int) -> torch.Tensor:
    """Bin of every value (float64), `n` where it has none; int64."""
    size = real.abs()
    if kind == "linear":
        inside = size <= 1.0
        found = torch.where(inside, real, 0.0).mul_(15.0).floor_().add_(15.0).to(torch.int64).clamp_(max=n - 1)
    else:
        inside = (size < float("inf")) & (size > 0)
        found = ((real.view(torch.int64) >> 52) & 0x7FF).sub_(1023 + histograms.LOWEST).clamp_(0, n - 1)
    return torch.where(inside, found, n)
