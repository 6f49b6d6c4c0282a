"""A2: rows of values made of two tensors, histograms, and features of layers, against numpy or float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from msprobe_engine.core.statistics import histograms, host_kernel, pairs
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.common.parameters.update_pairs import Pair
from msprobe_integrations.doctor import kernels
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.kernels import Way
from msprobe_integrations.doctor.numbers.reduction import Found, compare, judge, random_bits, reference, tolerance_of
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.monitor import feature_math
from msprobe_integrations.torch.statistics.pair_kernels import Correction
from msprobe_integrations.torch.statistics.rows import CODES

OPERATIONS = {"agreement": pairs.AGREE, "ratio of Adam": pairs.RATIO, "update": pairs.LINEAR, "sign of the update": pairs.SIGN}
TYPES = (("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32"), ("float64", "float32"))
HISTOGRAMS = ("bfloat16", "float32", "float16", "float64", "float8_e4m3fn", "int8")
_STEPS, _BETAS = 3, (0.9, 0.999)
_LIMIT = 0.25
_TOLERANCE = 1e-6
_FEATURE = 1e-3


def run(device: Device) -> Iterator[Line]:
    """A line per way and kind of values."""
    ways: tuple[Way, ...] = ("kernels", "operators")
    for way in ways:
        if why := kernels.why_not(device, way):
            yield Line(f"pairs and histograms by {way}", "skipped", why=why)
            continue
        types = TYPES if device.full or way == "operators" else TYPES[:2]
        counted = [name for name in HISTOGRAMS if hasattr(torch, name)]
        for what, work, items in (("pairs", pair_rows, types), ("histograms", histogram_rows, counted)):
            total = Found()
            for part in kernels.in_processes(device, way, work, items):
                total.add(part)
            yield total.line(f"{what}, {way}", max(_TOLERANCE, tolerance_of(device, way)))
    yield features(device)


def _sizes(device: Device, way: Way) -> tuple[int, ...]:
    return (1, 1000, 70_001, 3_000_000) if device.full else (1000,) if way == "kernels" else (1, 1000, 9000)


def _numbers(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.from_numpy(np.random.default_rng(seed).standard_normal(n)).to(dtype)
    special = torch.tensor([0.0, float("nan"), 1.0, float("inf"), -0.0, -1.0] if seed else [0.0, 1.0, 0.0, float("nan"), 2.0, -1.0])
    made[: min(n, 6)] = special[:n].to(dtype)
    return made


def pair_rows(work: tuple[Device, Way, tuple[str, str]]) -> Found:
    """Every operation on a pair of types; the number of steps on the host and, for the ratio, on the device."""
    device, way, (type_of_a, type_of_b) = work
    kernels.why_not(device, way)  # in a process of its own Triton is not imported yet
    total = Found()
    with kernels.made_by(device, way) as messages:
        for n in _sizes(device, way):
            for name, op in OPERATIONS.items():
                a, b = _numbers(n + 1, getattr(torch, type_of_a), 1), _numbers(n + 1, getattr(torch, type_of_b), 0)
                b = b.abs() if op == pairs.RATIO else b
                for on_device in (False, True) if op == pairs.RATIO else (False,):
                    _pair(total, device, way, f"{name} of {type_of_a} and {type_of_b}, {n}", op, a, b, on_device=on_device)
    judge(total, messages)
    return total


def _pair(total: Found, device: Device, way: Way, name: str, op: int, a: torch.Tensor, b: torch.Tensor, *, on_device: bool) -> None:
    n = a.numel() - 1
    corrections = (1 / (1 - _BETAS[0] ** _STEPS), (1 - _BETAS[1] ** _STEPS) ** -0.5, 1e-3)
    numbers = corrections if op == pairs.RATIO else (0.75, -1.25, 0.0)
    given: Any = numbers
    if on_device:
        count = torch.tensor(float(_STEPS), device=device.device)
        given = Correction(count, _BETAS[0], -1.0), Correction(count, _BETAS[1], -0.5), numbers[2]
    backend = TorchBackend()
    # where the factors are made on the device their last bit may be another one, and so may be what lies below a limit
    backend._want = host_kernel.WANT_MOMENTS | (0 if on_device else host_kernel.want_below(_LIMIT))
    tensors = a.to(device.device), b.to(device.device)
    matrix = tuple(tensor[: n // 8 * 8].view(8, -1) for tensor in tensors)
    cases = {"whole": (tensors[0][:n], tensors[1][:n]), "odd address": (tensors[0][1:], tensors[1][1:])}
    if n >= 8:
        cases |= {"transposed": (matrix[0].t(), matrix[1].t()), "of different order": (matrix[0].t().contiguous().t(), matrix[1])}
    refs: list[tuple[str, int]] = []
    for how in ("first", "again", "together") if device.full else ("first",):
        batch = how == "together"
        for key, (x, y) in cases.items():
            if batch:
                with backend.batched():
                    refs += [(f"{key} ({how})", backend.reduce_pair(Pair(op, x, y, given)).row) for _ in range(3)]
            else:
                refs.append((f"{key} ({how})", backend.reduce_pair(Pair(op, x, y, given)).row))
    rows = backend.finish_step().rows()
    if backend.unsupported:
        total.wrong.append(f"{name}: no numbers ({', '.join(backend.unsupported)})")
    arrays = [host_kernel.decode(tensor.view(torch.uint8).numpy(), CODES[tensor.dtype]) for tensor in (a, b)]
    made = pairs.values(op, arrays[0], arrays[1], numbers)
    parts = {"whole": made[:n], "odd address": made[1:], "matrix": made[: n // 8 * 8]}
    expected = {key: reference(torch.from_numpy(np.ascontiguousarray(part)), backend._want) for key, part in parts.items()}
    for key, row in refs:
        if row >= 0:
            values = expected.get(key.split(" (")[0], expected["matrix"])
            wrong, error = compare(rows[row], values, max(_TOLERANCE, tolerance_of(device, way)), _TOLERANCE)
            total.add(Found(1, error, [f"{name}, {key}: {wrong}"] if wrong else []))


def histogram_rows(work: tuple[Device, Way, str]) -> Found:
    """Counts of both kinds of bins, exactly."""
    device, way, name = work
    kernels.why_not(device, way)
    dtype, total = getattr(torch, name), Found()
    with kernels.made_by(device, way) as messages:
        for n in _sizes(device, way):
            raw = random_bits(dtype, n // 8 * 8 or n, 11)
            if dtype.is_floating_point and dtype.itemsize > 1:
                raw = torch.where(torch.rand(raw.shape, generator=torch.Generator().manual_seed(1)) < 0.5, raw.view(dtype), 0.7)
            host = raw.view(dtype)
            device_tensor = raw.to(device.device).view(dtype)
            cases = {"whole": (host, device_tensor)}
            if n >= 8:
                cases["transposed"] = host.view(8, -1)[:, 1:].t(), device_tensor.view(8, -1)[:, 1:].t()
                cases["expanded"] = host.view(8, -1)[0].expand(8, -1), device_tensor.view(8, -1)[0].expand(8, -1)
            for layout, (known, tensor) in cases.items():
                for kind in histograms.BINS:
                    _histogram(total, f"{kind} histogram of {n} {name}, {layout}", known, tensor, kind)
    judge(total, messages)
    return total


def _histogram(total: Found, name: str, known: torch.Tensor, tensor: torch.Tensor, kind: str) -> None:
    backend = TorchBackend()
    first = backend.histogram(tensor, kind)
    rows = backend.finish_step().rows()
    if first < 0:
        total.wrong.append(f"{name}: no counts ({', '.join(backend.unsupported)})")
        return
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[known.dtype.itemsize]
    raw = known.view(bits).contiguous().view(-1).view(torch.uint8).numpy()
    with np.errstate(invalid="ignore"):
        expected = histograms.count_values(host_kernel.real_values(raw, CODES[known.dtype]), kind)
    got = histograms.counts(rows, first, kind)
    total.rows += 1
    if not np.array_equal(got, expected):
        place = int(np.flatnonzero(got != expected)[0])
        total.wrong.append(f"{name}: bin {place} has {got[place]}, not {expected[place]}")


def features(device: Device) -> Line:
    """Numbers of layers, made in float32 on the device, against float64 on the CPU."""
    random = torch.Generator().manual_seed(2)
    heads, length, width = (8, 512, 64) if device.full else (2, 32, 8)
    query = torch.randn(2, length, heads, width, generator=random)
    key = torch.randn(2, length, heads // 2, width, generator=random)
    weight = torch.randn(4 * width, 8 * width, generator=random)
    logits = torch.randn(4 * length, 16, generator=random)
    logits[:, 3] = -float("inf")
    router = weight[:8]
    spectrum = torch.linalg.svdvals(weight.double())[0]
    tensors = {name: target.to(device.device) for name, target in {"q": query, "k": key, "w": weight, "l": logits, "r": router}.items()}
    start = feature_math.start_vector(weight.shape[1], device.device)
    pairs_of = {
        "attention": (feature_math.attention(tensors["q"], tensors["k"], "b,s,h,d"), _attention(query.double(), key.double())),
        "spectral norm": ((feature_math.spectral_norm(tensors["w"], start, 60)[0],), (spectrum,)),
        "similarity of experts": ((feature_math.similarity(tensors["r"]),), (_similarity(router.double()),)),
        "entropy of tokens": (
            (feature_math.token_entropy(tensors["l"]),),
            (torch.special.entr(logits.double().softmax(-1)).sum(-1).mean(),),
        ),
        "load of experts": (feature_math.expert_load(tensors["l"], 2), _load(logits, 2)),
    }
    largest, wrong = 0.0, []
    for name, (got, expected) in pairs_of.items():
        for target, golden in zip(got, expected):
            error = abs(float(target) - float(golden)) / max(abs(float(golden)), 1e-3)
            largest = max(largest, error)
            if not error <= _FEATURE:
                wrong.append(f"{name} is {float(target)!r}, not {float(golden)!r}")
    return Line("features of layers", "WRONG" if wrong else "ok", f"largest error {largest:.1e}", f"{_FEATURE:.0e}", "; ".join(wrong))


def _attention(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean entropy and largest weight, [batch, length, heads, width], as the definition says."""
    q, k = query.transpose(1, 2), key.transpose(1, 2).repeat_interleave(query.shape[2] // key.shape[2], 1)
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.special.entr(weights).sum(-1).mean(), weights.amax(-1).mean()


def _load(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, ...]:
    counts = torch.bincount(logits.topk(top, -1).indices.flatten(), minlength=logits.shape[1]).double()
    return counts.min() / counts.mean(), counts.max() / counts.mean(), (counts == 0).sum()


def _similarity(weight: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(weight, dim=1)
    cosines = unit @ unit.t()
    n = weight.shape[0]
    mean: torch.Tensor = (cosines.sum() - cosines.diagonal().sum()) / (n * (n - 1))
    return mean
