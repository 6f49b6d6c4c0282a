"""Whole columns of statistics rows."""

from __future__ import annotations

import math

import numpy as np
from frames_of_lists import row_of
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.statistics import rows as _rows
from msprobe_engine.core.statistics.columns import absmax, column, digests, exact_integers, integer_bounds

VALUES = st.lists(st.lists(st.floats(width=32), max_size=5), max_size=8)


@given(VALUES)
def test_columns_are_what_read_says_row_by_row(tensors: list[list[float]]) -> None:
    """Every column holds the value of `rows.read_row`, and NaN where that gives None."""
    rows = np.concatenate([row_of(t) for t in tensors]) if tensors else _rows.empty(0)
    for op in ("norm", "min", "max", "mean", "rms"):
        wanted = [getattr(_rows.read_row(row), op) for row in rows]
        np.testing.assert_array_equal(column(rows, op), [math.nan if w is None else w for w in wanted])
    read = [_rows.read_row(row) for row in rows]
    assert column(rows, "nans").tolist() == [s.nans for s in read]
    assert column(rows, "infs").tolist() == [s.infs for s in read]
    np.testing.assert_array_equal(column(rows, "zeros"), [s.zeros / s.count if s.count else math.nan for s in read])
    finite = [[abs(v) for v in t if math.isfinite(v)] for t in tensors]
    assert absmax(rows).tolist() == [max(f, default=0.0) for f in finite]


def test_digest_and_exact_integers() -> None:
    """Digests are 16 hexadecimal digits where they exist; integers above 2**53 stay exact."""
    rows = np.concatenate([row_of([1.0], digest=255), row_of([1.0])])
    ints = _rows.as_int64(rows)
    ints[1, _rows.FLAGS] |= _rows.HAS_INTEGERS
    ints[1, _rows.IMAX] = 2**53 + 1
    assert digests(rows) == ["00000000000000ff", ""]
    assert exact_integers(rows).tolist() == [False, True]
    assert integer_bounds(rows)[1][1] == 2**53 + 1
