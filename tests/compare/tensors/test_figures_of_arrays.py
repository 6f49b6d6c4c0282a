"""Figures of how two arrays differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from msprobe_engine.measure.tensors import arrays
from msprobe_engine.measure.tensors.arrays import Difference, difference


def test_figures() -> None:
    """Equal share, first unequal index, errors and shares within tolerances of a small example."""
    a = np.array([[1.0, 2.0], [3.0, 100.0]])
    b = np.array([[1.0, 2.001], [3.0, 101.0]])
    found = difference(a, b)
    assert (found.same, found.first) == (50.0, 1)
    assert found.absolute == pytest.approx(1.0)
    assert found.relative == pytest.approx(1 / 101)
    assert (found.within_thousandth, found.within_hundredth) == (75.0, 100.0)


@pytest.mark.parametrize(
    ("a", "b", "same", "absolute", "relative"),
    [
        ([math.nan], [math.nan], 100.0, 0.0, 0.0),
        ([math.nan], [1.0], 0.0, math.inf, math.inf),
        ([math.inf], [math.inf], 100.0, 0.0, 0.0),
        ([math.inf], [-math.inf], 0.0, math.inf, math.inf),
        ([math.inf], [3.0], 0.0, math.inf, math.inf),
        ([0.0], [-0.0], 100.0, 0.0, 0.0),
        ([0.0], [2.0], 0.0, 2.0, 1.0),
        ([True], [False], 0.0, 1.0, 1.0),
        ([1 + 1j], [1 - 1j], 0.0, 2.0, math.sqrt(2.0)),
        ([2**53], [2**53 + 1], 0.0, 1.0, 2.0**-53),
        ([1e300], [-1e300], 0.0, 2e300, 2.0),
    ],
)
def test_special_values(a: list[Any], b: list[Any], same: float, absolute: float, relative: float) -> None:
    """NaN against NaN is equal; what is finite on one side only is an infinite error; large integers differ by what they differ."""
    found = difference(np.array(a), np.array(b))
    assert found.same == same
    assert found.absolute == pytest.approx(absolute)
    assert found.relative == pytest.approx(relative)
    assert found.first == (None if same else 0)


def test_shapes_that_differ() -> None:
    """The part both have is compared, flat when the number of dimensions differs; without elements there are no figures."""
    assert difference(np.ones((2, 3)), np.ones((3, 2))).same == 100.0
    assert difference(np.arange(6).reshape(2, 3), np.arange(4)).same == 100.0
    assert difference(np.ones((0, 3)), np.ones((2, 3))) == Difference(None, None, None, None, None, None)


@given(hnp.arrays(np.float32, st.integers(1, 50)), st.data())
def test_any_part_gives_the_whole(a: Any, data: Any) -> None:
    """Looking at the elements in parts of any size gives the same figures as at once."""
    b = data.draw(hnp.arrays(np.float32, a.shape))
    whole = difference(a, b)
    old, arrays._CHUNK = arrays._CHUNK, data.draw(st.integers(1, 7))
    try:
        parts = difference(a, b)
    finally:
        arrays._CHUNK = old
    assert parts == whole
    assert whole.same is not None
    assert 0.0 <= whole.same <= 100.0
