"""The order in which Megatron's modules register their parameters, for checkpoints that keep names but not the order.

Sources: the constructors of core/models/gpt/gpt_model.py, core/transformer/transformer_block.py, transformer_layer.py, attention.py,
multi_latent_attention.py, mlp.py, moe/moe_layer.py (megatron-core 0.12 to 0.19) and, inside of a fused linear layer, of Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msprobe_engine.formats.checkpoint.megatron.groups import Parameter
from msprobe_engine.formats.checkpoint.megatron.numbering import expert_number, local_layer

_FRONT = ("embedding.word_embeddings", "embedding.position_embeddings", "embedding.tokentype_embeddings", "embedding.")
_BACK = ("final_layernorm", "final_norm", "mtp.", "lm_head", "output_layer")
_ATTENTION = (
    "linear_proj", "core_attention", "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj",
    "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm",
)  # fmt: skip
_MLP = ("router", "linear_fc1", "linear_fc2", "experts", "shared_experts.linear_fc1", "shared_experts.linear_fc2", "shared_experts.gate")
_AHEAD = ("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm")
"""Of a layer that predicts tokens further ahead (core/transformer/multi_token_prediction.py)."""
_KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


def orders(parameters: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """The parameters in each order that a rank may have registered them in, the likeliest first.

    They differ in whether the norm before attention is a module of its own (before all of the attention) or a part of the projection, and
    in whether experts are one after the other or each of their two layers is one module.
    """
    seen: set[tuple[int, ...]] = set()
    for norm_first in (False, True):
        for by_layer in (False, True):
            indices = tuple(sorted(range(len(parameters)), key=_key(parameters, norm_first, by_layer)))
            if indices not in seen:
                seen.add(indices)
                yield [parameters[i] for i in indices]


def _key(parameters: Sequence[Parameter], norm_first: bool, by_layer: bool) -> Callable[[int], tuple[int, ...]]:
    def key(index: int) -> tuple[int, ...]:
        name = parameters[index].name
        _, layer, rest = local_layer(name)
        if layer is None:
            bare = name.removeprefix("decoder.").removeprefix("encoder.")
            front = bare.startswith(_FRONT)
            return (0 if front else 2, _find(_FRONT if front else _BACK, bare), _kind(name))
        if name.startswith("mtp."):
            place = _find(_AHEAD, rest)
            inside = rest.partition(".")[2] if place in (3, 4) else ""
            return (2, _BACK.index("mtp."), layer, place, *(_in_layer(inside, norm_first, by_layer) if inside else (_kind(rest),)))
        return (1, layer, *_in_layer(rest, norm_first, by_layer))

    return key


def _in_layer(rest: str, norm_first: bool, by_layer: bool) -> tuple[int, ...]:
    if rest.startswith("input_layernorm") or (norm_first and rest.startswith("self_attention.linear_qkv.layer_norm")):
        return (0, 0, _kind(rest))
    if rest.startswith("self_attention."):
        return (1, _find(_ATTENTION, rest.removeprefix("self_attention.")), _kind(rest))
    if rest.startswith(("pre_cross_attn_layernorm", "cross_attention.")):
        return (2, int(rest.startswith("cross")), _find(_ATTENTION, rest.removeprefix("cross_attention.")), _kind(rest))
    if rest.startswith(("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm")):
        return (3, 0, _kind(rest))
    if rest.startswith("mlp."):
        inside = rest.removeprefix("mlp.")
        number = expert_number(rest)
        if number is not None:
            layer = 0 if ".linear_fc1." in rest else 1
            return (4, _MLP.index("experts"), *((layer, number) if by_layer else (number, layer)), _kind(rest))
        return (4, _find(_MLP, inside), _kind(rest))
    return (5, 0, _kind(rest))


def _find(table: Sequence[str], text: str) -> int:
    return next((i for i, start in enumerate(table) if text.startswith(start)), len(table))


def _kind(name: str) -> int:
    return _find(_KINDS, name.rpartition(".")[2])
