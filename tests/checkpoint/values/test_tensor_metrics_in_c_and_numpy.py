"""The sums of a pair of tensors: the C kernel and numpy say the same, and both what numpy says of the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.formats.tensors.decoding import decoder, word_type
from msprobe_engine.measure.stored.tensors import available, differences, in_numpy

TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int64", "uint8", "bool", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
WITH_NUMPY_ALONE = ("complex64", "complex128", "float4_e2m1fn_x2", "qint8")


def _words(data: st.DataObject, dtype: str, n: int) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    width = word_type(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, n).astype(np.uint8)
    raw = np.frombuffer(rng.bytes(n * width.itemsize), width).copy()
    if dtype in ("float32", "float64", "float16", "bfloat16"):  # ordinary numbers, and now and then any bits at all
        values = rng.standard_normal(n)
        if dtype == "bfloat16":
            plain = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        else:
            plain = values.astype(dtype).view(width)
        wild = rng.random(n) < 0.01
        raw = np.where(wild, raw, plain)
    return raw


@given(st.data(), st.sampled_from(TYPES), st.sampled_from(TYPES), st.integers(0, 5000))
def test_the_kernel_and_numpy_agree(data: st.DataObject, dtype_a: str, dtype_b: str, n: int) -> None:
    """Counts, places and extremes are the same to the bit, sums up to the order of additions; for every pair of element types."""
    if not available:
        pytest.skip("the C kernel was not built")
    a = _words(data, dtype_a, n)
    b = a.copy() if dtype_a == dtype_b else _words(data, dtype_b, n)
    if n and dtype_a == dtype_b:
        for at in data.draw(st.lists(st.integers(0, n - 1), max_size=4)):
            b[at] ^= 1
    fast = differences(a, dtype_a, b, dtype_b, 1e-3, 1e-2)
    slow = in_numpy(a, dtype_a, b, dtype_b, 1e-3, 1e-2)
    for name in ("changed", "beyond", "nan_a", "inf_a", "nan_b", "inf_b", "unrounded"):
        assert getattr(fast, name) == getattr(slow, name), name
    assert (fast.max, fast.at) == (slow.max, slow.at)
    for name in ("dd", "ab", "aa", "bb"):
        x, y = getattr(fast, name), getattr(slow, name)
        if math.isfinite(x) or math.isfinite(y):  # squares beyond float64 are so on both
            exact = 1e-9 if name == "dd" else 1e-6  # norms of narrow types are summed as float32 within a chunk that is equal
            assert math.isclose(x, y, rel_tol=exact, abs_tol=exact * math.sqrt(fast.aa) * math.sqrt(fast.bb)), name


@pytest.mark.parametrize("dtype", WITH_NUMPY_ALONE)
def test_types_without_values_are_compared_by_their_bits(dtype: str) -> None:
    """Complex numbers and packed or quantized types go through numpy: every changed element counts."""
    rng = np.random.default_rng(0)
    width = word_type(dtype)
    a = np.frombuffer(rng.bytes(1000 * width.itemsize), width).copy()
    b = a.copy()
    b.view(np.uint8)[5 * width.itemsize] ^= 1
    sums = differences(a, dtype, b, dtype)
    assert sums.changed == 1
    assert (sums.dd == 0) == (decoder(dtype) is None or not np.isfinite(sums.dd) or sums.dd == 0)


def test_rounding_is_told_from_other_differences() -> None:
    """float32 beside its bfloat16 and its float16, rounded as torch does it, leaves nothing unrounded; one more bit does."""
    torch = pytest.importorskip("torch")
    values = torch.cat([torch.randn(3000), torch.randn(1000) * 1e-6, torch.tensor([65504.0, 65520.0, 1e30, math.inf, math.nan, 0.0, -0.0])])
    a = values.numpy().view(np.uint32)
    for name in ("bfloat16", "float16"):
        b = values.to(getattr(torch, name)).view(torch.int16).numpy().view(np.uint16).copy()
        for function in (differences, in_numpy):
            assert function(a, "float32", b, name).changed > 0
            assert function(a, "float32", b, name).unrounded == 0
            assert function(b, name, a, "float32").unrounded == 0
        b[7] ^= 1
        for function in (differences, in_numpy):
            assert function(a, "float32", b, name).unrounded == 1


def test_the_numbers_are_those_of_numpy() -> None:
    """l2, cos, relative norm and largest difference of a whole pair, added up over blocks, are those of numpy's float64."""
    rng = np.random.default_rng(1)
    a = rng.standard_normal(200_000).astype(np.float32)
    b = a + rng.standard_normal(a.size).astype(np.float32) * 1e-3
    total = differences(a[:0].view("u4"), "float32", b[:0].view("u4"), "float32")
    for first in range(0, a.size, 7777):
        total.add(differences(a[first : first + 7777].view("u4"), "float32", b[first : first + 7777].view("u4"), "float32"))
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert total.l2 == pytest.approx(np.linalg.norm(x - y), rel=1e-12)
    assert total.cos == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)
    assert total.rel_norm == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)
    assert total.max == np.abs(x - y).max()
    assert total.changed == np.count_nonzero(a != b)


def test_zeros_have_the_cosine_of_the_existing_tool() -> None:
    """Both all zeros: 1; one of them: none."""
    zero, one = np.zeros(10, np.uint32), np.ones(10, np.float32).view(np.uint32)
    assert differences(zero, "float32", zero, "float32").cos == 1.0
    assert differences(zero, "float32", one, "float32").cos is None
    assert differences(zero, "float32", one, "float32").rel_norm is None


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3)), min_size=1, max_size=20))
def test_integers_of_64_bits_are_compared_exactly(numbers: list[tuple[int, int]]) -> None:
    """Neighbours beyond 2^53 are not equal, within one type, of two types, and against float64; nor do they pass a tolerance below 1."""
    x = [a for a, _ in numbers]
    y = [min(max(a + d, -(2**63)), 2**63 - 1) for a, d in numbers]
    apart = [abs(a - b) for a, b in zip(x, y)]
    words = [np.array(v, np.int64).view(np.uint64) for v in (x, y)]
    found = differences(words[0], "int64", words[1], "int64", atol=0.5)
    assert (found.changed, found.beyond, found.max) == (sum(map(bool, apart)), sum(map(bool, apart)), max(apart))
    floats = np.array(x, np.int64).astype(np.float64)
    other = sum(int(f) != a for f, a in zip(floats.tolist(), x))
    assert differences(words[0], "int64", floats.view(np.uint64), "float64", atol=0.5).beyond == other
    wide = np.array([v % 2**64 for v in x], np.uint64)
    assert differences(words[0], "int64", wide, "uint64").changed == sum(v < 0 for v in x)
