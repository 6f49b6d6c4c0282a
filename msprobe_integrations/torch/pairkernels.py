"""Rows of values made of two tensors (`msprobe_engine.pairs`) and histograms (`msprobe_engine.histograms`) of torch tensors.

On the CPU by the C kernel, without temporary tensors. On other devices by torch operators in pieces of a quarter of `statistics.PIECE`
elements, because several values of eight bytes exist per element: a few tens of MiB of temporary memory. Nothing is read from the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from msprobe_engine import histograms, hostkernel, pairs
from msprobe_engine import rows as _rows
from msprobe_integrations.torch import statistics
from msprobe_integrations.torch.statistics import CODES, merge_parts, reduce_device

Factor = float | torch.Tensor
"""A constant of a pair: a number, or a 0-dim tensor where the number is on a device."""
Factors = tuple[Factor, Factor, float]

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
    made, want, size = pair_type(a, b), pair_want(want), statistics.PIECE // 4
    starts = range(0, n, size)
    parts = row[None] if n <= size else row.new_zeros((len(starts), _rows.WORDS))
    for part, at in enumerate(starts):
        reduce_device(_values(op, a[at : at + size], b[at : at + size], c, made), parts[part], want)
    if n > size:
        merge_parts(parts, row, want)


def _alike(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in memory of the same order. Tensors that lie densely in the same order are taken as they lie."""
    if a.is_contiguous() and b.is_contiguous():
        return a, b
    if a.shape == b.shape and a.stride() == b.stride() and torch.ops.aten.is_non_overlapping_and_dense.default(a):
        return a.as_strided((a.numel(),), (1,)), b.as_strided((b.numel(),), (1,))
    return a.contiguous(), b.contiguous()


def _values(op: int, a: torch.Tensor, b: torch.Tensor, c: Factors, made: torch.dtype) -> torch.Tensor:
    """`msprobe_engine.pairs.values` with torch operators."""
    if op == pairs.RATIO:
        x, divisor = a.to(made) * c[0], b.to(made).sqrt().mul_(c[1]).add_(c[2])
        none = divisor == 0
        return torch.where(none, x * 0, x / divisor.masked_fill_(none, 1))
    if op == pairs.AGREE:
        same = torch.sign(a).to(made) * torch.sign(b).to(made)
        return same.add_(1.0).mul_(0.5)
    total = a.to(torch.float64) * c[0] + b.to(torch.float64) * c[1]
    if op == pairs.SIGN:
        total = torch.where(total != total, total, torch.sign(total))
    return total.to(made)


def histogram_cpu(tensor: torch.Tensor, kind: str) -> Any:
    """Counts of a strided CPU tensor of a type in `CODES`, [bins] int64 (numpy)."""
    return histograms.count(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), CODES[tensor.dtype], kind)


def histogram_device(tensor: torch.Tensor, kind: str, rows: list[torch.Tensor]) -> None:
    """Add the counts of a tensor to the words of `rows` ([16] float64 each, on its device). Integer additions only: the same bits
    give the same counts in every run."""
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
