"""The free benchmark of torch measures and changes tensors on their device as the engine does on arrays."""

from __future__ import annotations

import math
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from msprobe_engine.accuracy.free_benchmark import perturb
from msprobe_engine.accuracy.free_benchmark.judge import Measured, decide, measure, norm_of
from msprobe_engine.accuracy.free_benchmark.preheat import START, Preheat
from msprobe_engine.accuracy.free_benchmark.reference import Agreement
from msprobe_integrations.torch.free_benchmark import sliced, values

MODES = (perturb.IMPROVE, perturb.ADD_NOISE, perturb.BIT_NOISE, perturb.CHANGE_VALUE, perturb.NO_CHANGE)
ODD = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-40, 1.0, 1.0078125, -1.0, 3e38])
NUMBERS = arrays.arrays(np.float32, st.integers(0, 12), elements=st.one_of(ODD, st.floats(width=32)))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """As the engine takes it."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(NUMBERS, st.sampled_from(sorted(values.FLOATS, key=str)), st.sampled_from(MODES), st.randoms())
def test_numbers_are_those_of_the_engine(numbers: np.ndarray, dtype: torch.dtype, mode: str, random: Any) -> None:
    """Verdict and change of two results, for every type and mode, with NaN, Inf, subnormal numbers and nothing at all."""
    first = torch.from_numpy(numbers).to(dtype)
    other = first.clone()
    for at in range(other.numel()):
        other[at] = other[at] * random.choice([1, 1, 1.001, 1.01, -1, math.nan, math.inf])
    second = other.to(values.HIGHER.get(dtype, dtype)) if mode == perturb.IMPROVE else other
    name, wide = values.FLOATS[dtype], values.FLOATS[second.dtype]
    ours = Measured.of([part.tolist() for part in values.measured(first, second, mode, False)])
    with np.errstate(all="ignore"):
        theirs = measure(as_array(first), as_array(second), name, wide, mode)
    assert ours.one_sided == theirs.one_sided
    assert decide(ours, name, mode).consistent == decide(theirs, name, mode).consistent
    for field in ("ratio", "change", "size") if mode not in (perturb.IMPROVE, perturb.NO_CHANGE) else ("ratio",):
        a, b = getattr(ours, field), getattr(theirs, field)
        assert a == pytest.approx(b, rel=1e-5, abs=1e-6 if field == "ratio" else 1e-30) or max(a, b) > 1e30


@pytest.mark.parametrize("dtype", sorted(values.FLOATS, key=str))
@pytest.mark.parametrize("mode", [perturb.ADD_NOISE, perturb.BIT_NOISE, perturb.CHANGE_VALUE])
def test_inputs_are_changed_as_the_engine_does(mode: str, dtype: torch.dtype) -> None:
    """Bit for bit, and the input stays what it is."""
    x = torch.linspace(-3, 3, 40, dtype=torch.float64).to(dtype).reshape(5, 8)
    before = x.clone()
    with np.errstate(all="ignore"):
        expected = perturb.perturb(as_array(x), values.FLOATS[dtype], mode)
    assert np.array_equal(as_array(values.changed(x, mode)), expected)
    assert torch.equal(x, before)
    expanded = torch.ones(1, dtype=dtype).expand(4)
    assert values.changed(expanded, perturb.CHANGE_VALUE).tolist() == [1, 1, 1, 1]


def test_every_part_of_a_large_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that is off is found wherever it is, also in tensors that are not contiguous; 8.1.1 sees the last part only."""
    monkeypatch.setitem(values._MOST, "cpu", 7)
    x = torch.rand(6, 10) + 1
    for at in ((0, 0), (3, 4), (5, 9)):
        for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::3]):
            a, y = view(x), x.clone()
            y[at] *= 3
            b = view(y)
            found = Measured.of([part.tolist() for part in values.measured(a, b, perturb.ADD_NOISE, False)])
            whole = measure(a.numpy(), b.numpy(), "float32", "float32", perturb.ADD_NOISE)
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
