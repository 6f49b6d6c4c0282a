"""Rows made of two tensors, and histograms: the C kernel against slow float64 references."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import histograms, host_kernel, pairs, rows

FLOATS = ("float32", "float64", "float16", "bfloat16")
TYPES = list(itertools.product(FLOATS, FLOATS))
ADAM = (1.0 / (1 - 0.9**3), (1 - 0.999**3) ** -0.5, 1e-8)


def raw_of(x: np.ndarray, name: str) -> np.ndarray:
    """`x` (float64) cut to the type `name`, as the bytes the kernel reads."""
    with np.errstate(over="ignore"):
        if name == "bfloat16":
            return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return x.astype(name).view(np.uint8)


def data(seed: int, n: int, name: str, special: float = 0.1) -> np.ndarray:
    """Normal numbers, a share of them zeros of both signs, NaN, Inf and subnormals."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(n) * 0.1
    chosen = random.random(n) < special
    x[chosen] = random.choice([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42, -1e-42, 6e-8], int(chosen.sum()))
    return raw_of(x, name)


def row_of(op: int, a: np.ndarray, name_a: str, b: np.ndarray, name_b: str, c: pairs.Constants, want: int = 0) -> np.ndarray:
    """The row the kernel writes."""
    out = np.full(rows.WORDS, 7.0)
    code_a, code_b = host_kernel.CODES[name_a], host_kernel.CODES[name_b]
    n = a.size // host_kernel.ITEMSIZE[code_a]
    pairs.reduce(op, a.ctypes.data, code_a, b.ctypes.data, code_b, n, out.ctypes.data, want, c)
    return out


def slow(op: int, a: float, b: float, c: pairs.Constants) -> float:
    """One value, by the words of the definition."""
    if math.isnan(a) or math.isnan(b):
        return math.nan
    if op == pairs.AGREE:
        return 0.5 if a == 0 or b == 0 else float((a > 0) == (b > 0))
    if op == pairs.RATIO:
        if b < 0:
            return math.nan
        divisor = math.sqrt(b) * c[1] + c[2]
        return a * c[0] * 0 if divisor == 0 else a * c[0] / divisor if math.isfinite(divisor) or math.isfinite(a) else math.nan
    total = c[0] * a + c[1] * b
    return total if op == pairs.LINEAR or math.isnan(total) else float(np.sign(total))


def check(op: int, a: np.ndarray, name_a: str, b: np.ndarray, name_b: str, c: pairs.Constants) -> None:
    """The row is that of the slow values: counts exactly (where float32 may not round to zero or infinity), sums to 1e-6."""
    want = host_kernel.WANT_MOMENTS | host_kernel.want_below(0.75)
    got = row_of(op, a, name_a, b, name_b, c, want)
    x, y = (host_kernel.decode(raw, host_kernel.CODES[name]).astype(np.float64) for raw, name in ((a, name_a), (b, name_b)))
    values = np.array([slow(op, float(p), float(q), c) for p, q in zip(x, y)])
    finite, cell = values[np.isfinite(values)], str((op, name_a, name_b, c, values.size))
    counts = [values.size, np.isnan(values).sum(), (values == np.inf).sum(), (values == -np.inf).sum(), (values == 0).sum(), 0]
    assert got.view(np.int64)[:6].tolist() == counts, cell
    assert got.view(np.int64)[rows.FLAGS] == rows.WRITTEN | rows.HAS_MOMENTS | rows.HAS_BELOW, cell
    assert got.view(np.int64)[rows.BELOW] == (np.abs(values) < 0.75).sum(), cell
    scale = np.abs(finite).sum() * 1e-6
    np.testing.assert_allclose(got[rows.SUM], finite.sum(), rtol=1e-6, atol=scale, err_msg=cell)
    np.testing.assert_allclose(got[[rows.SUMSQ, rows.SUM4]], [(finite**2).sum(), (finite**4).sum()], rtol=2e-6, err_msg=cell)
    if finite.size:
        np.testing.assert_allclose(got[[rows.MIN, rows.MAX]], [finite.min(), finite.max()], rtol=1e-6, err_msg=cell)


@pytest.mark.usefixtures("isa")
def test_signs_that_agree() -> None:
    """Agreement is by sign, zeros of either sign are half, NaN stays NaN, subnormals have a sign; for every pair of types."""
    for name_a, name_b in TYPES:
        for n, seed in ((0, 0), (1, 1), (40, 2), (2100, 3)):
            a, b = data(seed, n, name_a), data(seed + 9, n, name_b)
            check(pairs.AGREE, a, name_a, b, name_b, (0.0, 0.0, 0.0))


@pytest.mark.usefixtures("isa")
def test_linear_and_signs() -> None:
    """Weighted sums and their signs, for every pair of types."""
    for name_a, name_b in TYPES:
        for n, seed in ((0, 0), (1, 1), (33, 2), (2100, 3)):
            a, b = data(seed, n, name_a, 0.02), data(seed + 9, n, name_b, 0.02)
            for c in ((1.0, 0.9, 0.0), (0.09, 0.91, 0.0), (-1.0, 0.0, 0.0)):
                for op in (pairs.LINEAR, pairs.SIGN):
                    check(op, a, name_a, b, name_b, c)


@pytest.mark.usefixtures("isa")
def test_ratios() -> None:
    """Adam's update and ratio, zero where the divisor is zero, NaN of negative second moments; for every pair of types."""
    random = np.random.default_rng(0)
    for n in (0, 1, 17, 2100):
        m, v = random.standard_normal(n) * 0.1, np.square(random.standard_normal(n)) * 0.01 + 1e-3
        m[::7], v[::7] = 0.0, 0.0
        v[3::50], v[4::50], m[5::50] = 0.0, -1.0, np.nan
        for (name_a, name_b), c in itertools.product(TYPES, (ADAM, (*ADAM[:2], 0.0))):
            check(pairs.RATIO, raw_of(m, name_a), name_a, raw_of(v, name_b), name_b, c)


@given(n=st.integers(0, 200), cut=st.integers(0, 200), op=st.sampled_from([0, 1, 2, 3]), seed=st.integers(0, 2**31))
def test_rows_of_shards_merge_to_that_of_the_whole(n: int, cut: int, op: int, seed: int) -> None:
    """Wherever both tensors are cut, the merged row has the counts of the whole, and its sums to rounding."""
    a, b = data(seed, n, "float32").view(np.float32), np.abs(data(seed + 1, n, "float32").view(np.float32))

    def row(part: slice) -> np.ndarray:
        x, y = a[part].copy().view(np.uint8), b[part].copy().view(np.uint8)
        return row_of(op, x, "float32", y, "float32", (1.1, 1.2, 1e-3), host_kernel.WANT_MOMENTS)[None]

    merged, whole = rows.merge(row(slice(0, cut)), row(slice(cut, None))), row(slice(None))
    assert rows.as_int64(merged)[0, [0, 1, 2, 3, 4, 12]].tolist() == rows.as_int64(whole)[0, [0, 1, 2, 3, 4, 12]].tolist()
    np.testing.assert_allclose(merged[0, [9, 14]], whole[0, [9, 14]], rtol=1e-9)


def test_calls_that_cannot_be_right_are_refused() -> None:
    """The kernel names what it was given: a type without pairs, a null address."""
    kernel = pytest.importorskip("msprobe_engine.native._rowstats")
    out, x = np.zeros(16), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="float32, float64, float16 and bfloat16"):
        kernel.reduce_pair(0, x.ctypes.data, host_kernel.CODES["int8"], x.ctypes.data, 0, 4, out.ctypes.data, 0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="null pointer"):
        kernel.reduce_pair(0, x.ctypes.data, 0, 0, 0, 4, out.ctypes.data, 0, 0.0, 0.0, 0.0)
    with pytest.raises(UsageError, match="linear, log2"):
        histograms.bins("log3")


def slow_bin(x: float, kind: str) -> int | None:
    """The bin of one value, by the words of the definition."""
    if kind == "linear":
        return min(math.floor(x * 15.0) + 15, 29) if abs(x) <= 1.0 else None
    if x == 0 or not math.isfinite(x):
        return None
    return min(max(math.frexp(x)[1] - 1 + 40, 0), 49)


@pytest.mark.usefixtures("isa")
def test_histograms_of_every_type() -> None:
    """Every element is in the bin of the definition, or in none; for every type, with edges, NaN, Inf and subnormals."""
    for name, kind in itertools.product(host_kernel.NAMES, histograms.BINS):
        code = host_kernel.CODES[name]
        if name in FLOATS:
            edges = histograms.edges(kind)
            x = np.concatenate(
                [edges, -edges, np.nextafter(edges, 0), np.nextafter(edges, 9), [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-42, 1e30]]
            )
            raw = np.concatenate([raw_of(x, name), data(5, 3000, name)])
        else:
            raw = np.random.default_rng(3).integers(0, 256, 2100 * host_kernel.ITEMSIZE[code], np.uint8)
            raw = raw % 2 if name == "bool" else raw
        n = raw.size // host_kernel.ITEMSIZE[code]
        with np.errstate(invalid="ignore"):
            values = host_kernel.real_values(raw, code).astype(np.float64)
        expected = np.zeros(histograms.bins(kind), np.int64)
        for value in values.tolist():
            place = slow_bin(value, kind) if not math.isnan(value) else None
            if place is not None:
                expected[place] += 1
        found = histograms.count(raw.ctypes.data, (n,), (1,), code, kind)
        assert found.tolist() == expected.tolist(), (name, kind)
        assert histograms.count(0, (0,), (1,), code, kind).tolist() == [0] * len(expected)


@pytest.mark.usefixtures("isa")
def test_histograms_of_strided_memory() -> None:
    """Cut and transposed memory is counted by its elements."""
    x = np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32)
    for view in (x.T, x[::2, 1:60:3], x[:, :5], x[:1, :1]):
        strides = tuple(s // 4 for s in view.strides)
        for kind in histograms.BINS:
            assert histograms.count(view.ctypes.data, view.shape, strides, 0, kind).tolist() == histograms.count_values(view, kind).tolist()


@given(x=st.lists(st.floats(width=32), max_size=60), cut=st.integers(0, 60), kind=st.sampled_from(list(histograms.BINS)))
def test_histograms_merge_as_rows(x: list[float], cut: int, kind: str) -> None:
    """The merge of the rows of two parts holds the counts of the whole, whose sum is at most the number of elements."""
    whole = np.array(x, np.float32)

    def made(part: np.ndarray) -> rows.Rows:
        return histograms.to_rows(histograms.count_values(part, kind), part.size)

    merged = rows.merge(made(whole[:cut]), made(whole[cut:]))
    assert len(merged) == histograms.row_count(kind)
    found = histograms.counts(np.concatenate([rows.empty(3), merged]), 3, kind)
    assert found.tolist() == histograms.count_values(whole, kind).tolist()
    assert found.sum() <= whole.size == rows.as_int64(merged)[0, rows.COUNT]


def test_edges() -> None:
    """Edges ascend and are one more than the bins; a value at the lower edge of a bin is in it."""
    for kind, n in histograms.BINS.items():
        edges = histograms.edges(kind)
        assert len(edges) == n + 1
        assert (np.diff(edges) > 0).all()
    assert histograms.count_values(histograms.edges("log2")[:-1], "log2").tolist() == [1] * 50
    assert histograms.reference(7, "linear") == {"row": 7, "kind": "linear", "bins": 30}
