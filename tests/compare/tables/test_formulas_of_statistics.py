"""Formulas and printed forms of statistics mode, for any numbers and arguments (hypothesis)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.measure.columns import DIFFERENCES, RELATIVE, UNMATCHED
from msprobe_engine.measure.statistics_mode import Shown, differences, number, pair_new, pair_old, read_old

FLOATS = st.floats(allow_subnormal=False)
FINITE = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)
CELLS = st.one_of(
    FLOATS, st.integers(-(10**18), 10**18), st.booleans(), st.sampled_from(["Nan", "None", "cpu", "npu:0", "mean", "inf", "3"])
)


def _shown(value: float) -> Shown:
    cell = "Nan" if math.isnan(value) else value
    return Shown([[cell]] * 4, np.full((1, 4), value), np.ones(1, bool))


@pytest.mark.parametrize(("old", "single"), [(True, pair_old), (False, pair_new)])
@given(x=FLOATS, y=FLOATS)
def test_whole_columns_and_single_cells_agree(old: bool, single: Any, x: float, y: float) -> None:
    """Rows of floats are computed column-wise, all others one by one; both give the same cells."""
    found = differences(_shown(x), _shown(y), np.ones(1, bool), old)
    expected = single(*("Nan" if math.isnan(v) else v for v in (x, y)))
    for k in range(4):
        assert (str(found.columns[DIFFERENCES[k]][0]), found.columns[RELATIVE[k]][0]) == tuple(str(cell) for cell in expected)


@given(x=CELLS, y=CELLS)
def test_old_cells_are_numbers_or_say_why_not(x: Any, y: Any) -> None:
    """8.1.1: a number and a percentage; ``Nan`` with a NaN; ``N/A`` with a golden 0 or what is no number."""
    difference, relative = pair_old(x, y)
    a, b = number(x), number(y)
    if a is None or b is None:
        assert (difference, relative) == (UNMATCHED, UNMATCHED)
    elif math.isnan(a) or math.isnan(b):
        assert (difference, relative) == ("Nan", "Nan")
    elif difference != "Nan":
        assert isinstance(difference, float)
        assert relative == UNMATCHED if b == 0 else relative.endswith("%")


@given(x=CELLS, y=CELLS)
def test_new_cells_of_equal_texts_are_zero(x: Any, y: Any) -> None:
    """26.2.0: ``0`` for equal text; else numbers, ``inf``, ``-inf``, ``Nan``, ``N/A`` or ``Diff``, always as text."""
    difference, relative = pair_new(x, y)
    if str(x) == str(y):
        assert (difference, relative) == ("0", "0")
    else:
        assert difference in ("inf", "-inf", "Nan", UNMATCHED, "Diff") or math.isfinite(float(difference)) or math.isinf(float(difference))
        assert relative in ("inf", "-inf", "Nan", UNMATCHED, "Diff") or relative.endswith("%")


@given(x=FINITE)
def test_old_reader_is_off_by_little(x: float) -> None:
    """pandas 2.0 reads a number to within what its 17 digits, leading zeros among them, can say."""
    lost = 10.0 ** -(
        16 - len(repr(abs(x)).split("e")[0].replace(".", "")[:5]) + len(repr(abs(x)).split("e")[0].replace(".", "")[:5].lstrip("0"))
    )
    assert read_old(repr(x)) == pytest.approx(x, rel=max(lost, 4e-16) * 10, abs=0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.034899115562438965", 0.0348991155624389), ("-1.5", -1.5), ("3", 3.0), ("1e+300", 1e300), ("1e-05", 1e-5), ("0.0", 0.0)],
)
def test_old_reader_counts_leading_zeros_as_digits(text: str, value: float) -> None:
    """Examples, with what pandas 2.0.3 gives."""
    assert read_old(text) == value


@pytest.mark.parametrize(
    ("x", "y", "cells"),
    [
        (float("inf"), 1.0, ("inf", "inf")),
        (1.0, float("inf"), ("-inf", "-inf")),
        (1.0, -float("inf"), ("inf", "inf")),
        (float("inf"), -float("inf"), ("inf", "inf")),
        (-float("inf"), float("inf"), ("-inf", "-inf")),
        ("Nan", 1.0, ("Nan", "Nan")),
        (1.0, 0.0, ("1.0", "inf")),
        ("cpu", "npu:0", (UNMATCHED, UNMATCHED)),
        ("cpu", 1.0, ("Diff", "Diff")),
        (True, False, ("Diff", "Diff")),
        (True, 1, ("Diff", "Diff")),
        ("sum", "mean", ("Diff", "Diff")),
        (8, 8.0, ("0.0", "0.0%")),
    ],
)
def test_new_rules(x: Any, y: Any, cells: tuple[str, str]) -> None:
    """Each rule of 26.2.0 once."""
    assert pair_new(x, y) == cells
