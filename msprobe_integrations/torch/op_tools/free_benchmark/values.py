"""Tensors of the free benchmark: which are compared, how inputs are changed on their own device, and how two results are measured there.

The arithmetic is that of `msprobe_engine.accuracy.free_benchmark`, without a copy to the host: a result becomes eight numbers, which
stay on the device until the step is over. Large results are measured in parts, so that the memory it takes has a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from msprobe_engine.accuracy.free_benchmark import perturb
from msprobe_engine.accuracy.free_benchmark.judge import Measured, compute_tolerance, small_value
from msprobe_engine.accuracy.free_benchmark.perturb import NOISE, Unperturbed
from msprobe_integrations.common.capture.nested import lister, mapper

FLOATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}
"""Types that are perturbed and compared, and what the engine calls them."""
HIGHER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
_STILL = (perturb.IMPROVE, perturb.NO_CHANGE)
"""Modes that do not move the input."""
_MOST = {"cpu": 1 << 18}
"""Elements that are measured at once; on the CPU so many that what comes in between stays in its caches, elsewhere `_AT_ONCE`."""
_AT_ONCE = 1 << 22

mapped = mapper(torch.Tensor)
tensors_of = lister(mapped)


def kind(tensor: torch.Tensor) -> str | None:
    """Name of its type for the engine, None when it is not compared."""
    return FLOATS.get(tensor.dtype) if tensor.layout == torch.strided and not tensor.is_nested else None


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the same values."""
    return tensor.detach().clone()


def perturb_tensor(tensor: torch.Tensor, mode: str) -> torch.Tensor:
    """A changed copy of an input: `perturb.perturb` on its device. Where no value is large enough, the copy is the same.

    Args:
        tensor: of a type in `FLOATS`.
        mode: add_noise, bit_noise, change_value or no_change.

    Raises:
        Unperturbed: it has too few values.
    """
    values = tensor.detach()
    if mode == perturb.ADD_NOISE:
        noise = NOISE[FLOATS[values.dtype]]
        return torch.where(values.abs() > math.sqrt(noise), values + torch.tensor(noise, dtype=values.dtype, device=values.device), values)
    if mode == perturb.BIT_NOISE:
        size = values.abs()
        wanted = (size > torch.finfo(values.dtype).tiny) & (size <= torch.finfo(values.dtype).max)
        made = values.clone()
        bits = made.view(_BITS[values.dtype])
        bits ^= wanted.to(bits.dtype)
        return made
    made = values.clone(memory_format=torch.contiguous_format) if _overlaps(values) else values.clone()
    if mode == perturb.CHANGE_VALUE:
        if values.dim() == 0 or values.numel() < 2:
            raise Unperturbed("has fewer than two elements")
        first, last = (0, -1) if values.dim() == 1 else ((0, 0), (-1, -1))
        made[first], made[last] = values[last].clone(), values[first].clone()
    return made


def _overlaps(x: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride()))


def measure_difference(original: torch.Tensor, perturbed: torch.Tensor, mode: str, backward: bool) -> list[torch.Tensor]:
    """`judge.measure` of two tensors of one shape on one device: a tensor with `Measured.fields` numbers for each part. Does not wait
    for the device."""
    original_type, perturbed_type = FLOATS.get(original.dtype, ""), FLOATS.get(perturbed.dtype, "")
    small, (bits, least) = small_value(perturbed_type, mode, backward), compute_tolerance(original_type, mode)
    how = _Rule(small, bits, least, mode == perturb.NO_CHANGE, None if mode in _STILL else mode == perturb.CHANGE_VALUE)
    return [_part(original_part, perturbed_part, how) for original_part, perturbed_part in parts(original.detach(), perturbed.detach())]


def parts(tensor: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in pieces, as flat views where their layout allows."""
    most = _MOST.get(tensor.device.type, _AT_ONCE)
    if tensor.numel() <= most:
        yield tensor.reshape(-1), other.reshape(-1)
    elif tensor.is_contiguous() and other.is_contiguous():
        yield from zip(tensor.view(-1).split(most), other.view(-1).split(most))
    else:
        widest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
        half = tensor.shape[widest] // 2
        for start, length in ((0, half), (half, tensor.shape[widest] - half)):
            yield from parts(tensor.narrow(widest, start, length), other.narrow(widest, start, length))


def change_of(before: torch.Tensor, after: torch.Tensor) -> list[torch.Tensor]:
    """Numbers of `judge.norm_of`, of the difference and of `before`: by how much an input was changed."""
    squares = []
    for old, new in parts(before.detach(), after):
        wide_old, wide_new = _widen_both(old, new)
        finite = _is_finite(wide_old) & _is_finite(wide_new)
        squares.append(
            torch.cat([_square(_finite(torch.where(finite, wide_new - wide_old, 0.0))), _square(torch.where(finite, wide_old, 0.0))])
        )
    return squares


def _widen_both(tensor: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In a type that holds both: float64 where one is, else float32."""
    double = torch.float64 in (tensor.dtype, other.dtype) or not (tensor.is_floating_point() and other.is_floating_point())
    wide = torch.float64 if double and tensor.device.type != "mps" else torch.float32
    return tensor.to(wide), other.to(wide)


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    """``values.isfinite()``, which makes several tensors."""
    return values.abs() <= torch.finfo(values.dtype).max


def _finite(values: torch.Tensor) -> torch.Tensor:
    """What overflows, of finite numbers, is the largest number."""
    most = torch.finfo(values.dtype).max
    return values.clamp(-most, most)


def _square(values: torch.Tensor) -> torch.Tensor:
    """Largest absolute value, and sum of squares in units of it."""
    if not values.numel():
        return values.new_zeros(2)
    largest = values.abs().max()
    unit = torch.where(largest > 0, largest, 1.0)
    return torch.stack([largest, (values / unit).square().sum()])


class _Rule(NamedTuple):
    """`small_value`, `compute_tolerance`, whether any difference counts, and whether a difference is taken by the norm (None: never)."""

    small: float
    bits: int
    least: int
    exact: bool
    by_norm: bool | None


def _part(original: torch.Tensor, perturbed: torch.Tensor, how: _Rule) -> torch.Tensor:
    small, bits, least, exact, by_norm = how
    x, y = _widen_both(original, perturbed)
    if by_norm is None and x.device.type == "cpu":  # to look first costs nothing there, and most results are settled
        difference = (y - x).abs()
        if (difference == 0 if exact else difference < _unit(x, bits, least)).all():  # false for NaN and Inf, of which more is asked
            return x.new_zeros(Measured.fields)
    finite = _is_finite(x) & _is_finite(y)
    other = (x != y) & ~((x != x) & (y != y))
    x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
    difference = _finite(y - x)
    looked = difference != 0 if exact else difference.abs() > _unit(x, bits, least)
    high, low = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    if not exact:
        high, low = high.clamp_min(small), low.clamp_min(small)
    ratio = torch.where(looked, high / low, 1.0)
    flipped = (looked & (x * y < -small * small)).any() if not exact else looked.new_zeros(())
    flags = torch.stack([(~finite & other).any(), other.any(), flipped]).to(x.dtype)
    largest = ratio.max() - 1 if ratio.numel() else x.new_zeros(())
    if by_norm is None:
        return torch.cat([flags[:2], largest[None], flags[2:], x.new_zeros(5)])
    size = _square(x)
    excess = _excess(difference, x, size, 1 if by_norm else x.numel())
    return torch.cat([flags[:2], largest[None], flags[2:], excess, _square(difference), size])


def _excess(difference: torch.Tensor, x: torch.Tensor, size: torch.Tensor, count: int) -> torch.Tensor:
    if not x.numel():
        return x.new_zeros(1)
    usual = size[0] * (size[1] / count).sqrt()
    return (difference.abs() / torch.maximum(x.abs(), usual)).nan_to_num(nan=0.0, posinf=math.inf).max()[None]


def _unit(x: torch.Tensor, bits: int, least: int) -> torch.Tensor:
    """``2**(max(exponent of x, least) - bits)``."""
    if x.dtype == torch.float64:
        power = (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    else:
        power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    return power.clamp_min(2.0**least) * 2.0**-bits
