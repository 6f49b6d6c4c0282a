"""Features of layers against slow references in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from msprobe_integrations.torch.monitor import feature_math

pytestmark = pytest.mark.framework


def slow_attention(q: torch.Tensor, k: torch.Tensor, layout: str) -> tuple[float, float]:
    """Row by row, in float64."""
    order = (1, 2, 0, 3) if layout == "s,b,h,d" else (0, 2, 1, 3)
    q, k = q.double().permute(order), k.double().permute(order)
    share, ahead = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    entropies, largest = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = k[b, h // share, : i + ahead + 1]
                p = torch.softmax(seen @ q[b, h, i] / math.sqrt(q.shape[3]), 0)
                entropies.append(float(-(p * p.log()).sum()))
                largest.append(float(p.max()))
    return sum(entropies) / len(entropies), sum(largest) / len(largest)


@given(
    layout=st.sampled_from(["s,b,h,d", "b,s,h,d"]),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    rows=st.integers(1, 9),
    more=st.integers(0, 4),
    piece=st.sampled_from([1, 7, 40, 1 << 20]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_attention(layout: str, batch: int, groups: int, share: int, rows: int, more: int, piece: int, dtype: torch.dtype) -> None:
    """Entropy and largest weight are means over all batches, heads and rows, for both layouts, grouped queries, more keys than
    queries, and pieces of any size."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(batch, rows, groups * share, 5, generator=generator).to(dtype)
    k = torch.randn(batch, rows + more, groups, 5, generator=generator).to(dtype)
    if layout == "s,b,h,d":
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    before = dict(feature_math.PIECE)
    try:
        feature_math.PIECE["cpu"] = piece
        entropy, largest = feature_math.attention(q, k, layout)
    finally:
        feature_math.PIECE.update(before)
    assert (float(entropy), float(largest)) == pytest.approx(slow_attention(q, k, layout), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("q", "k"), [((2, 3, 4), (2, 3, 4)), ((2, 3, 4, 5), (2, 3, 3, 5)), ((2, 3, 4, 5), (2, 3, 4, 6))])
def test_attention_of_other_shapes(q: Any, k: Any) -> None:
    """What is no q and k is refused with the shapes."""
    with pytest.raises(ValueError, match=r"\["):
        feature_math.attention(torch.ones(q), torch.ones(k), "b,s,h,d")


@given(m=st.integers(1, 40), n=st.integers(1, 40), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_spectral_norm(m: int, n: int, seed: int, dtype: torch.dtype) -> None:
    """The norm is that of the singular values to 1e-3, whatever the shape, and never above it; the vector has length 1."""
    weight = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    truth = float(torch.linalg.svdvals(weight.double())[0])
    norm, vector = feature_math.spectral_norm(weight, feature_math.start_vector(n, torch.device("cpu")), 30)
    assert float(norm) == pytest.approx(truth, rel=1e-3)
    assert float(norm) <= truth * (1 + 1e-5)
    assert float(vector.norm()) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("shape", [(512, 512), (300, 900)])
def test_spectral_norm_of_a_large_random_weight(shape: tuple[int, int]) -> None:
    """Thirty iterations are enough where singular values lie as close together as those of a fresh weight do."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    truth = float(torch.linalg.svdvals(weight.double())[0])
    norm, _ = feature_math.spectral_norm(weight, feature_math.start_vector(shape[1], torch.device("cpu")), 30)
    assert float(norm) == pytest.approx(truth, rel=1e-3)


def test_spectral_norm_of_a_large_matrix_makes_no_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a matrix that is not float32 only pieces are made float32 at a time; the norm is that of the whole."""
    weight = torch.randn(64, 10, dtype=torch.bfloat16)
    start = feature_math.start_vector(10, torch.device("cpu"))
    whole, vector = feature_math.spectral_norm(weight, start, 10)
    monkeypatch.setattr(feature_math, "_PIECE", 70)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
                sizes.append(result.numel())
            return result

    with Sizes():
        norm, other = feature_math.spectral_norm(weight, start, 10)
    assert set(sizes) == {70, 10}
    assert float(norm) == pytest.approx(float(whole), rel=1e-5)
    assert torch.allclose(vector.abs(), other.abs(), atol=1e-3)


def test_spectral_norm_goes_on_from_the_last_step() -> None:
    """A few iterations per step come to the true value over the steps."""
    weight = torch.randn(200, 150, generator=torch.Generator().manual_seed(0))
    truth = float(torch.linalg.svdvals(weight.double())[0])
    vector = feature_math.start_vector(150, torch.device("cpu"))
    found = []
    for _ in range(12):
        norm, vector = feature_math.spectral_norm(weight, vector, 4)
        found.append(float(norm))
    assert found[0] < 0.99 * truth
    assert found[-1] == pytest.approx(truth, rel=1e-3)


def test_spectral_norm_of_nothing() -> None:
    """A weight of zeros has norm 0, one with NaN has NaN, and neither raises."""
    start = feature_math.start_vector(3, torch.device("cpu"))
    assert float(feature_math.spectral_norm(torch.zeros(4, 3), start, 10)[0]) == 0
    assert math.isnan(float(feature_math.spectral_norm(torch.full((4, 3), math.nan), start, 10)[0]))


@given(experts=st.integers(1, 12), hidden=st.integers(1, 12))
def test_similarity(experts: int, hidden: int) -> None:
    """The mean over all pairs of the cosine between experts; experts are the shorter side."""
    weight = torch.randn(experts, hidden, generator=torch.Generator().manual_seed(experts * 13 + hidden))
    vectors = (weight if experts < hidden else weight.t()).double()
    n = vectors.shape[0]
    pairs = [float(torch.cosine_similarity(vectors[i], vectors[j], 0)) for i in range(n) for j in range(i)]
    assert float(feature_math.similarity(weight)) == pytest.approx(sum(pairs) / len(pairs) if pairs else 0, abs=1e-9)


def test_token_entropy() -> None:
    """The mean over tokens, in nats; masked experts count as zero, and no tokens give 0."""
    logits = torch.tensor([[0.0, 0.0, -math.inf], [3.0, 1.0, 2.0]])
    p = torch.softmax(logits[1].double(), 0)
    expected = (math.log(2) + float(-(p * p.log()).sum())) / 2
    assert float(feature_math.token_entropy(logits)) == pytest.approx(expected, rel=1e-6)
    assert float(feature_math.token_entropy(logits.view(2, 1, 3))) == pytest.approx(expected, rel=1e-6)
    assert float(feature_math.token_entropy(torch.zeros(0, 3))) == 0


def test_expert_load() -> None:
    """Tokens per expert over their mean, from the router's own choice or from the largest logits."""
    logits = torch.tensor([[3.0, 2.0, 0.0, 1.0], [3.0, 0.0, 2.0, 1.0], [0.0, 3.0, 2.0, 1.0], [3.0, 2.0, 1.0, 0.0]])
    low, high, dead = feature_math.expert_load(logits, 2)  # 3, 3, 2, 0 tokens
    assert (float(low), float(high), float(dead)) == (0, 1.5, 1)
    chosen = torch.tensor([[1, 0, 0, 1]] * 4, dtype=torch.bool)
    assert [float(v) for v in feature_math.expert_load(logits, 2, chosen)] == [0, 2, 2]
