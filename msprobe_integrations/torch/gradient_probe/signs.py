"""Signs and interval counts of a gradient with torch operators: on its device, in pieces that stay in the cache, no value is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from msprobe_integrations.torch.tensors.stretches import stretch

_PIECE = 1 << 18  # elements; a multiple of 4
_COMPARABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def pack_signs(data: torch.Tensor, out: torch.Tensor) -> None:
    """Put the signs of `data` into `out` as `msprobe_engine.formats.grad_probe.signs` has them.

    Args:
        data: floating point, any shape and strides, n elements.
        out: [ceil(n / 4)] uint8, contiguous, on the same device.
    """
    for at, piece in _pieces(data):
        piece = piece if piece.dtype in _COMPARABLE else piece.float()
        codes = (piece > 0).view(torch.uint8)
        codes.add_((piece < 0).view(torch.uint8), alpha=2)
        codes.add_((piece != piece).view(torch.uint8), alpha=3)  # only NaN differs from itself
        if codes.numel() % 4:
            codes = torch.nn.functional.pad(codes, (0, -codes.numel() % 4))
        four = codes.view(torch.int32)  # 000000dd 000000cc 000000bb 000000aa, and ddccbbaa in the last byte at the end
        two = four | (four >> 6)
        out[at // 4 : at // 4 + four.numel()].copy_((two | (two >> 12)) & 0xFF)


def count_below(data: torch.Tensor, bounds: Sequence[float], out: torch.Tensor) -> None:
    """Add to `out` ([len(bounds)] int64, same device) how many elements of `data` are <= each bound, both rounded to the type the
    comparison is made in: float64 for float64, else float32. NaN is below nothing."""
    for _, piece in _pieces(data):
        piece = piece if piece.dtype == torch.float64 else piece.float()
        for i, bound in enumerate(bounds):
            out[i].add_(torch.count_nonzero(piece <= float(bound)))


def _pieces(data: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    data, n = data.detach(), data.numel()
    for at in range(0, n, _PIECE):
        yield at, stretch(data, at, min(at + _PIECE, n))
