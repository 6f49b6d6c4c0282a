"""Rows, pairs and histograms on a device whose operators have no float64, as those of an NPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_engine.core.statistics import histograms, host_kernel, pairs, rows
from msprobe_integrations.torch.statistics import pair_kernels as pairkernels
from msprobe_integrations.torch.statistics import rows as statistics
from msprobe_integrations.torch.statistics.device_rows import DeviceRows, Taker
from msprobe_integrations.torch.statistics.rows import CODES, host_flags, reduce_cpu, reduce_device
from msprobe_integrations.torch.tensors import devices

WANT = host_kernel.WANT_MOMENTS | host_kernel.want_below(1e-9)


class NoFloat64(TorchDispatchMode):
    """As torch_npu: a cast to float64 gives float32. Stricter: no operator makes float64, which an NPU would leave to a slow processor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operator."""
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.float64 and kwargs.get("device") is None:
            kwargs["dtype"] = torch.float32
        out = func(*args, **kwargs)
        made = [one for one in _pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        given = [one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if func is not torch.ops.aten.view.dtype and not any(one.dtype is torch.float64 for one in given):
            assert not any(one.dtype is torch.float64 for one in made), func
        return out


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is known of devices is found out again."""
    monkeypatch.setattr(devices, "FLOAT64", {})
    with NoFloat64():
        yield


def made(tensor: torch.Tensor, want: int = WANT) -> np.ndarray:
    """The row by operators."""
    device, out = DeviceRows(tensor, 8), rows.empty(1)
    reduce_device(tensor, Taker(device, tensor, 0, host_flags(tensor.dtype, want)), want)
    device.scatter(device.join_rows().numpy(), out)
    return out[0]


def right(tensor: torch.Tensor, want: int = WANT) -> np.ndarray:
    """The row of the C kernel."""
    out = rows.empty(1)
    reduce_cpu(tensor, out.ctypes.data, want)
    return out[0]


def check(tensor: torch.Tensor, want: int = WANT, error: float = 1e-9) -> None:
    """Equal counts, extremes and limits; odd powers to `error` of the sum of absolute values, which even powers are themselves."""
    got, expected = made(tensor, want), right(tensor, want)
    exact = [word for word in range(rows.WORDS) if word not in (rows.SUM, rows.SUMSQ, rows.SUM3, rows.SUM4)]
    assert got.view(np.int64)[exact].tolist() == expected.view(np.int64)[exact].tolist()
    np.testing.assert_allclose(got[[rows.SUMSQ, rows.SUM4]], expected[[rows.SUMSQ, rows.SUM4]], rtol=error)
    real = np.abs(host_kernel.real_values(tensor.contiguous().view(torch.uint8).numpy(), CODES[tensor.dtype]).astype(np.float64))
    real = real[np.isfinite(real)]
    for word, power in ((rows.SUM, 1), (rows.SUM3, 3)):
        assert abs(got[word] - expected[word]) <= error * (real**power).sum()
    a, b = rows.read_row(got), rows.read_row(expected)
    assert a.norm == pytest.approx(b.norm, rel=error, nan_ok=True)
    if b.kurtosis is not None:
        assert a.kurtosis == pytest.approx(b.kurtosis, rel=1e-7, nan_ok=True)


def normal(n: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers."""
    return torch.from_numpy((np.random.default_rng(n).standard_normal(n) * scale).astype(np.float32)).to(dtype)


@pytest.mark.parametrize("scale", [1e20, 8e37, 3e-5, 1e-8, 1e-11, 1e-20, 1e-25, 1e-36, 1e-42])
def test_any_magnitude(scale: float) -> None:
    """No power over- or underflows, subnormal numbers included."""
    check(normal(5000, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_types_and_special_values(dtype: torch.dtype) -> None:
    """NaN and Inf are counted and left out; a tensor of nothing else has no extremes."""
    x = normal(3000, 3.0, dtype)
    x[:5] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0]).to(dtype)
    check(x)
    check(x[:3])
    check(x[3:5])
    check(x[7:8])
    check(x.view(30, 100).t())


def test_one_value_far_above_the_others() -> None:
    """What is small against the largest value counts with all of its digits: the error is that of the sum, not of the largest."""
    for small in (1e-2, 1e-4, 1.37e-6):
        x = torch.full((300_000,), small)
        x[77] = 1.0
        check(x)
        check(x * normal(300_000, 1.0))


def test_pieces_of_different_magnitude(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece has its own scale; on the host they are one row."""
    monkeypatch.setattr(statistics, "PIECE", 1000)
    check(torch.cat([normal(1000, scale) for scale in (1e20, 1e-25, 1.0)] + [normal(77, 5.0)]))
    check(torch.arange(5000, dtype=torch.int64) * 10**15)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint64])
def test_integers(dtype: torch.dtype) -> None:
    """Sums, extremes and counts are exact, also above 2**24 and 2**63."""
    raw = np.random.default_rng(1).integers(0, 256, 1000 * dtype.itemsize, np.uint8)
    x = torch.from_numpy(raw % 2 if dtype == torch.bool else raw).view(dtype)
    check(x, host_kernel.WANT_MOMENTS | host_kernel.want_below(1e9))
    check(x[:1])
    if dtype.itemsize > 2:
        some = torch.tensor([2**24 + 1, 1, 2**31 - 1, 0]).to(dtype)
        check(some)
        assert made(some)[rows.SUM] == 2**24 + 2**31 + 1
    if dtype is torch.int64:
        check(torch.tensor([2**62 + 1, -(2**62), -1, 5, -(2**63), 2**63 - 1]))
        assert made(torch.tensor([2**62 + 1, -(2**62), 2**40]))[rows.SUM] == 2**40 + 1
    if dtype is torch.uint64:
        check(torch.from_numpy(np.array([2**64 - 1, 5, 2**63, 0], np.uint64)))
        check(torch.from_numpy(np.array([2**24 + 1, 5], np.uint64)))


def test_counts_below_a_limit() -> None:
    """The limit is not rounded: of its neighbours in the type each is on its side; it may be subnormal."""
    for limit in (0.1, 1e-9, rows.underflow_limit("bfloat16"), 1.0, 1e39):
        near = np.float32(min(limit, 3e38))
        neighbours = [np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))]
        x = torch.from_numpy(np.array([near, *neighbours, 0, np.nan, np.inf], np.float32))
        check(x, host_kernel.want_below(limit))


def test_what_is_float64_stays_so() -> None:
    """Tensors that are float64 already are reduced in float64."""
    check(torch.from_numpy(np.random.default_rng(0).standard_normal(1000) * 1e-60))


@pytest.mark.parametrize("op", [pairs.AGREE, pairs.RATIO, pairs.LINEAR, pairs.SIGN])
def test_pairs(op: int) -> None:
    """Rows of pairs, also where both products nearly cancel."""
    a = normal(5000, 1.0)
    b = (a * -0.7 + normal(5001, 1e-3)[:5000]).abs() if op == pairs.RATIO else a * -0.7 + normal(5001, 1e-3)[:5000]
    b[3], a[4] = float("inf"), float("nan")
    c = (0.7, 1.0, 1e-8)
    device, out, expected = DeviceRows(a, 8), rows.empty(1), rows.empty(1)
    pairkernels.pair_device(op, a, b, c, Taker(device, a, 0, rows.WRITTEN | host_kernel.wanted_flags(WANT)), WANT)
    device.scatter(device.join_rows().numpy(), out)
    pairkernels.pair_cpu(op, a, b, c, expected.ctypes.data, WANT)
    assert out.view(np.int64)[0, [0, 1, 2, 3, 4, 15]].tolist() == expected.view(np.int64)[0, [0, 1, 2, 3, 4, 15]].tolist()
    np.testing.assert_allclose(out[0, [6, 7, 9, 14]], expected[0, [6, 7, 9, 14]], rtol=2e-7)
    np.testing.assert_allclose(out[0, 8], expected[0, 8], atol=1e-7 * np.sqrt(5000 * expected[0, 9]))


@pytest.mark.parametrize("kind", ["linear", "log2"])
def test_histograms(kind: str) -> None:
    """Every value is in the bin where float64 has it, at the limits of bins too."""
    limits = np.arange(-15, 16, dtype=np.float32) / np.float32(15)
    near = np.concatenate([limits, np.nextafter(limits, np.float32(9)), np.nextafter(limits, np.float32(-9))])
    other = np.array([np.nan, np.inf, 1e-44, 2.0**-40, 700.0, 3e38], np.float32)
    x = torch.from_numpy(np.concatenate([near, other, np.exp2(np.arange(-60, 20)).astype(np.float32)]))
    wide = torch.from_numpy(np.array([2**64 - 1, 511, 512, 1, 0], np.uint64))
    for tensor in (x, wide, x.to(torch.bfloat16)):
        n = histograms.row_count(kind)
        device, out = DeviceRows(tensor, n), rows.empty(n)
        pairkernels.histogram_device(tensor, kind, [Taker(device, tensor, row, rows.WRITTEN) for row in range(n)])
        device.scatter(device.join_rows().numpy(), out)
        assert histograms.counts(out, 0, kind).tolist() == pairkernels.histogram_cpu(tensor, kind).tolist()
