"""The verdict of one result in generated operator scripts: `msprobe_engine.accuracy.verdict.judge` in torch alone.

Scripts get the text below the line of dashes. The rules and their numbers are those of `judge` and `condition`, which say why they are
so; tests hold the two together.
"""

from __future__ import annotations

import math
from typing import Any

import torch

# ----------------------------------------------------------------------------------------------------------------------
# The verdict. A right kernel computes in float32 (its own type if that is wider) and rounds its result to its type. What
# is left of the error when that rounding is taken off is measured in units: of the round-off of the type in which it
# should compute, times what the operator makes of it (its condition: the bench was run on inputs that were changed a bit).

PASS, WARNING, ERROR = "pass", "Warning", "error"
UNITS = 32.0
"""The most units of a right kernel that computes in its own type."""
INSIDE, COARSE_INSIDE, COARSE = 1 / 32, 2.0, 8.0
"""The same of narrower ones, in round-off of their type: kernels that compute in float32, these with one intermediate result that is
rounded (a warning), and operators of several kernels."""
WEIGHTS = 2.0
"""The same of fused attention, which rounds its probabilities."""
HIDDEN = 8.0
"""Operators that round values which nobody sees may have so many times more."""
LONG_SUMS = 8.0
"""So may float32 gradients that are sums of many terms."""
BIAS, BIASED = 1.5, 16
"""Largest sum of all signed errors of a 16 bit type, by that of one round-off of each; how many elements such a sum needs."""
CONSTANT, CONSTANTS, SPREAD, SHIFT, ALIKE = 1.0, 1.75, 4.0, 3.0, 0.5
"""Of many elements less is right: one round-off of each, more of several kernels, standard deviations, what changed inputs move
the sum by, and a share of what they make beyond one round-off."""
NEIGHBOURS, SHARE, OF_ALL, JUMP, MOST, UNMEASURED = 4, 0.25, 0.5, 64.0, 0.95, 8.0
"""A scale is at least this share of the largest one so near, and this of all; an operator that amplifies a change more jumps there;
so many of the elements have to be right without the size of others as an excuse; the condition where none was measured."""


def round_to_type(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in float64 (complex128), rounded once to what the type can hold; too large ones are infinite."""
    if values.is_complex():
        return torch.complex(round_to_type(values.real, dtype), round_to_type(values.imag, dtype))
    info = torch.finfo(dtype)
    if info.bits == 64:
        return values
    exponent = (torch.frexp(values)[1] - 1).clamp(min=round(math.log2(info.smallest_normal)))
    unit = torch.ldexp(torch.full_like(values, info.eps), exponent)
    found = torch.where(values.isfinite(), (values / unit).round() * unit, values)
    return torch.where(found.abs() > info.max, found.sign() * math.inf, found)


def judge_result(
    device: Any, bench: Any, near: list[Any], unit: float, case: dict[str, Any], direction: str
) -> tuple[str, str, dict[str, float]]:
    """Status, reason and measures of one result.

    Args:
        device, bench: the results of both sides, on the CPU.
        near: results of the bench on changed inputs.
        unit: round-off of the inputs, which is how much they were changed; 0: none of them is a floating point number.
        case: what is known of the operator: its standard, ``inside`` (directions in which its narrow kernels compute in float32),
            ``hidden``, ``casts``, ``long_sums`` (its gradients),
            ``decides`` (rounding does, which integer comes out) and ``signs`` (of vectors, which nothing determines).
        direction: ``forward`` or ``backward``.
    """
    if not (torch.is_tensor(device) and torch.is_tensor(bench)):
        same = device == bench or (device != device and bench != bench)
        same = same or (isinstance(bench, float) and isinstance(device, float) and abs(device - bench) <= 2.0**-20 * abs(bench))
        return (PASS, "", {}) if same else (ERROR, f"{device!r}, the bench has {bench!r}", {})
    if device.shape != bench.shape:
        return ERROR, f"the bench's result has the shape {tuple(bench.shape)}", {}
    if family(device) != family(bench):
        return ERROR, f"the bench's result is of type {bench.dtype}", {}
    if not device.numel():
        return PASS, "", {}
    near = [other.reshape(-1) for other in near if torch.is_tensor(other) and other.shape == bench.shape]
    if family(device) in ("integer", "bool"):
        return (*exact(bench.reshape(-1), device.reshape(-1), near if case["decides"] else []), {})
    unit = unit or torch.finfo(device.dtype).eps / 2
    wide = torch.complex128 if bench.is_complex() else torch.float64
    b, d = bench.reshape(-1).to(wide), device.reshape(-1).to(wide)
    near = [other.to(wide) for other in near]
    finite, status, message = nonfinite(b, d, device.dtype, near)
    measures = differences(b, d, finite, device.dtype)
    if status == ERROR:
        return ERROR, message, measures
    if case["standard"] == "binary_consistency" and direction == "forward":
        count = int((finite & (round_to_type(b, device.dtype) != d)).sum())
        if count:
            return ERROR, f"{count} of {d.numel()} elements differ; this API moves values, and changes none", measures
        return status, message, measures
    if case["signs"]:
        d = align_signs(b.view(bench.shape), d.view(bench.shape)).reshape(-1)
    units, most, bias, drift, position = measure_errors(b, d, near, max(unit, 2.0**-52), finite, device.dtype)
    measures["units"] = max(units, most)
    good, bearable, strict = limits(device.dtype, unit, case, direction)
    own = inner(device.dtype) * 2 == torch.finfo(device.dtype).eps
    status_of_errors, text = by_condition(units, most if strict or own else 0.0, bias if strict else drift, position, good, bearable)
    if status_of_errors == ERROR and case["signs"] and direction == "backward":
        status_of_errors, text = WARNING, f"{text}; nothing determines the sign of the vectors, which these gradients depend on"
    return max(status, status_of_errors, key=(PASS, WARNING, ERROR).index), message or text, measures


def align_signs(b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """The device's vectors with the signs (phases) of the bench's: columns, or rows where these then fit better."""
    if b.dim() < 2:
        return d
    fits = [d]
    for axis in (-2, -1):
        product = (b * d.conj()).sum(axis, keepdim=True)
        fits.append(d * torch.where(product == 0, 1.0, product / product.abs()))
    return min(fits, key=lambda values: float(torch.where((values - b).isfinite(), (values - b).abs(), 0.0).sum()))


def family(tensor: torch.Tensor) -> str:
    """``bool``, ``integer``, ``float`` or ``complex``."""
    if tensor.dtype == torch.bool:
        return "bool"
    return "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "integer"


def exact(bench: torch.Tensor, device: torch.Tensor, near: list[torch.Tensor]) -> tuple[str, str]:
    """Integers and truth values are equal, but where changed inputs give another result (`near`, of operators that compute first)."""
    different = bench != device
    count = int(different.sum())
    if not count or is_explained_by_inputs(different, near, bench, device):
        return PASS, f"{count} elements differ, where round-off of the inputs decides" if count else ""
    return ERROR, f"{count} of {device.numel()} elements differ, the first at {int(different.nonzero()[0])}"


def is_explained_by_inputs(different: torch.Tensor, near: list[torch.Tensor], bench: torch.Tensor, device: torch.Tensor) -> bool:
    """Is there a difference only where changed inputs make one, too?"""
    moves, hits = torch.zeros_like(different), torch.zeros_like(different)
    for other in near:
        moves, hits = moves | (other != bench), hits | (other == device)
    known, unknown = int((different & moves).sum()), int((different & ~moves).sum())
    return unknown <= known and bool((different & hits).any())


def nonfinite(b: torch.Tensor, d: torch.Tensor, dtype: torch.dtype, near: list[torch.Tensor]) -> tuple[torch.Tensor, str, str]:
    """Elements that are finite on both sides; status and message: the others agree, as far as the type can hold the bench's value."""
    info = torch.finfo(dtype)
    held = round_to_type(b, dtype)
    finite = held.isfinite() & d.isfinite()
    if bool(finite.all()):
        return finite, PASS, ""
    same = (held == d) | (held.isnan() & d.isnan())
    size = torch.maximum(b.real.abs(), b.imag.abs()) if b.is_complex() else b.abs()
    moved = torch.zeros_like(size)
    for other in near:
        moved = torch.maximum(moved, torch.where(other.isfinite(), (other - b).abs(), 0.0).nan_to_num(nan=0.0))
    border = b.isfinite() & (size * (1 + 2 * info.eps) + COARSE * moved >= info.max)
    if str(dtype).endswith(("fn", "fnuz")):  # no infinity: NaN or the largest value takes its place
        same |= (size > info.max) & ~b.isnan() & (d.isnan() | (d.abs() == info.max))
    if b.is_complex():
        same |= ~b.isfinite() & ~d.isfinite()
    same |= border & (d.isinf() | (d.abs() >= info.max * (1 - 4 * info.eps))) & (signs(d) == signs(b))
    wrong = ~finite & ~same
    if not bool(wrong.any()):
        beyond = b.isfinite() & (size * (1 - 2 * info.eps) - COARSE * moved > info.max) & same & d.isfinite()
        if bool(beyond.any()) and not str(dtype).endswith(("fn", "fnuz")):
            return finite, WARNING, f"{int(beyond.sum())} of {b.numel()} elements are the largest value of {dtype} in place of Inf"
        return finite, PASS, ""
    unstable = torch.zeros_like(wrong)
    for other in near:
        unstable |= other.isfinite() != b.isfinite()
    i = int(wrong.nonzero()[0])
    text = f"NaN and Inf: {int(wrong.sum())} elements disagree, the first at {i}: bench {b[i].item():.6g}, device {d[i].item():.6g}"
    return finite, ERROR if bool((wrong & ~unstable).any()) else WARNING, text


def signs(values: torch.Tensor) -> torch.Tensor:
    """-1, 0 or 1, of complex numbers that of the real part."""
    return (values.real if values.is_complex() else values).sign()


def differences(b: torch.Tensor, d: torch.Tensor, finite: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Largest absolute and relative error and error in units in the last place (ULP), of finite elements."""
    info = torch.finfo(dtype)
    error = torch.where(finite, (d - b).abs(), 0.0)
    size = torch.where(finite, b.abs(), 0.0).clamp(min=info.smallest_normal)
    ulp = error / (info.eps * torch.exp2(size.log2().floor()))
    return {
        "max abs": float(error.max()),
        "max rel": float((error / size).max()),
        "mean ulp": float(ulp.mean()),
        "max ulp": float(ulp.max()),
    }


def inner(dtype: torch.dtype) -> float:
    """Round-off of the type in which a kernel with such results should compute."""
    return min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2


def measure_errors(
    b: torch.Tensor, d: torch.Tensor, near: list[torch.Tensor], unit: float, looked: torch.Tensor, dtype: torch.dtype
) -> tuple[float, float, float, float, int]:
    """Largest units of an element; what most have; sum of signed errors by the most of rounding it, and inputs too; the place."""
    info = torch.finfo(dtype)
    off, tiny = info.eps / 2, info.smallest_normal
    if not bool(looked.any()):
        return 0.0, 0.0, 0.0, 0.0, 0
    size = torch.where(looked, b.abs(), 0.0)
    error = torch.where(looked, (d - b).abs(), 0.0)
    moved = torch.zeros_like(size)
    for other in near:
        usable = looked & other.isfinite()
        step = torch.where(usable, (other - b).abs(), 0.0)
        jumps = usable & (step > JUMP * unit * torch.maximum(size, other.abs()))
        error = torch.where(jumps, torch.minimum(error, ((d - other).abs() - off * other.abs()).clamp(min=0.0)), error)
        moved = torch.maximum(moved, step)
    top = float(size.max())
    of_all = top * float((size[looked] / top).square().mean().sqrt()) if top > 0 else 0.0
    if not near:
        moved = UNMEASURED * unit * size.clamp(min=of_all)
    floor = tiny * info.eps + torch.where(size < tiny, tiny if math.log2(tiny) < -100 else 0.0, 0.0)
    excess = (error - off * size - floor).clamp(min=0.0)
    scale = inner(dtype) * size.clamp(min=tiny) + moved * (inner(dtype) / unit)
    single = torch.where(excess > 0, excess / scale, 0.0)
    best = scale.clone()
    for shift in range(1, min(NEIGHBOURS, scale.numel() - 1) + 1):
        best[shift:] = torch.maximum(best[shift:], scale[:-shift])
        best[:-shift] = torch.maximum(best[:-shift], scale[shift:])
    scale = torch.maximum(scale, SHARE * best)
    units = torch.where(excess > 0, excess / scale.clamp(min=OF_ALL * inner(dtype) * of_all), 0.0)
    position = int(units.argmax())
    ordered = single[looked].sort()[0]
    most = float(ordered[int(MOST * (len(ordered) - 1))])
    used = looked & (b.abs() >= tiny)
    if inner(dtype) == off or b.is_complex() or int(used.sum()) < BIASED:
        return float(units[position]), most, 0.0, 0.0, position
    total, by_output, by_inputs = float(((d - b) * b.sign())[used].sum()), off * b.abs()[used], (off / unit) * moved[used]
    shifts = [float(torch.where(used & other.isfinite(), (other - b) * b.sign(), 0.0).sum()) * (off / unit) for other in near]
    most_shift, rounding, inputs = SHIFT * max((abs(s) for s in shifts), default=0.0), float(by_output.sum()), float(by_inputs.sum())
    random, random_inputs = (SPREAD * math.sqrt(float(values.square().sum()) / 3) for values in (by_output, by_inputs))
    own = min(BIAS * rounding, CONSTANT * rounding + random + most_shift)
    several = math.hypot(random, random_inputs) + ALIKE * max(inputs - rounding, 0.0)
    with_inputs = min(BIAS * (rounding + inputs), CONSTANTS * rounding + several + most_shift)
    return float(units[position]), most, total / own, total / with_inputs, position


def limits(dtype: torch.dtype, unit: float, case: dict[str, Any], direction: str) -> tuple[float, float, bool]:
    """Units up to which a result passes, and up to which it is a warning; should the kernel compute in float32 and round once?"""
    loose, own = HIDDEN if case["hidden"] or case["signs"] else 1.0, torch.finfo(dtype).eps / 2 / inner(dtype)
    if dtype is torch.float32 and direction == "backward" and case.get("long_sums"):
        loose = LONG_SUMS
    if case.get("casts"):
        return INSIDE * own, INSIDE * own, own > 1.0
    if own == 1.0:
        return UNITS * loose, UNITS * loose, False
    if unit >= torch.finfo(dtype).eps / 2 and direction in case["inside"]:  # finer inputs the operator, or autocast, casts first
        return INSIDE * own, COARSE_INSIDE * own, True
    if case.get("weights") and direction == "forward":
        return WEIGHTS * own, COARSE * own, False
    return COARSE * loose * own, COARSE * own if loose == 1.0 else math.inf, False


def by_condition(units: float, most: float, bias: float, position: int, good: float, bearable: float) -> tuple[str, str]:
    """Status and reason."""
    if abs(bias) > 1 and bearable < math.inf:
        return ERROR, f"all results are too {'large' if bias > 0 else 'small'}, by {abs(bias):.3g} times what round-off can make of all"
    text = f"{units:.3g} times round-off and condition, at element {position}; up to {good:.3g} is right"
    if units > bearable:
        return ERROR, text
    if units > good:
        return WARNING, f"errors as of intermediate results in the type of the result: {text}"
    if most > good:
        return WARNING, f"small results are wrong: {most:.3g} times round-off and condition; up to {good:.3g} is right"
    return PASS, ""
