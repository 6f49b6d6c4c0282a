"""Layer and kind of parameters, by the names that frameworks give them."""

from __future__ import annotations

import pytest

from msprobe_engine.align.parameters.parameter_kinds import kind_of, layer_of
from msprobe_engine.core.text.words import size
from msprobe_engine.report.checkpoint.text import ranges

NAMES = (
    ("decoder.layers.7.self_attention.linear_qkv.weight", 7, "attention"),
    ("decoder.layers.7.self_attention.linear_qkv.layer_norm_weight", 7, "norm"),
    ("decoder.layers.0.mlp.linear_fc1.weight", 0, "mlp"),
    ("decoder.layers.3.mlp.router.weight", 3, "router"),
    ("decoder.layers.3.mlp.experts.local_experts.2.linear_fc1.weight", 3, "expert"),
    ("decoder.layers.3.mlp.shared_experts.linear_fc2.weight", 3, "shared expert"),
    ("embedding.word_embeddings.weight", None, "embedding"),
    ("output_layer.weight", None, "output"),
    ("decoder.final_layernorm.weight", None, "norm"),
    ("model.layers.12.self_attn.q_proj.weight", 12, "attention"),
    ("model.layers.12.mlp.gate_proj.weight", 12, "mlp"),
    ("model.layers.12.mlp.gate.weight", 12, "router"),
    ("model.layers.1.block_sparse_moe.experts.3.w1.weight", 1, "expert"),
    ("model.layers.12.post_attention_layernorm.weight", 12, "norm"),
    ("model.embed_tokens.weight", None, "embedding"),
    ("lm_head.weight", None, "output"),
    ("transformer.h.5.attn.c_attn.weight", 5, "attention"),
    ("transformer.h.5.ln_1.weight", 5, "norm"),
    ("transformer.wte.weight", None, "embedding"),
    ("layers.2.attention.wq.weight", 2, "attention"),
    ("layers.2.feed_forward.w1.weight", 2, "mlp"),
    ("tok_embeddings.weight", None, "embedding"),
    ("fc.bias", None, "other"),
)


@pytest.mark.parametrize(("name", "layer", "kind"), NAMES)
def test_what_a_name_says(name: str, layer: int | None, kind: str) -> None:
    """Megatron, Hugging Face, torchtitan: the summary puts a parameter where its readers would."""
    assert (layer_of(name), kind_of(name)) == (layer, kind)


def test_numbers_for_people() -> None:
    """Runs of layers and sizes are short."""
    assert ranges((7, 0, 1, 2)) == "0-2, 7"
    assert ranges(()) == "-"
    assert [size(n) for n in (0, 999, 1500, 2_500_000, 140_000_000_000, 3 * 10**12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "140.0 GB",
        "3.0 TB",
    ]
