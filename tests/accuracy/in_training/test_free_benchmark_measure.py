"""Free benchmark: how results are disturbed, compared and written, in numpy and on torch."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from msprobe_engine.accuracy.free_benchmark import perturb as perturbing
from msprobe_engine.accuracy.free_benchmark.judge import Judgement, Measured, decide, judge, measure, norm_of
from msprobe_engine.accuracy.free_benchmark.perturb import NOISE, Unperturbed, perturb, round_to_bfloat16
from msprobe_engine.accuracy.free_benchmark.preheat import START, Preheat
from msprobe_engine.accuracy.free_benchmark.reference import Agreement
from msprobe_engine.accuracy.free_benchmark.table import FreeBenchmarkTable
from msprobe_engine.core.errors import SettingsError
from msprobe_engine.core.settings.load import load_settings
from msprobe_integrations.torch.op_tools.free_benchmark import second as sliced
from msprobe_integrations.torch.op_tools.free_benchmark import values

# The free benchmark without a framework: how inputs are changed, when results differ, what is written, which settings are refused.

TYPES = ("float16", "float32", "float64", "bfloat16")


def numbers(values: list[Any], dtype: str) -> np.ndarray:
    """An array as `perturb` takes it."""
    return round_to_bfloat16(np.array(values, np.float32)) if dtype == "bfloat16" else np.array(values, dtype)


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
    found = round_to_bfloat16(values)
    np.testing.assert_array_equal(round_to_bfloat16(found), found)
    finite = np.isfinite(values) & np.isfinite(found)
    unit = np.ldexp(1.0, np.maximum(np.frexp(values[finite].astype(np.float64))[1] - 1, -126) - 7)
    assert (np.abs(found[finite].astype(np.float64) - values[finite]) <= unit / 2).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_alone_is_no_difference(dtype: str) -> None:
    """Values of all magnitudes, subnormal ones too: a float32 result and its rounding are consistent. (8.1.1 reports a softmax.)"""
    exact = np.concatenate([np.logspace(-12, 4, 4001), -np.logspace(-12, 4, 4001)]).astype(np.float32)
    low = exact.astype(np.float16) if dtype == "float16" else round_to_bfloat16(exact)
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
    first.get_counts("Mint.sub").add(Judgement(False, 0.5, False, 0.1), 0.01)
    first.get_counts("Mint.sub").skip("random")
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


# The free benchmark of torch measures and changes tensors on their device as the engine does on arrays.

MODES = (perturbing.IMPROVE, perturbing.ADD_NOISE, perturbing.BIT_NOISE, perturbing.CHANGE_VALUE, perturbing.NO_CHANGE)
ODD = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, 1.0, 1.0078125, -1.0, 3e38])
NUMBERS = arrays.arrays(np.float32, st.integers(0, 12), elements=st.one_of(ODD, st.floats(width=32)))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """As the engine takes it."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


@hypothesis.given(NUMBERS, st.sampled_from(sorted(values.FLOATS, key=str)), st.sampled_from(MODES), st.randoms())
def test_numbers_are_those_of_the_engine(numbers: np.ndarray, dtype: torch.dtype, mode: str, random: Any) -> None:
    """Verdict and change of two results, for every type and mode, with NaN, Inf, subnormal numbers and nothing at all."""
    first = torch.from_numpy(numbers).to(dtype)
    other = first.clone()
    for at in range(other.numel()):
        other[at] = other[at] * random.choice([1, 1, 1.001, 1.01, -1, math.nan, math.inf])
    second = other.to(values.HIGHER.get(dtype, dtype)) if mode == perturbing.IMPROVE else other
    name, wide = values.FLOATS[dtype], values.FLOATS[second.dtype]
    ours = Measured.of([part.tolist() for part in values.measure_difference(first, second, mode, False)])
    with np.errstate(all="ignore"):
        theirs = measure(as_array(first), as_array(second), name, wide, mode)
    assert ours.one_sided == theirs.one_sided
    assert decide(ours, name, mode).consistent == decide(theirs, name, mode).consistent
    for field in ("ratio", "change", "size") if mode not in (perturbing.IMPROVE, perturbing.NO_CHANGE) else ("ratio",):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6 if field == "ratio" else 1e-30) or max(a, b) > 1e30


@pytest.mark.parametrize("dtype", sorted(values.FLOATS, key=str))
@pytest.mark.parametrize("mode", [perturbing.ADD_NOISE, perturbing.BIT_NOISE, perturbing.CHANGE_VALUE])
def test_inputs_are_changed_as_the_engine_does(mode: str, dtype: torch.dtype) -> None:
    """Bit for bit, and the input stays what it is."""
    x = torch.linspace(-3, 3, 40, dtype=torch.float64).to(dtype).reshape(5, 8)
    before = x.clone()
    with np.errstate(all="ignore"):
        expected = perturbing.perturb(as_array(x), values.FLOATS[dtype], mode)
    assert np.array_equal(as_array(values.perturb_tensor(x, mode)), expected)
    assert torch.equal(x, before)
    expanded = torch.ones(1, dtype=dtype).expand(4)
    assert values.perturb_tensor(expanded, perturbing.CHANGE_VALUE).tolist() == [1, 1, 1, 1]


def test_every_part_of_a_large_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that is off is found wherever it is, also in tensors that are not contiguous; 8.1.1 sees the last part only."""
    monkeypatch.setitem(values._MOST, "cpu", 7)
    x = torch.rand(6, 10) + 1
    for at in ((0, 0), (3, 4), (5, 9)):
        for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::3]):
            a, y = view(x), x.clone()
            y[at] *= 3
            b = view(y)
            found = Measured.of([part.tolist() for part in values.measure_difference(a, b, perturbing.ADD_NOISE, False)])
            whole = measure(a.numpy(), b.numpy(), "float32", "float32", perturbing.ADD_NOISE)
            assert found.ratio == pytest.approx(whole.ratio, rel=1e-6)
            assert found.change == pytest.approx(whole.change, rel=1e-5)
            assert norm_of([part.tolist()[:2] for part in values.change_of(a, b)]) == pytest.approx(whole.change, rel=1e-5)


@pytest.mark.parametrize(
    ("api", "call", "args"),
    [
        ("__add__", torch.add, ((4, 6), (6,))),
        ("mul_", torch.mul, ((4, 1, 6), (4, 5, 6))),
        ("softmax", lambda x: torch.softmax(x, -1), ((1, 8, 6),)),
        ("sum", lambda x: x.sum((1, 2)), ((8, 3, 4),)),
        ("linear", torch.nn.functional.linear, ((2, 5, 4), (3, 4), (3,))),
        ("layer_norm", lambda x: torch.nn.functional.layer_norm(x, (4,)), ((6, 5, 4),)),
        ("matmul", torch.matmul, ((1, 6, 4), (4, 3))),
        ("__matmul__", torch.matmul, ((2, 6, 4), (2, 4, 3))),
        ("bmm", torch.bmm, ((1, 6, 4), (1, 4, 3))),
        ("mm", torch.mm, ((6, 4), (4, 3))),
    ],
)
def test_pieces_make_the_whole(api: str, call: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that are run in pieces give the pieces of the whole result."""
    monkeypatch.setattr(sliced, "LARGE", 1)
    monkeypatch.setattr(sliced, "_PIECE", 9)
    given: Any = tuple(torch.randn(shape) for shape in args)
    extra = {"softmax": (-1,), "sum": ((1, 2),), "layer_norm": ((4,),)}.get(api, ())
    result = call(*given)
    plan = sliced.pieces(api, (*given, *extra), {}, [result])
    assert plan is not None
    spans = list(plan.spans())
    assert len(spans) > 1
    for start, length in spans:
        piece = plan.arguments((*given, *extra), start, length)
        torch.testing.assert_close(call(*piece[: len(given)]), plan.result(result, start, length))


@pytest.mark.parametrize(
    ("api", "args"),
    [
        ("softmax", (torch.ones(8, 3), 0)),
        ("sum", (torch.ones(8, 3),)),
        ("var", (torch.ones(8, 3), True)),
        ("matmul", (torch.ones(8), torch.ones(8))),
        ("sort", (torch.ones(8, 3), 1)),
        ("layer_norm", (torch.ones(8, 3), (8, 3))),
        ("sigmoid", (torch.tensor(1.0),)),
    ],
)
def test_what_must_stay_whole(api: str, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dimension that the operator works over, all of them, or an operator that nothing is known of."""
    monkeypatch.setattr(sliced, "LARGE", 1)
    assert sliced.pieces(api, args, {}, [torch.ones(8, 3)]) is None


def test_agreement_with_the_cpu() -> None:
    """Rounding agrees; ten times too large does not, however small; NaN and Inf count where the CPU's value has a number of the type."""

    def agrees(device: Any, cpu: Any, dtype: str = "float16") -> bool:
        device, cpu = np.array(device, np.float64), np.array(cpu, np.float64)
        found = Agreement(dtype, float(np.abs(cpu[np.isfinite(cpu)]).max(initial=0.0)))
        found.add(device, cpu)
        return found.agrees

    exact = np.linspace(-5, 5, 501)
    assert agrees(exact.astype(np.float16), exact)
    assert agrees(exact.astype(np.float16) / 1024, exact / 1024)
    assert not agrees([1e-4, 1e-5], [1e-5, 1e-6])
    assert not agrees([np.nan], [1.0])
    assert not agrees([np.inf, 1.0], [100.0, 1.0])
    assert agrees([np.inf, np.nan, -np.inf], [1e6, np.nan, -np.inf])
    assert not agrees([np.inf], [-1e6])
    assert not agrees(exact + 3e-4, exact, "float32")


def test_thresholds_are_learnt() -> None:
    """Halved while the CPU agrees, doubled above what agrees, lowered for good by what does not; never below that of the type; samples go
    round."""
    preheat = Preheat(4, 2)
    taken: list[list[int]] = []
    for step in range(4):
        assert preheat.counting is (step == 0)
        taken.append([call for call in range(6) if preheat.call("Functional.linear")])
        if step == 1:
            preheat.learn("Functional.linear", 1.5, True)
        if step == 2:
            preheat.learn("Functional.linear", 3.0, True)
        if step == 3:
            preheat.learn("Functional.linear", 1.25, False)
        preheat.end_step()
        expected = (START, 1 + (START - 1) / 2, START, 1.25)[step]
        assert preheat.threshold("Functional.linear", "float32") == pytest.approx(expected)
    assert taken == [[], [0, 1], [2, 3], [4, 5]]
    preheat.learn("Functional.linear", 1.0, True)
    preheat.learn("Functional.linear", 1.0, False)
    preheat.end_step()
    assert preheat.threshold("Functional.linear", "bfloat16") == 1.004
    assert not preheat.call("Functional.linear")
    assert preheat.threshold("Tensor.mul", "float32") == START
