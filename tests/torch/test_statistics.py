"""Rows by torch operators and the memory they lie in."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from msprobe_engine import hostkernel, rows
from msprobe_integrations.common.row_memory import MemoryPool, RowBuffer
from msprobe_integrations.torch import statistics
from msprobe_integrations.torch.statistics import CODES, DeviceRows, Taker, host_flags, reduce_device

INTEGER_WORDS = [0, 1, 2, 3, 4, 5, 10, 11, 12]


def by_operators(tensor: torch.Tensor, want: int = hostkernel.WANT_DIGEST, index0: int = 0) -> np.ndarray:
    """The row `reduce_device` writes, with the words of the host put in."""
    device = DeviceRows(tensor, 4)
    reduce_device(tensor, Taker(device, tensor, 0, host_flags(tensor.dtype, want)), want, index0)
    out = rows.empty(1)
    device.scatter(device.filled().numpy(), out)
    return out[0]


def by_numpy(tensor: torch.Tensor, index0: int = 0, want: int = hostkernel.WANT_DIGEST) -> np.ndarray:
    """The reference row of the bits of `tensor`."""
    raw = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    flat = torch.view_as_real(raw) if raw.is_complex() else raw
    return hostkernel.row_of(flat.reshape(-1).view(torch.uint8).numpy(), CODES[tensor.dtype], want, index0)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal rows; sums to rounding."""
    assert got.view(np.int64)[INTEGER_WORDS].tolist() == want.view(np.int64)[INTEGER_WORDS].tolist()
    np.testing.assert_allclose(got[6:8], want[6:8], rtol=1e-15)
    np.testing.assert_allclose(got[9], want[9], rtol=1e-11)
    np.testing.assert_allclose(got[8], want[8], rtol=1e-11, atol=1e-11 * np.sqrt(min(want[9], 1e300)))


def bits(dtype: torch.dtype, n: int, seed: int) -> torch.Tensor:
    """Random bits: NaN, Inf and subnormals come with them."""
    if n == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, n * dtype.itemsize, dtype=np.uint8))
    if dtype == torch.bool:
        return (raw % 2).view(dtype)
    if dtype in (torch.float64, torch.complex128):
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(n * dtype.itemsize // 8)).view(dtype)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", list(CODES))
@settings(max_examples=5, deadline=None)
@given(n=st.one_of(st.integers(0, 40), st.integers(1000, 3000)), seed=st.integers(0, 2**31), index0=st.sampled_from([0, 1, 2047]))
def test_operators_give_the_numpy_row(dtype: torch.dtype, n: int, seed: int, index0: int) -> None:
    """For every type the operators give the counts, extremes, exact integers and digest of the reference; sums to rounding."""
    tensor = bits(dtype, n, seed)
    same(by_operators(tensor, hostkernel.WANT_DIGEST, index0), by_numpy(tensor, index0))


@pytest.mark.parametrize("dtype", list(CODES))
@settings(max_examples=4, deadline=None)
@given(n=st.sampled_from([0, 1, 3000]), seed=st.integers(0, 2**31), limit=st.sampled_from([2e-38, 1.5]))
def test_moments_and_counts_below_a_limit(dtype: torch.dtype, n: int, seed: int, limit: float) -> None:
    """SUM3, SUM4 and BELOW by operators are those of the reference for every type, in one piece or several."""
    tensor = bits(dtype, n, seed)
    want = hostkernel.WANT_MOMENTS | hostkernel.want_below(limit)
    expected = by_numpy(tensor, 0, want)
    for piece in (1 << 22, 1234):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(statistics, "PIECE", piece)
            row = by_operators(tensor, want)
        same(row, expected)
        assert row.view(np.int64)[rows.BELOW] == expected.view(np.int64)[rows.BELOW]
        np.testing.assert_allclose(row[rows.SUM4], expected[rows.SUM4], rtol=1e-11)
        np.testing.assert_allclose(row[rows.SUM3], expected[rows.SUM3], rtol=1e-11, atol=1e-10 * expected[rows.SUM4] ** 0.75)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint64, torch.complex64])
def test_pieces_do_not_change_the_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor larger than one piece gives the same row."""
    tensor = bits(dtype, 5000, 7)
    monkeypatch.setattr(statistics, "PIECE", 1234)
    same(by_operators(tensor), by_numpy(tensor))


def test_any_strides_and_scalars() -> None:
    """Transposed, expanded and 0-dim tensors are counted by logical elements."""
    x = torch.randn(6, 5)
    for tensor in (x.t(), x[:, 1].expand(3, 6), torch.tensor(3.0), x[1:, ::2], torch.ones(1).expand(70)):
        same(by_operators(tensor), by_numpy(tensor))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex128, torch.bfloat16])
def test_one_element_of_any_stride(dtype: torch.dtype) -> None:
    """A tensor of one element is contiguous whatever its stride is, and has a digest all the same."""
    tensor = torch.tensor([3, 5]).to(dtype)[::2]
    assert (tensor.is_contiguous(), tensor.stride()) == (True, (2,))
    same(by_operators(tensor), by_numpy(tensor))


def test_under_autocast_and_inference_mode() -> None:
    """Autocast does not lower the precision, and rows can be written inside and outside of inference mode."""
    x = torch.randn(1000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(by_operators(x), by_numpy(x))
    with torch.inference_mode():
        device = DeviceRows(x, 2)
        reduce_device(x, Taker(device, x, 0, host_flags(x.dtype, False)), False)
    reduce_device(x, Taker(device, x, 1, host_flags(x.dtype, False)), False)
    out = rows.empty(2)
    device.scatter(device.filled().numpy(), out)
    assert out[0].tobytes() == out[1].tobytes()


def test_row_memory_is_not_reused_while_a_view_lives() -> None:
    """Memory returns to the pool only when the last array over it, even a slice of a slice, is gone."""
    pool = MemoryPool()
    buffer = RowBuffer(pool, 8)
    address = buffer.address(0)
    part = buffer.rows(6)[2:4][0]
    part[:] = 5.0
    del buffer
    gc.collect()
    other = RowBuffer(pool, 8)
    assert other.address(0) != address
    other.rows(8)[:] = 1.0
    assert (part == 5.0).all()
    del part
    gc.collect()
    assert RowBuffer(pool, 8).address(0) == address


def test_row_buffer_grows_without_moving_rows() -> None:
    """Rows behind the end get new memory; addresses given out before stay valid and the rows come out in order."""
    buffer = RowBuffer(MemoryPool(), 4)
    x = np.arange(1.0, 31.0)
    first = buffer.address(0)
    for i in range(30):
        hostkernel.reduce(x.ctypes.data + 8 * i, 1, 1, buffer.address(i), 0, 0)
    assert buffer.address(0) == first
    assert buffer.rows(30)[:, rows.SUM].tolist() == x.tolist()
    buffer.clear(17)
    assert rows.as_int64(buffer.rows(30))[17, rows.COUNT] == 0
