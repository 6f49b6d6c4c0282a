"""The statistics row: reading and merging."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msprobe_engine.core.statistics import host_kernel, rows
from msprobe_engine.core.statistics.digest import digest_array

FLOATS = hnp.arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32))


def row_of(x: np.ndarray, index0: int = 0) -> rows.Rows:
    out = rows.empty(1)
    host_kernel.reduce_into(out, 0, x, digest=True, index0=index0)
    return out


@given(x=FLOATS, cut=st.integers(0, 70))
def test_merge_of_parts_is_the_row_of_the_whole(x: np.ndarray, cut: int) -> None:
    """Merging the rows of two parts, digests with global positions, gives the row of the whole."""
    cut = min(cut, x.size)
    merged, whole = rows.merge(row_of(x[:cut]), row_of(x[cut:], cut)), row_of(x)
    assert (rows.as_int64(merged)[:, [0, 1, 2, 3, 4, 5, 12]] == rows.as_int64(whole)[:, [0, 1, 2, 3, 4, 5, 12]]).all()
    assert (merged[:, 6:8] == whole[:, 6:8]).all()
    scale = np.abs(np.where(np.isfinite(x), x, 0).astype(np.float64)).sum()
    np.testing.assert_allclose(merged[:, 8], whole[:, 8], rtol=1e-12, atol=1e-12 * scale)
    np.testing.assert_allclose(merged[:, 9], whole[:, 9], rtol=1e-12)


@given(x=FLOATS)
def test_empty_is_the_neutral_element(x: np.ndarray) -> None:
    """Merging with an empty row changes nothing."""
    row = row_of(x)
    for merged in (rows.merge(rows.empty(1), row), rows.merge(row, rows.empty(1))):
        assert (rows.as_int64(merged)[:, 6:] == rows.as_int64(row)[:, 6:]).all() or x.size == 0
        assert rows.read_row(merged[0])[:4] == rows.read_row(row[0])[:4]


@given(x=FLOATS.filter(lambda a: a.size > 0))
def test_reading_propagates_nan_and_inf_as_numpy_does(x: np.ndarray) -> None:
    """max, min, mean and norm are those of numpy in float64; finite_* leave NaN and Inf out."""
    s = rows.read_row(row_of(x)[0])
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        expected = (wide.max(), wide.min(), wide.mean(), np.sqrt(np.square(wide).sum()))
    for got, want in zip((s.max, s.min, s.mean, s.norm), expected):
        assert got is not None
        np.testing.assert_allclose(float(got), want, rtol=1e-10, atol=1e-10 * np.abs(np.where(np.isfinite(wide), wide, 0)).max())
    finite = wide[np.isfinite(wide)]
    assert s.finite_max == (finite.max() if finite.size else None)
    assert s.finite_min == (finite.min() if finite.size else None)
    assert s.nonfinite == x.size - finite.size
    assert s.zeros == (x == 0).sum()
    assert s.digest == digest_array(x)


def test_integers_are_exact() -> None:
    """Largest and smallest integers above 2**53 are read exactly, not through float64."""
    s = rows.read_row(row_of(np.array([2**53 + 1, -(2**62) - 1], np.int64))[0])
    assert (s.max, s.min) == (2**53 + 1, -(2**62) - 1)


def test_no_elements_has_nothing_to_say() -> None:
    """An empty tensor has count 0 and no max, min, mean or norm; rms of ones is 1."""
    s = rows.read_row(row_of(np.empty(0, np.float32))[0])
    assert s[:8] == (0, 0, 0, 0, None, None, None, None)
    assert math.isclose(rows.read_row(row_of(np.ones(9, np.float32))[0]).rms or 0, 1.0)
