"""Signs in two bits, and the torch operators that make them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.formats.grad_probe import signs
from msprobe_integrations.torch.gradient_probe import step as grad_signs

CODES = st.lists(st.integers(0, 3), max_size=70)


@given(CODES)
def test_positive_is_greater_than_zero(codes: list[int]) -> None:
    """Unpacked, exactly the elements with the code of a positive number are true; none is added by the filling of the last byte."""
    packed = signs.pack(codes)
    assert len(packed) == signs.packed_size(len(codes))
    assert signs.positive(packed, len(codes)).tolist() == [code == signs.POSITIVE for code in codes]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=70))
def test_agreement(pairs: list[tuple[int, int]]) -> None:
    """Equal codes agree, but NaN with nothing; NaN is counted for each side."""
    a, b = [p[0] for p in pairs], [p[1] for p in pairs]
    found = signs.compare(signs.pack(a), signs.pack(b), len(pairs))
    same = sum(x == y != signs.NAN for x, y in pairs)
    assert found == (len(pairs), same, (a.count(signs.NAN), b.count(signs.NAN)))
    assert found.similarity == (same / len(pairs) if pairs else 0.0)


@given(st.lists(st.booleans(), max_size=40))
def test_agreement_of_bool(first: list[bool]) -> None:
    """Without packed signs equality of ``gradient > 0`` counts."""
    second = [not v if i % 3 == 0 else v for i, v in enumerate(first)]
    found = signs.compare_bool(np.array(first, np.bool_), np.array(second, np.bool_))
    assert found == (len(first), sum(x == y for x, y in zip(first, second, strict=True)), (0, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 9), (3, 5, 2)])
def test_pack_signs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The operators give the codes that numpy gives: zero of both signs is 0, infinities have their sign, NaN is 3."""
    values = torch.randn(shape).to(dtype)
    flat = values.view(-1)
    for i, special in enumerate((0.0, -0.0, float("nan"), float("inf"), float("-inf"))[: flat.numel()]):
        flat[i] = special
    out = torch.full((signs.packed_size(values.numel()),), 255, dtype=torch.uint8)
    grad_signs.pack_signs(values, out)
    exact = values.double().numpy().reshape(-1)
    codes = np.select([np.isnan(exact), exact > 0, exact < 0], [signs.NAN, signs.POSITIVE, signs.NEGATIVE], signs.ZERO)
    assert out.numpy().tolist() == signs.pack(codes).tolist()


def test_pack_signs_of_strided_and_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements come in C order whatever the strides are, and pieces fit together."""
    monkeypatch.setattr(grad_signs, "_PIECE", 8)
    values = torch.randn(6, 7)
    for data in (values.t(), values[:, ::2], values.expand(2, 6, 7)):
        out = torch.empty(signs.packed_size(data.numel()), dtype=torch.uint8)
        grad_signs.pack_signs(data, out)
        assert signs.positive(out.numpy(), data.numel()).tolist() == (data > 0).reshape(-1).tolist()


@given(st.lists(st.floats(width=32), max_size=60), st.lists(st.floats(-5, 5, width=32), unique=True, max_size=5).map(sorted))
def test_count_below(values: list[float], bounds: list[float]) -> None:
    """Each bound counts what is below or equal to it; NaN is below nothing."""
    out = torch.zeros(len(bounds), dtype=torch.int64)
    grad_signs.count_below(torch.tensor(values, dtype=torch.float32), bounds, out)
    assert out.tolist() == [sum(v <= bound for v in values) for bound in bounds]
