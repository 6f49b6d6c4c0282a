"""A1: rows of a device, of every type, layout and word, against the C kernel of the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from msprobe_engine.core.statistics import host_kernel
from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.rows import Rows
from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor import kernels
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.kernels import Way
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.statistics.rows import CODES

FAMILIES = {
    "floats": ("bfloat16", "float32", "float16", "float64"),
    "floats of 8 bits": ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "integers": ("int64", "int32", "bool", "uint8", "int8", "int16", "uint16", "uint32", "uint64"),
    "complex numbers": ("complex64", "complex128"),
}
_MAIN = ("bfloat16", "float32", "int64")
"""Types of which every combination of words is checked."""
_LIMIT = 1.25
_WIDTH = 1 << 15
_TAIL = 5


@dataclass
class Found:
    """What the rows of a type were like.

    Attributes:
        error: largest error of a sum, relative as `compare` says.
        slow: why rows were not made in the way that was asked for.
    """

    rows: int = 0
    error: float = 0.0
    wrong: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.rows, self.error = self.rows + other.rows, max(self.error, other.error)
        self.wrong += other.wrong
        self.slow += other.slow

    def line(self, name: str, tolerance: float) -> Line:
        figure = f"{self.rows} rows, largest error of a sum {self.error:.1e}"
        goal = f"counts exact, sums {tolerance:.0e}"
        if self.wrong:
            more = f"; {len(self.wrong) - 3} more" if len(self.wrong) > 3 else ""
            return Line(name, "WRONG", figure, goal, "; ".join(self.wrong[:3]) + more)
        return Line(name, "slow" if self.slow else "ok", figure, goal, "; ".join(self.slow[:2]))


def run(device: Device) -> Iterator[Line]:
    """A line per way and family of types, then numbers at the edge and tensors of more than 2**31 elements."""
    ways: tuple[Way, ...] = ("kernels", "operators")
    for way in ways:
        if why := kernels.why_not(device, way):
            yield Line(f"rows by {way}", "skipped", why=why)
            continue
        yield _edges(device, way)
        yield from _families(device, way)
    if not device.full:
        yield Line("tensors of 2**31 elements and more", "skipped", why="needs a GPU or NPU")
        return
    for way in ways:
        if not kernels.why_not(device, way):
            yield from _large(device, way)


def tolerance_of(device: Device, way: Way) -> float:
    """Of sums. An NPU has no float64: what its operators do is stated, and bounded."""
    return 1e-5 if device.type == "npu" and way == "operators" else 1e-9


def _families(device: Device, way: Way) -> Iterator[Line]:
    names = [name for family in FAMILIES.values() for name in family if hasattr(torch, name)]
    yield from _lines(device, way, kernels.in_processes(device, way, _of_type, names))


def _lines(device: Device, way: Way, results: Iterator[Found]) -> Iterator[Line]:
    for family, names in FAMILIES.items():
        total = Found()
        known = [name for name in names if hasattr(torch, name)]
        for _ in known:
            total.add(next(results))
        yield total.line(f"{family}, {way} ({len(known)} types)", tolerance_of(device, way))


def _of_type(work: tuple[Device, Way, str]) -> Found:
    device, way, name = work
    kernels.why_not(device, way)  # in a process of its own Triton is not imported yet
    return of_type(device, way, getattr(torch, name))


def of_type(device: Device, way: Way, dtype: torch.dtype) -> Found:
    """Every layout, size and word of a type."""
    name = str(dtype).removeprefix("torch.")
    main, interpreted = name in _MAIN, not device.full and way == "kernels"  # the interpreter takes 100 ms for a row
    sizes = (1, 1000, 70_001, 3_000_000) if device.full else (1, 1000, 9_001) if main or not interpreted else (1000,)
    base = random_bits(dtype, max(sizes) + 2, 7)
    host = layouts(base, dtype, sizes, every=main)
    device_tensors = layouts(base.to(device.device), dtype, sizes, every=main)
    total = Found()
    every = host_kernel.WANT_DIGEST | host_kernel.WANT_MOMENTS | host_kernel.want_below(_LIMIT)
    wants = {"all words": every, "plain": 0, "checksums": host_kernel.WANT_XOR | host_kernel.WANT_CRC}
    if interpreted:
        wants = {"all words": every, **({"plain": 0} if main else {})}
        device_tensors = {
            key: tensor
            for key, tensor in device_tensors.items()
            if main or key in ("1000 from an odd address", "1000, columns", "1000, transposed")
        }
    elif main:
        wants |= {"digest": host_kernel.WANT_DIGEST, "moments": host_kernel.WANT_MOMENTS, "below": host_kernel.want_below(_LIMIT)}
    with kernels.made_by(device, way) as messages:
        for what, want in wants.items():
            tensors = device_tensors if want == every or main else {key: tensor for key, tensor in device_tensors.items() if "," not in key}
            _compare_all(total, device, way, f"{name}, {what}", tensors, host, want)
    judge(total, messages)
    return total


def judge(total: Found, messages: Sequence[str]) -> None:
    """What the probe has warned of: known numbers that come out wrong, or a kernel that cannot be used."""
    for text in dict.fromkeys(messages):
        (total.wrong if "_Wrong" in text else total.slow).append(text)


def _compare_all(
    total: Found, device: Device, way: Way, name: str, tensors: dict[str, torch.Tensor], host: dict[str, torch.Tensor], want: int
) -> None:
    backend = TorchBackend()
    backend._want = want
    # through Triton's own call, by address (on a device), small ones by one launch
    ways: dict[str, list[int]] = {how: [] for how in ("first", "again", "together") if device.full or how != "again"}
    for how, refs in ways.items():
        backend.forget()
        if how == "together":
            with backend.batched():
                refs += [backend.reduce(tensor).row for tensor in tensors.values()]
        else:
            refs += [backend.reduce(tensor).row for tensor in tensors.values()]
    rows = backend.finish_step().rows()
    if backend.unsupported:
        total.wrong.append(f"{name}: no numbers ({', '.join(backend.unsupported)})")
    for number, key in enumerate(tensors):
        expected = reference(host[key], want)
        for how, refs in ways.items():
            if refs[number] < 0:
                continue
            extremes = 1e-12 if host[key].is_complex() else 0.0  # absolute values, whose last bit is the library's
            wrong, error = compare(rows[refs[number]], expected, tolerance_of(device, way), extremes)
            total.rows += 1
            total.error = max(total.error, error)
            if wrong:
                total.wrong.append(f"{name}, {key} ({how}): {wrong}")


def layouts(base: torch.Tensor, dtype: torch.dtype, sizes: Sequence[int], *, every: bool) -> dict[str, torch.Tensor]:
    """Views of `base` (bits of elements, or elements) as elements of `dtype`: names with a comma are those that are not contiguous."""
    made = {"no element": base[:0], "no dimension": base[0]}
    for n in sizes:
        made |= {f"{n}": base[:n], f"{n} from an odd address": base[1 : n + 1]}
        if n < 1000:
            continue
        flat = base[: n // 8 * 8].view(8, -1)
        made |= {f"{n}, transposed": flat.t(), f"{n}, columns": flat[:, 1:-1], f"{n}, expanded": flat[0].expand(8, -1)}
        if every:
            four = base[: n // 40 * 40].view(2, 5, -1, 4)
            six = base[: n // 48 * 48].view(2, 2, 3, -1, 2, 2)
            made |= {f"{n}, four dimensions": four[:, 1:].permute(2, 0, 3, 1), f"{n}, six": six[:, :, 1:].permute(5, 0, 3, 1, 4, 2)}
    views = {key: tensor if tensor.dtype == dtype else tensor.view(dtype) for key, tensor in made.items()}
    if dtype.is_complex:
        half = views["1000"]
        views |= {"1000 conjugate": half.conj(), "1000 negative,": half.conj().imag}
    return views


def random_bits(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    """Random bits on the CPU, as an integer type of the same size where there is one: NaN, Inf and subnormals come with them. Numbers of
    8 bytes and more are such that fourth powers are finite, with special ones in front."""
    random = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(random.integers(0, 2, n).astype(bool))
    if dtype == torch.float64 or dtype.is_complex:
        made = torch.from_numpy(random.standard_normal((n, 2)) * np.exp2(random.uniform(-60.0, 60.0, (n, 2))))
        special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-300], dtype=torch.float64)
        made[2:8, 0] = special[: max(0, n - 2)]
        return made[:, 0].contiguous() if dtype == torch.float64 else torch.view_as_complex(made).to(dtype)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.from_numpy(random.integers(0, 256, n * dtype.itemsize, np.uint8)).view(kind)


def reference(tensor: torch.Tensor, want: int, index0: int = 0) -> Any:
    """The row of a CPU tensor by the C kernel, or numpy where that was not built."""
    row = np.zeros(_rows.WORDS)
    plain = tensor.resolve_conj().resolve_neg()
    host_kernel.reduce_strided(plain.data_ptr(), tuple(plain.shape), plain.stride(), CODES[plain.dtype], row.ctypes.data, want, index0)
    return row


def compare(got: Any, expected: Any, tolerance: float, extremes: float = 0.0) -> tuple[str, float]:
    """What differs ("" when nothing does), and the largest error of a sum: relative to the sum of absolute values or a bound of it, so that
    sums near zero count by what was added.

    Args:
        extremes: allowed relative error of min and max.
    """
    ints, other = got.view(np.int64), expected.view(np.int64)
    flags = int(other[_rows.FLAGS])
    exact = {"count": 0, "NaN": 1, "+Inf": 2, "-Inf": 3, "zeros": 4, "digest": 5, "imin": 10, "imax": 11, "flags": 12}
    exact |= {"below": _rows.BELOW} if flags & _rows.HAS_BELOW else {}
    exact |= {"crc": _rows.CRC} if flags & _rows.HAS_CRC else {}
    exact |= {"xor": _rows.XOR} if flags & _rows.HAS_XOR else {}
    for name, word in exact.items():
        if ints[word] != other[word]:
            return f"{name} is {ints[word]}, not {other[word]}", 0.0
    for name, word in {"min": _rows.MIN, "max": _rows.MAX}.items():
        if got[word] != expected[word] and not math.isclose(got[word], expected[word], rel_tol=extremes):
            return f"{name} is {float(got[word])!r}, not {float(expected[word])!r}", 0.0
    moments = bool(flags & _rows.HAS_MOMENTS)
    squares = expected[_rows.SUMSQ]
    fourth = expected[_rows.SUM4] if moments else 0.0
    with np.errstate(all="ignore"):
        scales = {_rows.SUM: np.sqrt(other[_rows.COUNT] * squares), _rows.SUMSQ: squares}
        scales |= {_rows.SUM3: np.sqrt(squares) * np.sqrt(fourth), _rows.SUM4: fourth} if moments else {}
        largest = 0.0
        for word, scale in scales.items():
            if got[word] == expected[word]:
                continue
            error = abs(got[word] - expected[word]) / scale if scale > 0 and np.isfinite(scale) else math.inf
            if not error <= tolerance:
                return f"sum (word {word}) is {float(got[word])!r}, not {float(expected[word])!r}", float(error)
            largest = max(largest, float(error))
    return "", largest


def _edges(device: Device, way: Way) -> Line:
    """Numbers whose powers leave the range of float32, and small ones whose kurtosis needs all digits."""
    total = Found()
    normal = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    numbers = {
        "1e20": torch.full((1000,), 1e20),
        "1e-25": torch.full((1000,), 1e-25),
        "gradients of 1e-8": normal * 1e-8,
        "3e38, bfloat16": torch.full((1000,), 3e38, dtype=torch.bfloat16),
        "6e-8, float16": torch.full((1000,), 6e-8, dtype=torch.float16),
        "one large": torch.cat([torch.ones(4095), torch.tensor([1e12])]),
    }
    device_tensors = {key: tensor.to(device.device) for key, tensor in numbers.items()}
    with kernels.made_by(device, way) as messages:
        _compare_all(total, device, way, "edge", device_tensors, numbers, host_kernel.WANT_MOMENTS)
    judge(total, messages)
    return total.line(f"numbers at the edge, {way}", tolerance_of(device, way))


def _large(device: Device, way: Way) -> Iterator[Line]:
    """2**31 + 5 elements, whole, expanded and as columns; the reference is put together of rows of a part that comes again and again."""
    every = host_kernel.WANT_DIGEST | host_kernel.WANT_MOMENTS | host_kernel.want_below(_LIMIT)
    for name in ("uint8", "bfloat16", "float32") if way == "kernels" else ("bfloat16",):
        dtype, total = getattr(torch, name), Found()
        size = (1 << 31) * dtype.itemsize
        if device.free_memory() < 1.25 * size + (1 << 30):
            yield Line(f"2**31 + 5 of {name}, {way}", "skipped", why=f"needs {1.25 * size / 2**30:.0f} GiB of free memory")
            continue
        with kernels.made_by(device, way) as messages:
            for what, tensor, expected in _large_tensors(device, dtype, every, whole_only=way == "operators"):
                backend = TorchBackend()
                backend._want = every
                row = backend.reduce(tensor).row
                got = backend.finish_step().rows()
                if row < 0:
                    total.wrong.append(f"{what}: no numbers ({', '.join(backend.unsupported)})")
                    continue
                wrong, error = compare(got[row], expected, tolerance_of(device, way))
                total.add(Found(1, error, [f"{what}: {wrong}"] if wrong else []))
                del tensor
        judge(total, messages)
        yield total.line(f"2**31 + 5 of {name}, {way}", tolerance_of(device, way))


def _large_tensors(device: Device, dtype: torch.dtype, want: int, *, whole_only: bool) -> Iterator[tuple[str, torch.Tensor, Rows]]:
    part, tail = random_bits(dtype, _WIDTH, 5), random_bits(dtype, _TAIL, 6)
    times = (1 << 31) // _WIDTH
    whole = torch.empty(times * _WIDTH + _TAIL, dtype=part.dtype, device=device.device)
    whole[:-_TAIL].view(times, _WIDTH).copy_(part.to(device.device))
    whole[-_TAIL:].copy_(tail)
    end = reference(tail.view(dtype), want, times * _WIDTH)
    expected = repeat_row(part.view(dtype), times, want)
    yield "whole", whole.view(dtype), _rows.merge(expected[None], end[None])[0]
    if whole_only:
        return
    yield "expanded", part.to(device.device).view(dtype).expand(times, -1), expected
    columns = repeat_row(part[:-1].view(dtype), times, want)
    yield "columns", whole[:-_TAIL].view(dtype).view(times, _WIDTH)[:, :-1], columns


def repeat_row(part: torch.Tensor, times: int, want: int) -> Any:
    """The row of a tensor that comes `times` times in a row: sums are multiples, the digest depends on where each part begins."""
    row = reference(part, want)
    ints = row.view(np.int64)
    for word in (_rows.COUNT, _rows.NANS, _rows.POS_INF, _rows.NEG_INF, _rows.ZEROS, _rows.BELOW):
        ints[word] *= times
    row[[_rows.SUM, _rows.SUMSQ, _rows.SUM3, _rows.SUM4]] *= times
    row_of_part, n, address, code = np.zeros(_rows.WORDS), part.numel(), part.data_ptr(), CODES[part.dtype]
    digest = 0
    for index in range(times):
        host_kernel.reduce(address, n, code, row_of_part.ctypes.data, host_kernel.WANT_DIGEST, index * n)
        digest += int(row_of_part.view(np.uint64)[_rows.DIGEST])
    row.view(np.uint64)[_rows.DIGEST] = digest % (1 << 64)
    return row
