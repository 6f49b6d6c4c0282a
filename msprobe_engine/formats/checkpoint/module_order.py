"""The order in which the usual models define their parameters, from their names alone: safetensors files are sorted by name.

The tables follow the module definitions of transformers (``models/{llama,mistral,qwen2,qwen3,gemma2,gpt2,bert,roberta}/modeling_*.py``). A
model with other words in its names has no order here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msprobe_engine.core.names import is_number

Item = TypeVar("Item")

# A module's own parameters come before those of the modules in it.
_LLAMA = """weight bias model base_model language_model embed_tokens layers self_attn q_proj k_proj v_proj qkv_proj o_proj q_norm k_norm
mlp gate gate_proj up_proj gate_up_proj down_proj shared_expert shared_expert_gate
input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm norm lm_head score"""
_GPT2 = "weight bias transformer wte wpe h ln_1 attn c_attn ln_2 mlp c_fc c_proj ln_f lm_head score"
_BERT = """weight bias bert roberta embeddings word_embeddings position_embeddings token_type_embeddings encoder layer
attention self query key value
intermediate output dense LayerNorm pooler cls predictions transform decoder seq_relationship classifier out_proj"""
_FAMILIES = tuple({word: rank for rank, word in enumerate(text.split())} for text in (_LLAMA, _GPT2, _BERT))


def in_module_order(items: Sequence[Item], name_of: Callable[[Item], str]) -> list[Item] | None:
    """`items` as the model defines them; None: the model is none of the known ones."""
    split = [(name_of(item).split("."), item) for item in items]
    words = {word for parts, _ in split for word in parts if not is_number(word)}
    for family in _FAMILIES:
        if words <= family.keys():
            ranked = [([(int(w), 0) if is_number(w) else (-1, family[w]) for w in parts], n, item) for n, (parts, item) in enumerate(split)]
            return [item for _, _, item in sorted(ranked, key=lambda entry: entry[:2])]
    return None
