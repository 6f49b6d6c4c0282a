"""The C kernel against numpy, for every type, instruction set and layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import host_kernel, rows

needs_kernel = pytest.mark.skipif(not host_kernel.available, reason="the C kernel was not built")
SPECIAL = {
    2: [0, 0x8000, 1, 0x8001, 0x7C00, 0xFC00, 0x7E00, 0x7F80, 0xFF80, 0x7FC0, 0x3C00],
    4: [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F800000],
    8: [0, 1 << 63, 1, (1 << 63) | 1, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x3FF0000000000000],
}


def raw_bytes(name: str, n: int, seed: int, special: float) -> np.ndarray:
    """Random bits of `n` elements, a share of them NaN, Inf, signed zeros and subnormals."""
    rng = np.random.default_rng(seed)
    size = host_kernel.ITEMSIZE[host_kernel.CODES[name]]
    if name in ("float32", "bfloat16", "float16", "float64"):
        x = rng.standard_normal(n)
        raw = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if name == "bfloat16" else x.astype(name).view(f"u{size}")
        mask = rng.random(n) < special
        raw[mask] = rng.choice(np.array(SPECIAL[size], f"u{size}"), int(mask.sum()))
        return raw.view(np.uint8)
    if name.startswith("complex"):
        half = raw_bytes("float32" if name == "complex64" else "float64", 2 * n, seed, special)
        return half.view(np.uint8)
    raw = rng.integers(0, 256, n * size, dtype=np.uint8)
    return raw % 2 if name == "bool" else raw


def kernel_row(raw: np.ndarray, code: int, n: int, digest: int = 1, index0: int = 0) -> np.ndarray:
    out = np.full(rows.WORDS, 7.0)
    host_kernel.reduce(raw.ctypes.data, n, code, out.ctypes.data, digest, index0)
    return out


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal rows; sums to rounding."""
    integers = [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert got.view(np.int64)[integers].tolist() == want.view(np.int64)[integers].tolist()
    np.testing.assert_allclose(got[6:8], want[6:8], rtol=1e-15)
    np.testing.assert_allclose(got[9], want[9], rtol=1e-11)
    count = max(int(want.view(np.int64)[0]), 1)
    np.testing.assert_allclose(got[8], want[8], rtol=1e-11, atol=1e-13 * np.sqrt(min(want[9], 1e300)) * np.sqrt(count))


@needs_kernel
@given(
    name=st.sampled_from(host_kernel.NAMES),
    n=st.one_of(st.integers(0, 80), st.integers(2000, 9000)),
    seed=st.integers(0, 2**31),
    special=st.sampled_from([0.0, 0.01, 1.0]),
    index0=st.sampled_from([0, 1, 1023, 5000]),
)
def test_kernel_gives_the_numpy_row(name: str, n: int, seed: int, special: float, index0: int) -> None:
    """Counts, extremes, exact integers and digest equal numpy's; sums agree to rounding; for any type, length and shard start."""
    raw, code = raw_bytes(name, n, seed, special), host_kernel.CODES[name]
    same(kernel_row(raw, code, n, 1, index0), host_kernel.row_of(raw, code, True, index0))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", host_kernel.NAMES)
def test_every_instruction_set(name: str) -> None:
    """AVX-512, AVX2 and portable code give the same row, with and without special values."""
    code = host_kernel.CODES[name]
    for n, special in ((0, 0), (1, 0), (15, 0.2), (33, 0), (4096, 0), (10007, 0.05)):
        raw = raw_bytes(name, n, 3, special)
        same(kernel_row(raw, code, n), host_kernel.row_of(raw, code, True, 0))
        assert kernel_row(raw, code, n, 0).view(np.int64)[rows.DIGEST] == 0


@needs_kernel
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=4),
    name=st.sampled_from(["float32", "float16", "int64", "uint8", "complex128"]),
    data=st.data(),
)
def test_strided_memory_counts_in_logical_order(shape: list[int], name: str, data: st.DataObject) -> None:
    """Transposed, sliced and expanded memory gives the row of a packed copy, digest included."""
    code = host_kernel.CODES[name]
    whole = raw_bytes(name, int(np.prod(shape)), 5, 0.1).view(name).reshape(shape)
    view = whole.transpose(data.draw(st.permutations(range(len(shape)))))
    if view.ndim and data.draw(st.booleans()):
        view = view[:: data.draw(st.sampled_from([1, 2, 3]))]
    if data.draw(st.booleans()):
        view = np.broadcast_to(view[..., None], (*view.shape, 3))
    out = np.zeros(rows.WORDS)
    strides = tuple(s // view.itemsize for s in view.strides)
    host_kernel.reduce_strided(view.ctypes.data, view.shape, strides, code, out.ctypes.data, 1, 0)
    packed = np.ascontiguousarray(view)
    same(out, host_kernel.row_of(packed.reshape(-1).view(np.uint8), code, True, 0))


@needs_kernel
def test_large_strided_and_direct_runs() -> None:
    """Long inner runs (read in place) and large gathers give the packed row."""
    x = np.random.default_rng(0).standard_normal((300, 700)).astype(np.float32)
    for view in (x[:, :300], x.T, x[::2, 1:600:3]):
        out = np.zeros(rows.WORDS)
        host_kernel.reduce_strided(view.ctypes.data, view.shape, tuple(s // 4 for s in view.strides), 0, out.ctypes.data, 1, 0)
        same(out, host_kernel.row_of(np.ascontiguousarray(view).reshape(-1).view(np.uint8), 0, True, 0))


def test_without_kernel_numpy_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the C kernel was not built the same functions give the same rows."""
    x = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    a, b = rows.empty(2), rows.empty(2)
    strides = (1, 50)
    for out in (a, b):
        host_kernel.reduce_into(out, 0, x, digest=True)
        host_kernel.reduce_strided(x.ctypes.data, (50, 40), strides, 0, out.ctypes.data + 128, 1, 0)
        monkeypatch.setattr(host_kernel, "_kernel", None)
    for i in range(2):
        same(a[i], b[i])


def test_uint64_above_int64_is_read_as_float() -> None:
    """A uint64 tensor with values from 2**63 up has no exact integers in its row, but right extremes in float64."""
    out = rows.empty(1)
    host_kernel.reduce_into(out, 0, np.array([3, 2**64 - 1], np.uint64))
    s = rows.read_row(out[0])
    assert (s.min, s.max) == (3.0, 2.0**64)


def test_small_numbers_as_uint64_count_in_sums() -> None:
    """Sums of uint64 are those of the same numbers as int64: none is moved by 2**63, where float64 has steps of 1024."""
    for n in (3, 8, 1000):
        out = rows.empty(2)
        for i, dtype in enumerate((np.uint64, np.int64)):
            host_kernel.reduce_into(out, i, np.arange(n, dtype=dtype))
        assert out[0][[rows.SUM, rows.SUMSQ]].tolist() == out[1][[rows.SUM, rows.SUMSQ]].tolist(), n


def test_finite_float64_beyond_the_sum_is_no_inf() -> None:
    """Finite float64 values whose sum overflows are counted as finite and keep their extremes."""
    out = rows.empty(1)
    host_kernel.reduce_into(out, 0, np.full(100, 1.7e308))
    s = rows.read_row(out[0])
    assert (s.infs, s.nans, s.finite_max) == (0, 0, 1.7e308)


def test_wrong_type_is_refused() -> None:
    """A type without a kernel, or of another size than the data, is an error that lists the types."""
    with pytest.raises(UsageError, match="known types: float32"):
        host_kernel.reduce_into(rows.empty(1), 0, np.zeros(2), "float32")
