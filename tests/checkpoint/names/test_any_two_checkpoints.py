"""Alignment of checkpoints that nobody made: it never fails, and every tensor is in a pair, named as missing, or left out with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msprobe_engine.align.parameters.align_names import Alignment, align_checkpoints, label
from msprobe_engine.formats.checkpoint.model import Checkpoint, StoredTensor, whole

_FILE = Path("nowhere")
_LEAVES = st.sampled_from((
    "self_attention.linear_qkv.weight", "self_attention.query_key_value.bias", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.qkv_proj.weight", "attn.c_attn.weight", "attn.c_proj.weight", "attention.wq.weight",
    "attention.qkv_linear.wk.weight", "mlp.linear_fc1.weight", "mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc2.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight", "mlp.gate_up_proj.weight", "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj", "mlp.experts.gate_up_proj_bias", "mlp.experts.weight1", "mlp.experts.weight2", "mlp.router.weight",
    "mlp.experts.3.up_proj.weight", "mlp.experts.local_experts.1.linear_fc1.weight", "mlp.experts.linear_fc1.weight2",
    "mlp.experts.experts.linear_fc1.weight", "self_attention.linear_q_up_proj.weight", "self_attn.q_a_proj.weight", "q_norm.weight",
    "input_layernorm.weight", "eh_proj.weight", "[odd]", "x..y",
))  # fmt: skip
_HEADS = st.sampled_from(
    ["decoder.layers.0.", "model.layers.0.", "module.model.layers.0.", "layers.0.", "h.0.", "net.model.layers.0.", "mtp.layers.0."]
)
_TOP = st.sampled_from(
    ["lm_head.weight", "output_layer.weight", "model.embed_tokens.weight", "embedding.word_embeddings.weight", "weight", "", "."]
)
_NAMES = st.one_of(st.builds(str.__add__, _HEADS, _LEAVES), _TOP, st.text(max_size=8))
_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16]), max_size=4).map(tuple)
_TENSORS = st.lists(
    st.tuples(_NAMES, _SHAPES, st.sampled_from(["", "exp_avg", "step", "master"]), st.sampled_from(["float32", "bfloat16", "int4"])),
    max_size=14,
)
_FACTS = st.fixed_dictionaries(
    {},
    optional={
        **{
            name: st.sampled_from([None, 1, 2, 3, 4, 8])
            for name in ("heads", "kv_heads", "head_dim", "hidden", "experts", "vocab", "layers")
        },
        "gated": st.booleans(),
        "tied": st.booleans(),
    },
)


def _checkpoint(tensors: list[tuple[str, tuple[int, ...], str, str]], facts: dict[str, object]) -> Checkpoint:
    made = Checkpoint(_FILE, "fuzz", facts=dict(facts))
    for name, shape, state, dtype in tensors:
        tensor = StoredTensor(name, shape, dtype, whole(shape, _FILE, 0), state=state, group="optimizer" if state else "model")
        if tensor.key not in made.tensors:
            made.add(tensor)
    return made


def _accounted(found: Alignment, side: str) -> set[str]:
    alone = found.only_a if side == "a" else found.only_b
    keys = {(pair.a if side == "a" else pair.b).key for pair in found.pairs} | {tensor.key for tensor in alone}
    return (
        keys
        | {name.rpartition("[")[0] or name for left in found.left_out if left.side == side for name in left.names}
        | {name for left in found.left_out if left.side == side for name in left.names}
    )


@given(_TENSORS, _TENSORS, _FACTS, _FACTS)
@pytest.mark.slow
def test_every_tensor_is_accounted_for(a: list, b: list, facts_a: dict, facts_b: dict) -> None:  # type: ignore[type-arg]
    """Whatever names, shapes and facts meet: no error, nothing lost, and parts of a pair have the sizes that they say."""
    first, second = _checkpoint(a, facts_a), _checkpoint(b, facts_b)
    found = align_checkpoints(first, second)
    assert first.tensors.keys() <= _accounted(found, "a")
    assert second.tensors.keys() <= _accounted(found, "b")
    names = [pair.name for pair in found.pairs]
    assert len(set(names)) == len(names)
    for pair in found.pairs:
        for tensor in (pair.a, pair.b):
            assert sum(box.numel for box in tensor.boxes) == tensor.numel


@given(_TENSORS, _FACTS)
def test_a_checkpoint_is_itself(a: list, facts: dict) -> None:  # type: ignore[type-arg]
    """Every tensor with itself, whole."""
    made = _checkpoint(a, facts)
    found = align_checkpoints(made, made)
    assert [label(pair.a) for pair in found.pairs] == list(made.tensors)
    assert all(pair.a is pair.b for pair in found.pairs)
    assert (found.only_a, found.only_b, found.left_out) == ([], [], [])
