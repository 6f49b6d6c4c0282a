"""Values drawn for recorded statistics: they have these statistics, fit their purpose, and are the same wherever they are drawn."""

from __future__ import annotations

import math
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.accuracy.draw import CLASSES, DEFINITE, DISTINCT, DROP, KEEP, OFFSETS, SORTED, SYMMETRIC, TRIANGULAR, UNIQUE, draw
from msprobe_engine.core.errors import DumpFormatError

Array = npt.NDArray[Any]


def record(values: Array, dtype: str = "torch.float32", *, counts: bool = True) -> dict[str, Any]:
    """What a dump says of these values."""
    found: dict[str, Any] = {"type": "torch.Tensor", "dtype": dtype, "shape": list(values.shape)}
    if not values.size:
        return found | dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    wide = values.astype(np.float64)
    with np.errstate(all="ignore"):
        found |= {"Max": values.max().item(), "Min": values.min().item(), "Mean": float(wide.mean())}
        found |= {"Norm": float(np.sqrt(np.square(wide).sum()))}
    nans, infs = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    return found | ({"nan_count": nans} if nans and counts else {}) | ({"inf_count": infs} if infs and counts else {})


def shapes_of_data() -> dict[str, Array]:
    """Tensors as training has them."""
    random = np.random.default_rng(0)
    scores = np.exp(3 * random.standard_normal((4, 32, 32)))
    outlier = random.standard_normal(5000) * 0.01
    outlier[7] = 500
    found = {
        "weights": random.standard_normal((64, 64)),
        "probabilities": scores / scores.sum(-1, keepdims=True),
        "one outlier": outlier,
        "relu": np.maximum(random.standard_normal((50, 50)), 0),
        "zeros and ones": (random.random((40, 40)) < 0.1) * 1.0,
        "tiny gradients": random.standard_normal(3000) * 1e-9,
        "three values": np.array([-1.0, 0.25, 2.0]),
        "one value": np.array([0.75]),
        "constant": np.full((3, 4), 2.5),
        "skewed": random.exponential(1, 4000),
        "whole range": np.array([-3e38, 1.0, 2.0, 3e38]),
    }
    return {name: values.astype(np.float32) for name, values in found.items()}


@pytest.mark.parametrize("name", shapes_of_data())
def test_statistics_are_the_recorded_ones(name: str) -> None:
    """Extremes are met exactly, mean and norm closely: an outlier stretches nothing but itself."""
    wanted = record(shapes_of_data()[name])
    got = record(draw(wanted, name))
    assert (got["Max"], got["Min"]) == (wanted["Max"], wanted["Min"])
    spread = wanted["Norm"] / math.sqrt(math.prod(wanted["shape"]))
    assert got["Mean"] == pytest.approx(wanted["Mean"], abs=0.02 * spread)
    assert got["Norm"] == pytest.approx(wanted["Norm"], rel=0.02)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    st.sampled_from(["torch.float32", "torch.float64", "torch.bfloat16", "torch.float16"]),
)
def test_every_value_is_within_the_extremes(values: list[float], dtype: str) -> None:
    """Whatever was recorded, both extremes occur and nothing lies outside of them."""
    found = draw(record(np.array(values), dtype), "x").astype(np.float64)
    low, high = np.float32(min(values)), np.float32(max(values))
    assert found.min() >= low
    assert found.max() <= high
    if len(values) > 1:
        assert (found.min(), found.max()) == (low, high)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30))
def test_integers_stay_valid(values: list[int]) -> None:
    """Indices drawn for 64 bit integers are between the recorded ones, up to the ends of the type."""
    wanted = record(np.array(values, np.int64), "torch.int64") | {"Max": max(values), "Min": min(values)}
    found = draw(wanted, "x")
    assert found.dtype == np.int64
    assert min(values) <= found.min() <= found.max() <= max(values)


def test_integers_sum_up() -> None:
    """Numbers of repeats have the recorded mean exactly: they must add up to a recorded size. Positions count."""
    repeats = np.random.default_rng(1).integers(0, 9, 300)
    assert draw(record(repeats, "torch.int64"), "x").sum() == repeats.sum()
    positions = np.tile(np.arange(16), (3, 1))
    assert np.array_equal(draw(record(positions, "torch.int64"), "x"), positions)


def test_nan_and_inf_occur_as_often() -> None:
    """As often as counted, at places of their own; without counts once; -inf of a causal mask where the mask has it."""
    values = np.arange(60, dtype=np.float32).reshape(6, 10)
    values[0, :3], values[1, 2], values[2, 5] = np.nan, np.inf, np.inf
    found = draw(record(values), "x")
    assert (int(np.isnan(found).sum()), int(np.isposinf(found).sum()), int(np.isneginf(found).sum())) == (3, 2, 0)
    assert np.isfinite(found).any(axis=1).all()
    assert int(np.isinf(draw({"dtype": "torch.float16", "shape": [9], "Max": "Infinity", "Min": -2.0}, "x")).sum()) == 1
    mask = np.triu(np.full((2, 1, 8, 8), -np.inf, np.float32), 1)
    assert np.array_equal(draw(record(mask), "x"), mask)
    assert np.isneginf(draw(record(np.full(4, -np.inf)), "x")).all()
    older = {"dtype": "torch.float32", "shape": [50], "Max": math.inf, "Min": -1.0, "Max_except_inf_nan": 3.0, "Min_except_inf_nan": -1.0}
    found = draw(older, "x")
    assert (int(np.isposinf(found).sum()), found[np.isfinite(found)].max()) == (1, 3.0)


def test_means_that_nobody_knows_are_not_zero() -> None:
    """With NaN in a record its mean is unknown: what divides by a wrong number must show."""
    for limits in ({}, {"Max_except_inf_nan": 3.0, "Min_except_inf_nan": -3.0}, {"Max_except_inf_nan": 3.0, "Min_except_inf_nan": 1.0}):
        values = draw({"dtype": "torch.float32", "shape": [5000], "Mean": "NaN", "Norm": "NaN", "nan_count": 500, **limits}, "0 x")
        finite = values[np.isfinite(values)]
        assert finite.size == 4500
        assert finite.mean() > 0.05 * (finite.max() - finite.min())
        assert (finite.min(), finite.max()) == (limits.get("Min_except_inf_nan", -1.0), limits.get("Max_except_inf_nan", 1.0))


def test_purposes() -> None:
    """Boundaries are sorted, indices differ, ignored classes are the recorded one, matrices are definite, masks leave something."""
    floats = record(np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32))
    assert (np.diff(draw(floats, "x", SORTED)) >= 0).all()
    offsets = draw(record(np.array([0, 3, 9, 20]), "torch.int32"), "x", OFFSETS)
    assert offsets[0] == 0
    assert (np.diff(offsets) >= 0).all()
    unique = draw({"dtype": "torch.int64", "shape": [3, 4], "Max": 9, "Min": 2, "Mean": 5.0, "Norm": 1.0}, "x", UNIQUE, 1)
    assert all(len(set(row)) == 4 for row in unique.tolist())
    assert unique.min() >= 2
    assert unique.max() <= 9
    distinct = draw({"dtype": "torch.int64", "shape": [3, 4], "Max": 19, "Min": 2, "Mean": 9.0, "Norm": 40.0}, "x", DISTINCT)
    assert len(set(distinct.reshape(-1).tolist())) == 12
    assert (distinct.min() >= 2, distinct.max() <= 19) == (True, True)
    repeated = draw({"dtype": "torch.int64", "shape": [3, 4], "Max": 4, "Min": 2, "Mean": 3.0, "Norm": 11.0}, "x", DISTINCT)
    assert (repeated.min(), repeated.max()) == (2, 4)
    classes = draw(record(np.array([-100, 3, 7, 2, -100, 1]), "torch.int64"), "x", CLASSES)
    assert set(classes.tolist()) <= {-100, *range(8)}
    assert -100 in classes
    definite = draw(floats, "x", DEFINITE)
    assert np.linalg.eigvalsh(definite).min() > 0
    symmetric = draw(floats, "x", SYMMETRIC)
    assert np.array_equal(symmetric, symmetric.T)
    assert np.linalg.cond(np.tril(draw(floats, "x", TRIANGULAR))) < 100
    square = {"dtype": "torch.bool", "shape": [2, 5, 5], "Max": True, "Min": False, "Mean": None, "Norm": None}
    assert np.array_equal(draw(square, "x", KEEP), ~draw(square, "x", DROP))
    padding = square | {"shape": [4, 9]}
    assert draw(padding, "x", KEEP).any(axis=1).all()
    assert not draw(padding, "x", DROP).all(axis=1).any()


def test_other_types() -> None:
    """Complex magnitudes are the recorded ones; booleans are both; nothing recorded, nothing there, and memory that is only written."""
    found = draw({"dtype": "torch.complex64", "shape": [200], "Max": 3.0, "Min": 1.0, "Mean": 1.5, "Norm": 22.0}, "x")
    assert found.dtype == np.complex64
    assert np.abs(found).max() == pytest.approx(3)
    assert np.abs(found).min() == pytest.approx(1)
    assert draw({"dtype": "torch.bool", "shape": [3], "Max": True, "Min": True}, "x").all()
    assert draw({"dtype": "torch.float32", "shape": [0, 3], "Max": None, "Min": None}, "x").shape == (0, 3)
    assert draw({"dtype": "torch.int64", "shape": [3]}, "x").tolist() == [0, 0, 0]
    assert draw({"dtype": "torch.float32", "shape": [2], "Max": None, "ignored": True}, "x").tolist() == [0, 0]
    assert draw({"dtype": "Float8E4M3FN", "shape": [2], "Max": 2.0, "Min": 1.0}, "x").dtype == np.float32
    assert draw({"dtype": "float64", "shape": [], "Max": 2.0, "Min": 2.0}, "x") == 2


def test_what_cannot_be_is_refused() -> None:
    """A damaged dump takes no memory and raises the error of dumps."""
    good = {"dtype": "torch.float32", "shape": [2], "Max": 1.0, "Min": 0.0}
    for wrong in ({"shape": [1 << 40]}, {"shape": [-1]}, {"shape": "x"}, {"shape": None}, {"dtype": "os.system"}, {"shape": [1] * 100}):
        with pytest.raises(DumpFormatError):
            draw(good | wrong, "x")


def test_the_same_bits_in_another_process() -> None:
    """The seed text and the record decide, and nothing else; other texts give other values."""
    wanted = record(shapes_of_data()["weights"])
    code = f"from msprobe_engine.accuracy.draw import draw; import zlib; print(zlib.crc32(draw({wanted!r}, 'a').tobytes()))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    draw(wanted, "something else first")
    assert int(there) == zlib.crc32(draw(wanted, "a").tobytes())
    assert not np.array_equal(draw(wanted, "a"), draw(wanted, "b"))


def test_large_tensors() -> None:
    """Values of large tensors are chosen out of fewer, and keep the statistics."""
    wanted = {"dtype": "torch.float32", "shape": [3, 1 << 21], "Max": 5.0, "Min": -5.0, "Mean": 0.1, "Norm": math.sqrt(3 << 21)}
    found = record(draw(wanted, "x"))
    assert (found["Max"], found["Min"]) == (5, -5)
    assert found["Mean"] == pytest.approx(0.1, abs=1e-3)
    assert found["Norm"] == pytest.approx(wanted["Norm"], rel=1e-3)
