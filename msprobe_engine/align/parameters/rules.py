"""Where the parameters of transformer models lie, whatever a framework calls them: one table of names.

A **slot** is a neutral place (``layers.7.attention.q.weight``, ``layers.7.experts.3.gate.weight``); a stored tensor fills one slot or,
where parameters are fused, several. `form` says how they lie in it. Sources: Megatron-LM / megatron-core 0.16.1 (``core/transformer``,
``core/models/gpt``, ``legacy/model``), transformers 5.23 (``models/*/modeling_*.py``, ``conversion_mapping.py``) and older releases of it,
torchtitan 0.3, MindSpeed-LLM. A name that is in no table keeps its own spelling as its slot.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PLAIN = "plain"
CONV = "transposed"
GROUPED_QKV = "qkv by group"
BLOCK_QKV = "qkv in blocks"
CONV_QKV = "qkv in blocks, transposed"
FC1 = "first linear layer"
HALVES = "gate and up"
ROTARY = "rotary pairs"
LATENT_DOWN = "q_down and kv_down"
STACK = "stacked experts"
STACK_HALVES = "stacked experts, gate and up"
STACK_TURNS = "stacked experts, rows of gate and up in turns"
WIDE_FC1 = "experts in one matrix, gate and up"
WIDE_FC2 = "experts in one matrix"


class Rule(NamedTuple):
    """What a name inside of a layer means: a slot without its layer, and how it lies."""

    slot: str
    form: str = PLAIN


class Spot(NamedTuple):
    """A parameter's place: ``layers.7.`` or "", the rule, the expert or None, and the last word of the name (``weight``)."""

    layer: str
    rule: Rule
    expert: int | None
    kind: str


_QKV, _OUT = "attention.qkv", Rule("attention.out")
_ATTENTION = {
    "linear_qkv": Rule(_QKV, GROUPED_QKV),
    "query_key_value": Rule(_QKV, GROUPED_QKV),
    "wqkv": Rule(_QKV, GROUPED_QKV),
    "qkv_proj": Rule(_QKV, BLOCK_QKV),
    "W_pack": Rule(_QKV, BLOCK_QKV),
    "Wqkv": Rule(_QKV, BLOCK_QKV),
    "c_attn": Rule(_QKV, CONV_QKV),
    "q_proj": Rule("attention.q"),
    "k_proj": Rule("attention.k"),
    "v_proj": Rule("attention.v"),
    "linear_q": Rule("attention.q"),
    "linear_k": Rule("attention.k"),
    "linear_v": Rule("attention.v"),
    "wq": Rule("attention.q", ROTARY),
    "wk": Rule("attention.k", ROTARY),
    "wv": Rule("attention.v"),
    **dict.fromkeys(("linear_proj", "dense", "o_proj", "out_proj", "wo"), _OUT),
    "c_proj": Rule("attention.out", CONV),
    **dict.fromkeys(("q_norm", "q_layernorm", "q_a_layernorm", "q_a_norm"), Rule("attention.q_norm")),
    **dict.fromkeys(("k_norm", "k_layernorm"), Rule("attention.k_norm")),
    **dict.fromkeys(("kv_layernorm", "kv_a_layernorm", "kv_norm"), Rule("attention.kv_norm")),
    # Multi-latent attention. Without a low rank of its own the query is `q_proj` in transformers, `linear_q_proj` in Megatron.
    "linear_q_proj": Rule("attention.q"),
    **dict.fromkeys(("linear_q_down_proj", "q_a_proj", "wq_a"), Rule("attention.q_down")),
    **dict.fromkeys(("linear_q_up_proj", "linear_qb", "q_b_proj", "wq_b"), Rule("attention.q_up")),
    **dict.fromkeys(("linear_kv_down_proj", "kv_a_proj_with_mqa", "wkv_a"), Rule("attention.kv_down")),
    **dict.fromkeys(("linear_kv_up_proj", "linear_kvb", "kv_b_proj", "wkv_b"), Rule("attention.kv_up")),
    "sinks": Rule("attention.sinks"),
    "core_attention.softmax_offset": Rule("attention.sinks"),
    # Norms that Transformer Engine keeps inside the linear layer behind them.
    "linear_qkv.layer_norm": Rule("norm1"),
    "linear_q_up_proj.layer_norm": Rule("attention.q_norm"),
    "linear_kv_up_proj.layer_norm": Rule("attention.kv_norm"),
    "linear_proj.post_layernorm": Rule("attention.norm_after"),
}
_UP, _DOWN, _GATE = Rule("up"), Rule("down"), Rule("gate")
_MLP = {
    **dict.fromkeys(("linear_fc1", "dense_h_to_4h"), Rule("up", FC1)),
    **dict.fromkeys(("linear_fc2", "dense_4h_to_h"), _DOWN),
    **dict.fromkeys(("gate_proj", "w1"), _GATE),
    **dict.fromkeys(("up_proj", "w3", "fc1"), _UP),
    **dict.fromkeys(("down_proj", "w2", "fc2"), _DOWN),
    "gate_up_proj": Rule("up", HALVES),
    "c_fc": Rule("up", CONV),
    "c_proj": Rule("down", CONV),
    "linear_fc1.layer_norm": Rule("norm2"),
    "linear_fc2.post_layernorm": Rule("mlp_norm_after"),
}
_QWEN1 = {"w1": _UP, "w2": _GATE}
"""The first Qwen, which has ``c_proj`` for the layer down; others with ``w1`` to ``w3`` do not call their MLP ``mlp``."""
_MOE = {
    **dict.fromkeys(("router", "gate", "gate.wg", "router.gate", "router.layer"), Rule("router")),
    **dict.fromkeys(("router.expert", "gate.e_score_correction", "expert"), Rule("router_bias")),
    **dict.fromkeys(("experts.gate_up_proj", "input_linear"), Rule("experts.up", STACK_HALVES)),
    **dict.fromkeys(("experts.down_proj", "output_linear"), Rule("experts.down", STACK)),
    **dict.fromkeys(("experts.w1", "inner_experts.w1"), Rule("experts.gate", STACK)),
    **dict.fromkeys(("experts.w3", "inner_experts.w3"), Rule("experts.up", STACK)),
    **dict.fromkeys(("experts.w2", "inner_experts.w2"), Rule("experts.down", STACK)),
    "inner_experts.mlp1": Rule("experts.up", STACK_TURNS),
    "inner_experts.mlp2": Rule("experts.down", STACK),
    "experts.experts.linear_fc1": Rule("experts.up", STACK_HALVES),
    "experts.experts.linear_fc2": Rule("experts.down", STACK),
    "shared_expert_gate": Rule("shared_gate"),
    "shared_experts.gate": Rule("shared_gate"),
}
_WIDE = {1: Rule("experts.up", WIDE_FC1), 2: Rule("experts.down", WIDE_FC2)}
_NORMS = {
    **dict.fromkeys(("input_layernorm", "input_norm", "ln_1", "attention_norm", "self_attn_layer_norm"), Rule("norm1")),
    **dict.fromkeys(("pre_mlp_layernorm", "post_attention_norm", "ln_2", "ffn_norm", "final_layer_norm"), Rule("norm2")),
    "post_attention_layernorm": Rule("norm2"),
    "pre_feedforward_layernorm": Rule("norm2"),
    **dict.fromkeys(("post_feedforward_layernorm", "post_mlp_layernorm"), Rule("mlp_norm_after")),
    "post_self_attn_layernorm": Rule("attention.norm_after"),
    "fc1": Rule("mlp.up"),
    "fc2": Rule("mlp.down"),
}
"""What lies in a layer itself: norms, and OPT's linear layers."""
_TOP = {
    **dict.fromkeys(
        ("embed_tokens", "embedding.word_embeddings", "wte", "tok_embeddings", "embed_in", "word_embeddings", "tok_embeddings.embedding"),
        Rule("embedding"),
    ),
    **dict.fromkeys(("embedding.position_embeddings", "wpe", "embed_positions"), Rule("positions")),
    **dict.fromkeys(("final_layernorm", "final_norm", "norm", "ln_f", "final_layer_norm", "norm_out"), Rule("final_norm")),
    **dict.fromkeys(("lm_head", "output_layer", "word_embeddings_for_head", "embed_out", "output"), Rule("output")),
}
_ROOTS = re.compile(r"^(?:model\.|transformer\.|decoder\.|encoder\.|language_model\.|gpt_neox\.|llm\.)+")
_MTP = {
    "enorm": Rule("enorm"),
    "hnorm": Rule("hnorm"),
    "eh_proj": Rule("eh_proj"),
    **dict.fromkeys(("final_layernorm", "shared_head.norm", "mtp_norm"), Rule("final_norm")),
    "shared_head.head": Rule("output"),
    "embed_tokens": Rule("embedding"),
}
"""A layer that predicts further tokens (DeepSeek-V3), beside what every layer has."""
_MTP_LAYER = re.compile(
    r"(?:mtp\.layers|mtp_layers)\.(?P<n>[0-9]{1,9})\.(?P<inner>transformer_layer\.|mtp_model_layer\.)?(?P<rest>.+)", re.DOTALL
)
LAYER = re.compile(r"(?:(?<=\.)|^)(?:layers|h|blocks)\.[0-9]{1,9}\.")
"""Where the layers of a model begin in a name."""
_LAYER = re.compile(r"(?:layers|h|blocks)\.(?P<n>[0-9]{1,9})\.(?P<rest>.+)", re.DOTALL)
_DIMENSIONS = re.compile(r"_E[A-Z]{0,2}$")
"""What torchtitan puts behind the names of experts: their dimensions, ``w1_EFD``."""
_KIND = re.compile(r"(?P<leaf>.+)[._](?P<kind>weight|bias|weight_scale_inv|weight_scale|input_scale)(?P<e>[0-9]{1,9})?")
_HALF = re.compile(r"(?P<name>.*\.(?:weight|bias)[0-9]*)_(?P<half>[wv])", re.DOTALL)
"""Gate (w) and up (v) of Megatron's first linear layer apart, in ``fsdp_dtensor`` (core/transformer/fsdp_dtensor_checkpoint.py)."""
_EXPERT = re.compile(r"(?:experts\.local_experts|local_experts|experts\.experts|experts)\.(?P<e>[0-9]{1,9})\.(?P<leaf>.+)")
_ATTENTION_PATHS = ("self_attn.", "self_attention.", "attention.qkv_linear.", "attention.", "attn.")
_MLP_PATHS = ("mlp.", "block_sparse_moe.", "feed_forward.", "moe.routed_experts.", "moe.", "ffn.")
_SHARED = ("shared_experts.", "shared_expert.")


def spot_of(name: str) -> Spot | None:
    """The place of a parameter by its name (without wrappers' prefixes); None: in no table.

    >>> spot_of("model.layers.3.self_attn.q_proj.weight")
    Spot(layer='layers.3.', rule=Rule(slot='attention.q', form='plain'), expert=None, kind='weight')
    """
    half = _HALF.fullmatch(name)
    if half is not None:
        spot = spot_of(half["name"])
        if spot is not None and spot.rule.form == FC1:
            return spot._replace(rule=Rule(spot.rule.slot if half["half"] == "v" else f"{spot.rule.slot[:-2]}gate"))
    text = _ROOTS.sub("", name)
    further = _MTP_LAYER.fullmatch(text)
    layer = further or _LAYER.fullmatch(text)
    leaf, kind, expert = _words(layer["rest"] if layer else text)
    if layer is None:
        rule = _TOP.get(leaf)
        return Spot("", rule, None, kind) if rule is not None and expert is None else None
    if text != name and name.startswith("transformer.encoder.") and leaf == "self_attention.query_key_value":
        return Spot(f"layers.{int(layer['n'])}.", Rule(_QKV, BLOCK_QKV), None, kind)  # ChatGLM
    inside = (_MTP[leaf], None) if leaf in _MTP and expert is None else _in_layer(leaf, expert)
    if inside is None:
        return None
    if not kind and inside[0].slot.startswith(("experts", "router_bias")):
        kind = "bias" if inside[0].slot == "router_bias" else "weight"  # parameters of their module, without a linear layer's `.weight`
    return Spot(f"{'mtp' if further else 'layers'}.{int(layer['n'])}.", inside[0], inside[1], kind)


def _words(text: str) -> tuple[str, str, int | None]:
    """Leaf, last word, and the expert's number that Transformer Engine's grouped linear layers put behind it."""
    text = _DIMENSIONS.sub("", text)
    match = _KIND.fullmatch(text)
    if match is None:
        return text, "", None
    return match["leaf"], match["kind"], int(match["e"]) if match["e"] is not None else None


def _in_layer(leaf: str, expert: int | None) -> tuple[Rule, int | None] | None:
    if expert is None and leaf in _NORMS:
        return _NORMS[leaf], None
    for path in _ATTENTION_PATHS:
        if leaf.startswith(path) and expert is None:
            rule = _ATTENTION.get(leaf[len(path) :])
            return (rule, None) if rule is not None else None
    for path in _MLP_PATHS:
        if leaf.startswith(path):
            return _in_mlp(leaf[len(path) :], expert, path)
    return None


def _in_mlp(leaf: str, expert: int | None, path: str) -> tuple[Rule, int | None] | None:
    numbered = _EXPERT.fullmatch(leaf)
    if numbered is not None and expert is None:
        leaf, expert = numbered["leaf"], int(numbered["e"])
    elif expert is not None:
        if leaf == "experts" and expert in _WIDE:
            return _WIDE[expert], None
        if not leaf.startswith("experts."):
            return None
        leaf = leaf[len("experts.") :]
    if expert is not None:
        rule = _MLP.get(leaf)
        return (rule._replace(slot=f"experts.{expert}.{rule.slot}"), expert) if rule is not None else None
    for path in _SHARED:
        if leaf.startswith(path) and leaf[len(path) :] in _MLP:
            rule = _MLP[leaf[len(path) :]]
            return rule._replace(slot=f"shared.{rule.slot}"), None
    if leaf in _MOE:
        return _MOE[leaf], None
    rule = (_QWEN1 if path == "mlp." else _MLP).get(leaf) or _MLP.get(leaf)
    return (rule._replace(slot=rule.slot if rule.slot.startswith(("norm", "mlp_norm")) else f"mlp.{rule.slot}"), None) if rule else None
