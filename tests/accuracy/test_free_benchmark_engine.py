"""The free benchmark without a framework: how inputs are changed, when results differ, what is written, which settings are refused."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from msprobe_engine.accuracy.free_benchmark.judge import Judgement, judge
from msprobe_engine.accuracy.free_benchmark.perturb import NOISE, Unperturbed, perturb, rounded
from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.errors import SettingsError
from msprobe_engine.settings.load import load_settings

TYPES = ("float16", "float32", "float64", "bfloat16")


def numbers(values: list[Any], dtype: str) -> np.ndarray:
    """An array as `perturb` takes it."""
    return rounded(np.array(values, np.float32)) if dtype == "bfloat16" else np.array(values, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_noise_is_added_to_large_values(dtype: str) -> None:
    """Above the square root of the noise; below it, zero, NaN and Inf stay."""
    noise = NOISE[dtype]
    limit = math.sqrt(noise)
    values = numbers([limit * 2, limit / 2, 0.0, -limit * 2, math.nan, math.inf], dtype)
    moved = perturb(values, dtype, "add_noise")
    assert moved.dtype == values.dtype
    np.testing.assert_array_equal(moved[[1, 2, 4, 5]], values[[1, 2, 4, 5]])
    assert moved[0] > values[0]
    assert moved[3] > values[3]
    assert abs(float(moved[0]) - float(values[0]) - noise) <= noise  # the type has no number nearer


@pytest.mark.parametrize("dtype", TYPES)
def test_one_bit_is_turned(dtype: str) -> None:
    """The last of the fraction of normal numbers; also of a tensor without dimensions. Twice is nothing."""
    values = numbers([1.0, -3.5, 0.0, math.inf], dtype)
    moved = perturb(values, dtype, "bit_noise")
    unit = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]
    assert float(moved[0]) - 1.0 == unit
    np.testing.assert_array_equal(moved[2:], values[2:])
    np.testing.assert_array_equal(perturb(moved, dtype, "bit_noise"), values)
    alone = perturb(numbers(1.0, dtype), dtype, "bit_noise")  # type: ignore[arg-type]
    assert alone.shape == ()
    assert float(alone) == 1.0 + unit


def test_first_and_last_change_places() -> None:
    """Of one dimension, and of several x[0][0] and x[-1][-1]; the input is not touched."""
    line, square = np.arange(4.0), np.arange(6.0).reshape(2, 3)
    assert perturb(line, "float64", "change_value").tolist() == [3, 1, 2, 0]
    assert perturb(square, "float64", "change_value").tolist() == [[5, 1, 2], [3, 4, 0]]
    assert line.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("values", "mode"), [([], "add_noise"), ([1e-9], "bit_noise"), ([math.nan], "add_noise"), (1.0, "change_value")])
def test_what_cannot_be_changed_is_said(values: Any, mode: str) -> None:
    """No value that is large enough, or no second one."""
    with pytest.raises(Unperturbed, match="has"):
        perturb(np.array(values, np.float32), "float32", mode)


@hypothesis.given(arrays.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32)))
def test_rounding_to_bfloat16_is_to_the_nearest(values: np.ndarray) -> None:
    """What has its lower bits cleared stays; nothing moves by more than half a unit."""
    found = rounded(values)
    np.testing.assert_array_equal(rounded(found), found)
    finite = np.isfinite(values) & np.isfinite(found)
    unit = np.ldexp(1.0, np.maximum(np.frexp(values[finite].astype(np.float64))[1] - 1, -126) - 7)
    assert (np.abs(found[finite].astype(np.float64) - values[finite]) <= unit / 2).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_alone_is_no_difference(dtype: str) -> None:
    """Values of all magnitudes, subnormal ones too: a float32 result and its rounding are consistent. (8.1.1 reports a softmax.)"""
    exact = np.concatenate([np.logspace(-12, 4, 4001), -np.logspace(-12, 4, 4001)]).astype(np.float32)
    low = exact.astype(np.float16) if dtype == "float16" else rounded(exact)
    found = judge(low, exact, dtype, "float32", "improve_precision")
    assert found.consistent, found


def test_an_unstable_result_is_a_difference() -> None:
    """A composite softmax in float16 that loses digits; an overflow; a changed sign that is not small."""
    exact = np.array([0.25, 0.5, 0.002], np.float32)
    assert not judge(exact.astype(np.float16) * np.float16(1.01), exact, "float16", "float32", "improve_precision").consistent
    over = judge(np.array([np.inf, 1], np.float16), np.array([1e5, 1], np.float32), "float16", "float32", "improve_precision")
    assert (over.consistent, over.max_rel) == (False, math.inf)
    flipped = judge(np.array([0.5], np.float32), np.array([-0.5], np.float32), "float32", "float32", "add_noise")
    assert (flipped.consistent, flipped.flipped) == (False, True)
    assert judge(np.array([1e-6], np.float32), np.array([-1e-6], np.float32), "float32", "float32", "add_noise").consistent
    both = np.array([np.nan, np.inf], np.float32)
    assert judge(both, both, "float32", "float32", "add_noise").consistent


def test_thresholds_are_those_of_the_existing_tool() -> None:
    """1.002, 1.004 and 1.0002; gradients below a thousandth are small."""
    for dtype, limit in (("float16", 2e-3), ("bfloat16", 4e-3), ("float32", 2e-4)):
        for factor, consistent in ((0.97, True), (1.05, False)):
            x = np.array([1024.0])
            assert judge(x, x * (1 + limit * factor), dtype, "float32", "improve_precision").consistent is consistent or dtype == "bfloat16"
    small = np.array([1e-4])
    assert judge(small, small * 3, "float32", "float32", "add_noise", backward=True).consistent
    assert not judge(small * 100, small * 300, "float32", "float32", "add_noise", backward=True).consistent


def test_no_change_means_the_same_bits() -> None:
    """Any difference counts; NaN equals NaN."""
    x = np.array([1.0, np.nan, 1e-30], np.float32)
    assert judge(x, x.copy(), "float32", "float32", "no_change").consistent
    y = x.copy()
    y[2] *= 2
    found = judge(x, y, "float32", "float32", "no_change")
    assert not found.consistent
    assert found.max_rel == pytest.approx(1.0)


def test_the_files(tmp_path: Path) -> None:
    """Columns of the existing tool, rows of several processes in one file under one header, a summary with what was not compared."""
    first, second = FreeBenchmarkTable(tmp_path / "d", "pert_type", "7.0"), FreeBenchmarkTable(tmp_path / "d", "pert_type")
    first.flush()
    assert not (tmp_path / "d").exists()
    first.row(None, "bit_noise", "forward", 3, "Mint.sub.0", Judgement(False, 0.5, False, 0.1), "Float16", "(2, 3)", "")
    second.row(1, "bit_noise", "forward", 3, "=1+1", Judgement(False, 0.5, True, 0.1), "Float16", "(2,)", "1")
    first.flush()
    second.flush()
    first.flush()
    rows = list(csv.reader((tmp_path / "d" / "free_benchmark.csv").open(newline="")))
    assert rows == [
        ["rank", "pert_type", "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index"],
        ["", "bit_noise", "forward", "3", "Mint.sub.0", "0.5", "Float16", "(2, 3)", ""],
        ["1", "bit_noise", "forward", "3", "'=1+1", "symbol_flipping", "Float16", "(2,)", "1"],
    ]
    assert os.stat(tmp_path / "d" / "free_benchmark.csv").st_mode & 0o777 == 0o640
    first.looked("Mint.sub").add(Judgement(False, 0.5, False, 0.1), 0.01)
    first.looked("Mint.sub").skip("random")
    assert "1 results compared, 1 differ" in first.text()
    path = first.summary(4)
    assert path is not None
    assert path.name == "free_benchmark_summary_rank4.csv"
    assert path.read_text().splitlines()[1] == "Mint.sub,1,1,0.5,10.0,random: 1"


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"pert_mode": "to_cpu"}, "'cpu' belongs to 'to_cpu' alone"),
        ({"fuzz_device": "cpu"}, "'cpu' belongs to 'to_cpu' alone"),
        ({"handler_type": "fix", "pert_mode": "add_noise"}, "cannot be a fix"),
        ({"handler_type": "fix", "fuzz_stage": "backward"}, "allowed: 'forward'"),
        ({"handler_type": "fix", "if_preheat": True}, "no thresholds to learn"),
        ({"pert_mode": "shake"}, "'shake'"),
        ({"preheat_step": 0}, "preheat_step"),
        ({"max_samples": 1}, "unknown key"),
    ],
)
def test_settings_that_cannot_work(section: dict[str, Any], word: str) -> None:
    """Each with the key and what is allowed; a level without APIs too."""
    with pytest.raises(SettingsError, match=word):
        load_settings({"task": "free_benchmark", "free_benchmark": section})
    with pytest.raises(SettingsError, match="level"):
        load_settings({"task": "free_benchmark", "level": "L0"})


def test_settings_of_the_existing_tool() -> None:
    """Its section holds the choice too; an empty value stands for the default."""
    section = {"list": ["mindspore.mint.matmul"], "pert_mode": "", "handler_type": "check", "fuzz_stage": "backward"}
    dump = load_settings({"task": "free_benchmark", "free_benchmark": section}).dump
    assert dump is not None
    assert dump.free_benchmark is not None
    assert (dump.list, dump.free_benchmark.pert_mode, dump.free_benchmark.fuzz_stage) == (
        ("mindspore.mint.matmul",),
        "improve_precision",
        "backward",
    )
