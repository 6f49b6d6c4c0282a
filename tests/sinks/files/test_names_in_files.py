"""Names as files show them."""

from __future__ import annotations

import pytest
from frames_of_lists import TENSOR
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.core.io.safe_cells import Names, shorten_name
from msprobe_engine.core.records import Sample, TensorRef

PARTS = st.lists(
    st.sampled_from(["layers", "0", "1", "a", "b", "embedding", "norm1", "final_norm", "output", "input", "weight"]), max_size=6
)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("module.module.decoder.layers.3.mlp.linear_fc1.weight", "layers.3.mlp.linear_fc1.weight"),
        ("module.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.final_layernorm.weight", "final_layernorm.weight"),
        ("module.output_layer.weight", "output_layer.weight"),
        ("layers.3.weight", "layers.3.weight"),
        ("decoder.mlp.output", "decoder.mlp.output"),
        ("decoder.layers.1.mlp.output_0", "layers.1.mlp.output_0"),
        ("fc.weight", "fc.weight"),
    ],
)
def test_patterns(name: str, short: str) -> None:
    """From the layer, embedding, final, output or norm on, as 26.2 has it; the place of a module tensor is no module name."""
    assert shorten_name(name) == short


def sample(name: str) -> Sample:
    return Sample("grad_reduced", name, TensorRef(0, TENSOR))


def test_ambiguous_names_stay_whole() -> None:
    """Two towers with layers.0 in one step keep their names; one that comes later finds its short form taken."""
    names = Names(True)
    first = names.samples([sample(n) for n in ("a.layers.0.w", "b.layers.0.w", "a.layers.1.w")])
    assert [s.name for s in first] == ["a.layers.0.w", "b.layers.0.w", "layers.1.w"]
    assert [s.name for s in names.samples([sample("b.layers.1.w"), sample("a.layers.1.w")])] == ["b.layers.1.w", "layers.1.w"]
    kept = [sample("a.layers.0.w")]
    assert Names(False).samples(kept) is kept


@given(st.lists(st.lists(PARTS, min_size=1, max_size=8), max_size=4))
def test_no_two_names_become_one(steps: list[list[list[str]]]) -> None:
    """Whatever the names and the steps in which they come, every shown name stands for one name, always the same."""
    names = Names(True)
    shown: dict[str, str] = {}
    for step in steps:
        given_names = [".".join(parts) for parts in step]
        for name, out in zip(given_names, names.samples([sample(n) for n in given_names])):
            assert shown.setdefault(name, out.name) == out.name
    assert len(set(shown.values())) == len(shown)
