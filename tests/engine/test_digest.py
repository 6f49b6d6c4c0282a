"""The position-weighted digest."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.errors import UsageError
from msprobe_engine.core.statistics import digest as d
from msprobe_engine.core.statistics import host_kernel, rows

M = (1 << 64) - 1


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
    return x ^ (x >> 31)


def by_definition(words: list[int], j0: int = 0) -> int:
    total = 0
    for j, b in enumerate(words, j0):
        total += ((b ^ 0x9E3779B9) * ((splitmix(0x6D7370726F626500 + j % 1024) >> 32) | 1)) * (splitmix(j // 1024) | 1)
    return total & M


@given(words=st.lists(st.integers(0, 2**32 - 1), max_size=40), j0=st.sampled_from([0, 1, 1000, 1023, 1024, 10**9]))
def test_numpy_version_is_the_definition(words: list[int], j0: int) -> None:
    """`digest_array` gives the sum written in the module text, for any start index."""
    assert d.digest_array(np.array(words, np.uint32), j0) == by_definition(words, j0)


def test_known_values_do_not_change() -> None:
    """The digest of given bits is part of the dump format: these values stay."""
    assert d.digest_array(b"") == 0
    assert splitmix(0) == 0xE220A8397B1DCDAF  # first output of the published generator for seed 0
    assert d.digest_array(np.arange(3000, dtype=np.float32)) == by_definition(np.arange(3000, dtype=np.float32).view(np.uint32).tolist())
    assert d.digest_array(np.array([1.5], np.float64)) == by_definition([0, 0x3FF80000])
    assert d.digest_array(np.array([1 + 2j], np.complex64)) == by_definition([0x3F800000, 0x40000000])
    assert d.digest_array(np.array([7], np.uint16)) == by_definition([7]) == d.digest_array(b"\x07")


def test_weights_are_odd_and_different() -> None:
    """All 1024 word constants are odd, below 2**32 and different, so a swap inside a block is always seen."""
    w = d.word_weights()
    assert len(set(w.tolist())) == 1024
    assert (w % 2 == 1).all()
    assert (w < 2**32).all()


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_changes_and_swaps_are_seen(n: int, seed: int, data: st.DataObject) -> None:
    """A single bit flip, and a swap of two different words, change the digest."""
    x = np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint32)
    before = d.digest_array(x)
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    y = x.copy()
    y[i] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert d.digest_array(y) != before
    z = x.copy()
    z[[i, j]] = z[[j, i]]
    assert (d.digest_array(z) != before) == (x[i] != x[j])


def test_what_xor_confuses_is_told_apart() -> None:
    """zeros(4), ones(4), zeros(8) and a doubled array all differ (the existing xor gives 0 for them)."""
    cases = [np.zeros(4, np.float32), np.ones(4, np.float32), np.zeros(8, np.float32), np.tile(np.arange(4, dtype=np.float32), 2)]
    assert len({d.digest_array(c) for c in cases}) == 4


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=4), dtype=st.sampled_from(["f4", "f2", "f8", "u1", "c8", "c16"]), data=st.data()
)
def test_shards_sum_to_the_whole(shape: list[int], dtype: str, data: st.DataObject) -> None:
    """Digests of shards along any dimension, with global indices, add up to the digest of the whole tensor; kernel and numpy agree."""
    n = int(np.prod(shape))
    size = np.dtype(dtype).itemsize
    whole = np.random.default_rng(n).integers(0, 256, n * size, dtype=np.uint8).view(dtype).reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *data.draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    code, row = host_kernel.CODES[whole.dtype.name], np.zeros(rows.WORDS)
    total = fast = 0
    for lo, hi in itertools.pairwise(cuts):
        inner, outer = math.prod(shape[dim + 1 :]), math.prod(shape[:dim])
        for k in range(outer):  # the stretches of the shard that are one in the whole
            first = (k * shape[dim] + lo) * inner
            piece = whole.reshape(-1)[first : first + (hi - lo) * inner]
            total += d.digest_array(piece, first)
            host_kernel.reduce(piece.ctypes.data, piece.size, code, row.ctypes.data, host_kernel.WANT_DIGEST, first)
            fast += int(row.view(np.uint64)[rows.DIGEST])
    assert total & M == d.digest_array(whole) == fast & M


def test_errors_say_what_is_allowed() -> None:
    """An element size without a definition is refused with the allowed range."""
    with pytest.raises(UsageError, match="allowed are 1, 2, 4, 8 and 16"):
        d.digest_array(np.zeros(2, "V3"))
