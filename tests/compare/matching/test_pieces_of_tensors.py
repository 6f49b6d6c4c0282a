"""Pieces of one tensor on both sides, cut in different ways and held several times: the whole is found whatever the order of the ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.parallel import merge_statistics
from msprobe_engine.align.parallel.merge_statistics import Floats


def stats(array: np.ndarray) -> list[float]:
    return [array.max(), array.min(), array.mean(), float(np.sqrt((array**2).sum()))]


def pieces(whole: np.ndarray, rows: int, columns: int, copies: int, neighbours: bool) -> tuple[Floats, list[int]]:
    """Statistics of the pieces of all ranks, and the shape of one."""
    parts = [column for row in np.split(whole, rows, 0) for column in np.split(row, columns, 1)]
    held = [part for part in parts for _ in range(copies)] if neighbours else parts * copies
    return np.array([stats(part) for part in held]), list(parts[0].shape)


@given(*(st.sampled_from([1, 2, 4]) for _ in range(4)), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans(), st.integers(0, 99))
def test_wholes_agree(a: int, b: int, c: int, d: int, copies: int, others: int, neighbours: bool, seed: int) -> None:
    """Two ways to cut one tensor give the same whole, with the number of pieces that make it."""
    whole = np.random.default_rng(seed).standard_normal((8, 8))
    target, shape = pieces(whole, a, b, copies, neighbours)
    golden, there = pieces(whole, c, d, others, neighbours)
    made = merge_statistics.together(target, shape, golden, there)
    if made is None or made.value is None or made.golden is None:
        # pieces that cannot be told from parts of a sum: no shape and no replica says how they lie together
        assert min(a, c) > 1 or min(b, d) > 1
        return
    np.testing.assert_allclose(made.value, made.golden, rtol=1e-9, atol=1e-9)
    assert np.prod(made.shape) == made.need * np.prod(shape) == made.other * np.prod(there)


@given(st.integers(0, 99), st.integers(1, 8), st.sampled_from([1, 2]))
def test_filled_up(seed: int, extra: int, cut: int) -> None:
    """Rows of zeros at the end of a table, cut or not, are no difference; another element is."""
    table = np.random.default_rng(seed).standard_normal((30, 4))
    longer = np.concatenate([table, np.zeros((extra + (extra + 30) % cut, 4))])
    ranks = np.array([stats(part) for part in np.split(longer, cut)])
    found = merge_statistics.filled_up(ranks, [len(longer) // cut, 4], np.array([stats(table)]), [30, 4])
    assert found is not None
    assert found.value is not None
    assert found.golden is not None
    np.testing.assert_array_equal(found.value, found.golden)
    assert found.shape == [30, 4]
    other = np.array([stats(part) for part in np.split(longer * 0.9, cut)])
    found = merge_statistics.filled_up(other, [len(longer) // cut, 4], np.array([stats(table)]), [30, 4])
    assert found is None or found.value is None or found.golden is None or merge_statistics.distance(found.value, found.golden) > 0.05


def test_parts_of_a_sum_are_no_pieces() -> None:
    """Parts on one side and replicas on the other: the side that is known stands, the other has no whole."""
    whole = np.random.default_rng(1).standard_normal((4, 4))
    part = np.random.default_rng(2).standard_normal((4, 4))
    parts = np.array([stats(part), stats(whole - part)])
    made = merge_statistics.together(parts, [4, 4], np.array([stats(whole)] * 2), [4, 4])
    assert made is not None
    assert made.value is None
    assert made.sure
