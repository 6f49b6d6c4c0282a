"""What a parameter is for, told by its name: the layer it is in and its kind. For summaries; nothing is compared by this."""

from __future__ import annotations

import re
from functools import lru_cache

ATTENTION, MLP, NORM, EMBEDDING, OUTPUT, EXPERT, SHARED_EXPERT, ROUTER, OTHER = (
    "attention", "mlp", "norm", "embedding", "output", "expert", "shared expert", "router", "other",
)  # fmt: skip

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|encoder_layers|decoder_layers|cell|mtp)\.(\d+)(?:\.|$)")
_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (ROUTER, r"router|expert_bias|\.mlp\.gate\.|block_sparse_moe\.gate\.|e_score_correction_bias|(^|\.)gate\.(weight|wg|bias)"),
        (NORM, r"norm|(^|\.)ln_?(\d|f|attn|mlp)|layer_norm"),
        (SHARED_EXPERT, r"shared_expert"),
        (EXPERT, r"experts?\b|expert_"),
        (EMBEDDING, r"embed|(^|\.)wte\b|(^|\.)wpe\b|tok_embeddings|rotary|inv_freq"),
        (OUTPUT, r"lm_head|output_layer|(^|\.)output\.weight|embed_out|score\."),
        (ATTENTION, r"attn|attention|linear_qkv|linear_proj|query|key_value|[._](wq|wk|wv|wo)\b|[qkvo]_proj|mixer"),
        (MLP, r"mlp|feed_forward|ffn|linear_fc|dense_h_to|dense_4h|(gate|up|down)_proj|\.(w1|w2|w3|fc1|fc2|fc_in|fc_out)\b"),
    )
)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The kind of a parameter: ``attention``, ``mlp``, ..."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS if pattern.search(lower)), OTHER)


@lru_cache(maxsize=4096)
def layer_of(name: str) -> int | None:
    """The number of the layer a parameter is in, None outside of layers."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None
