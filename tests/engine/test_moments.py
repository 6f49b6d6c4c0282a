"""Third and fourth power sums, counts below a limit, and the statistics made of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import columns, host_kernel, rows

MOMENTS = host_kernel.WANT_MOMENTS


def row_of(x: np.ndarray, want: int, dtype: str = "", index0: int = 0) -> rows.Rows:
    """The row of an array, `dtype` as in `host_kernel.reduce_into`."""
    out = rows.empty(1)
    packed = np.ascontiguousarray(x)
    host_kernel.reduce(packed.ctypes.data, packed.size, host_kernel.CODES[dtype or x.dtype.name], out.ctypes.data, want, index0)
    return out


def random_bits(name: str, n: int, seed: int) -> np.ndarray:
    """Any bits (NaN and Inf come with them); float64 and complex128 with magnitudes whose fourth powers are finite."""
    random = np.random.default_rng(seed)
    size = host_kernel.ITEMSIZE[host_kernel.CODES[name]]
    if name in ("float64", "complex128"):
        x = random.standard_normal(n * size // 8) * np.exp2(random.integers(-200, 200, n * size // 8))
        x[random.random(x.size) < 0.05] = random.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
        return x.view(np.uint8)
    raw = random.integers(0, 256, n * size, np.uint8)
    return raw % 2 if name == "bool" else raw


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", host_kernel.NAMES)
def test_words_of_every_type_and_instruction_set(name: str) -> None:
    """SUM3, SUM4 and BELOW are those of a slow float64 loop over the finite values, for any length, and no other word changes."""
    code = host_kernel.CODES[name]
    for n, seed, limit in ((0, 0, 1.0), (1, 1, 2e-38), (15, 2, 100.0), (33, 3, 1e-3), (4096, 4, 1.0), (10007, 5, 3.5)):
        raw = random_bits(name, n, seed)
        want = MOMENTS | host_kernel.want_below(limit)
        out, plain = (np.full(rows.WORDS, 7.0) for _ in range(2))
        host_kernel.reduce(raw.ctypes.data, n, code, out.ctypes.data, want, 0)
        host_kernel.reduce(raw.ctypes.data, n, code, plain.ctypes.data, 0, 0)
        with np.errstate(invalid="ignore"):
            values = [float(v) for v in host_kernel.real_values(raw, code).astype(np.float64)]
        finite = [v for v in values if math.isfinite(v)]
        assert out.view(np.int64)[rows.BELOW] == sum(abs(v) < limit for v in values)
        np.testing.assert_allclose(out[rows.SUM4], math.fsum(v**4 for v in finite), rtol=1e-12)
        np.testing.assert_allclose(
            out[rows.SUM3], math.fsum(v**3 for v in finite), rtol=1e-12, atol=1e-13 * math.fsum(abs(v) ** 3 for v in finite)
        )
        assert out.view(np.int64)[rows.FLAGS] == plain.view(np.int64)[rows.FLAGS] | rows.HAS_MOMENTS | rows.HAS_BELOW
        assert out.view(np.int64)[:12].tolist() == plain.view(np.int64)[:12].tolist()
        assert plain.view(np.int64)[13:].tolist() == [0, 0, 0]


@pytest.mark.usefixtures("isa")
def test_the_limit_is_strict_and_exact_for_every_width() -> None:
    """What is just below the limit is counted and the limit itself is not, also when float32 cannot hold the limit."""
    for limit in (1.0, 0.1, 1e-45, math.nextafter(2.0**-134, 1), 3e38, 5e-324):
        want = host_kernel.want_below(limit)
        wide = np.array([limit, -limit, math.nextafter(limit, 0), np.nan, np.inf, -np.inf])
        narrow = wide.astype(np.float32)
        for x in (wide, narrow, np.repeat(wide, 9), np.repeat(narrow, 9)):
            expected = sum(abs(float(v)) < limit for v in x)
            assert rows.as_int64(row_of(x, want))[0, rows.BELOW] == expected


@pytest.mark.usefixtures("isa")
def test_strided_memory_has_the_moments_of_a_packed_copy() -> None:
    """Cut and transposed memory gives the words of its packed copy."""
    x = np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32)
    want = MOMENTS | host_kernel.want_below(0.5)
    for view in (x.T, x[::2, 1:60:3], x[:, :5]):
        out = rows.empty(1)
        host_kernel.reduce_strided(view.ctypes.data, view.shape, tuple(s // 4 for s in view.strides), 0, out.ctypes.data, want, 0)
        packed = row_of(view, want)
        assert rows.as_int64(out)[0, rows.BELOW] == rows.as_int64(packed)[0, rows.BELOW]
        np.testing.assert_allclose(out[0, 13:15], packed[0, 13:15], rtol=1e-12)


FLOATS = st.lists(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100) | st.sampled_from([math.nan, math.inf, 0.0]), max_size=40)


@given(values=FLOATS, cut=st.integers(0, 40), as_zeros=st.booleans())
def test_merge_of_parts_is_the_row_of_the_whole(values: list[float], cut: int, as_zeros: bool) -> None:
    """Wherever a tensor is cut, the moments, counts and flags of the merged rows are those of the whole."""
    x = np.array(values, np.float32)
    want = MOMENTS | host_kernel.want_below(1.0, as_zeros=as_zeros)
    merged, whole = rows.merge(row_of(x[:cut], want), row_of(x[cut:], want)), row_of(x, want)
    for word in (rows.BELOW, rows.FLAGS):
        assert rows.as_int64(merged)[0, word] == rows.as_int64(whole)[0, word]
    np.testing.assert_allclose(merged[0, rows.SUM4], whole[0, rows.SUM4], rtol=1e-12)
    np.testing.assert_allclose(merged[0, rows.SUM3], whole[0, rows.SUM3], rtol=1e-9, atol=1e-9 * np.abs(whole[0, rows.SUM4]) ** 0.75)


def test_merge_with_a_row_that_lacks_the_words() -> None:
    """A union has moments and counts only when both sides have them; bits of a checksum are never added to a sum; an empty side
    takes nothing away."""
    x = np.arange(1.0, 9.0, dtype=np.float32)
    full, bare, crc = row_of(x, MOMENTS | host_kernel.want_below(3.0)), row_of(x, 0), row_of(x, host_kernel.WANT_CRC | host_kernel.WANT_XOR)
    for other in (bare, crc):
        for merged in (rows.merge(full, other), rows.merge(other, full)):
            assert rows.as_int64(merged)[0, rows.FLAGS] == rows.WRITTEN
            assert rows.as_int64(merged)[0, 13:].tolist() == [0, 0, 0]
    for merged in (rows.merge(full, rows.empty(1)), rows.merge(rows.empty(1), full)):
        assert rows.as_int64(merged)[0, 12:].tolist() == rows.as_int64(full)[0, 12:].tolist()


def reference_kurtosis(x: np.ndarray) -> float:
    """Two passes with exact sums."""
    values = [float(v) for v in x]
    mean = math.fsum(values) / len(values)
    second = math.fsum((v - mean) ** 2 for v in values) / len(values)
    return math.fsum((v - mean) ** 4 for v in values) / len(values) / second**2


@given(seed=st.integers(0, 2**31), n=st.integers(50, 3000), q=st.sampled_from([0.0, 1.0, 10.0, 100.0, 600.0]), scale=st.integers(-60, 60))
def test_kurtosis_keeps_the_promised_precision(seed: int, n: int, q: float, scale: int) -> None:
    """The error against two exact passes is what the head of rows.py says, times ten, for any scale."""
    x = (np.random.default_rng(seed).standard_normal(n) + q) * 2.0**scale
    got = rows.read_row(row_of(x, MOMENTS)[0]).kurtosis
    assert got == pytest.approx(reference_kurtosis(x), rel=5e-14 * max(1.0, q * 1.3) ** 4)


def test_kurtosis_without_meaning_is_nan() -> None:
    """Constant tensors, means of more than a thousand deviations, NaN, Inf, overflow and rows without moments have none."""
    noise = np.random.default_rng(0).standard_normal(1000)
    for x in (
        np.full(100, 0.1),
        np.zeros(5),
        noise + 1e5,
        np.full(10, 1e200) * noise[:10],
        np.append(noise, np.nan),
        np.append(noise, np.inf),
    ):
        row = row_of(x, MOMENTS)
        found = rows.read_row(row[0]).kurtosis
        assert found is not None
        assert math.isnan(found)
        assert np.isnan(columns.column(row, "kurtosis")[0])
    bare = row_of(noise, 0)
    assert rows.read_row(bare[0]).kurtosis is None
    assert np.isnan(columns.column(bare, "kurtosis")[0])


@pytest.mark.parametrize(("dtype", "smallest"), [("bfloat16", 2.0**-133), ("float16", 2.0**-24), ("float8_e4m3fn", 2.0**-9)])
def test_underflow_limits_hold_at_the_tie(dtype: str, smallest: float) -> None:
    """Half of the smallest number is a tie that rounds to zero: it underflows, the next float32 does not; zeros are not counted."""
    tie = np.float32(smallest / 2)
    x = np.array([tie, -tie, np.nextafter(tie, np.float32(1)), smallest, 0.0, -0.0, 1.0, np.float32(1e-45)], np.float32)
    row = row_of(x, host_kernel.want_below(rows.underflow_limit(dtype)))
    assert columns.column(row, "underflow")[0] == 3 / 8
    assert columns.column(row, "zeros")[0] == 2 / 8
    assert np.isnan(columns.column(row_of(x, 0), "underflow")[0])


def test_eps_makes_small_numbers_count_as_zeros() -> None:
    """A limit that stands for zeros changes `zeros` and leaves `underflow` without a value; the word ZEROS stays exact."""
    row = row_of(np.array([0.0, 1e-9, -1e-9, 1.0], np.float32), host_kernel.want_below(1e-8, as_zeros=True))
    assert columns.column(row, "zeros")[0] == 0.75
    assert np.isnan(columns.column(row, "underflow")[0])
    assert rows.read_row(row[0]).zeros == 1
    assert rows.read_row(row[0]).below == 3


def test_absmax_propagates_nan_and_inf() -> None:
    """The largest absolute value, as abs().max() of the tensor, in columns and in single rows."""
    for values, expected in (([-3.0, 2.0], 3.0), ([np.nan, 1.0], np.nan), ([-np.inf, 1.0], np.inf), ([0.0], 0.0)):
        row = row_of(np.array(values, np.float32), 0)
        for got in (columns.column(row, "absmax")[0], rows.read_row(row[0]).absmax):
            assert got == expected or (math.isnan(expected) and math.isnan(got))
    assert rows.read_row(rows.empty(1)[0]).absmax is None


def test_wrong_limits_are_refused() -> None:
    """A limit of zero or NaN, and a type that nothing underflows in, are errors that say what is allowed."""
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(UsageError, match="above 0"):
            host_kernel.want_below(limit)
    with pytest.raises(UsageError, match="bfloat16, float16"):
        rows.underflow_limit("float32")
