"""Reported bugs in models of Transformers and in how they are used."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
from reported_bugs.case import Fault, Plant, every, in_model, setting_of_model, when_ready
from reported_bugs.faults.in_data import HEAD, LOSS
from reported_bugs.faults.in_models import ALL, HF, TWO, interleaved
from reported_bugs.faults.in_updates import UPDATE
from reported_bugs.training import Batch, Program, Setting
from torch import Tensor

LLAMA, GPT2, QWEN2, QWEN3 = Setting("llama"), Setting("gpt2"), Setting("qwen2"), Setting("qwen3")
MIXTRAL, QWEN_MOE = Setting("mixtral"), Setting("qwen2_moe")
EAGER = Setting("llama", attention="eager")
OWN = Setting("llama", form="loss of the model")
OWN_MICRO = Setting("llama", form="loss of the model", micro=2)
WINDOW: tuple[tuple[str, Any], ...] = (("use_sliding_window", True), ("sliding_window", 8), ("max_window_layers", 0))


def code_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def other_code(family: str, name: str, make: Any) -> Plant:
    """Another function in a model's file; `make` gets the right one."""

    def plant(program: Program) -> None:
        def change(_config: dict[str, Any]) -> None:
            setattr(code_of(family), name, make(getattr(code_of(family), name)))

        program.configure.append(change)

    return plant


def wrong_repeat(_own: Any) -> Any:
    def repeat(states: Tensor, times: int) -> Tensor:
        return states.repeat(1, times, 1, 1)

    return repeat


def frequencies_cast(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()


def norms_narrow(model: Any) -> None:
    for norm in every(model, "LlamaRMSNorm"):
        norm.forward = lambda x, norm=norm: norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))


def eager_not_upcast(own: Any) -> Any:
    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_more: Any) -> Any:
        code = code_of("llama")
        key, value = code.repeat_kv(key, module.num_key_value_groups), code.repeat_kv(value, module.num_key_value_groups)
        scores = torch.matmul(query, key.transpose(2, 3)) * scaling
        weights = torch.nn.functional.softmax(scores if mask is None else scores + mask, dim=-1)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    assert own
    return attention


def no_mask(p: Program) -> None:
    own = p.inputs
    p.inputs = lambda batch: {key: value for key, value in own(batch).items() if key != "attention_mask"}  # type: ignore[method-assign]


def inverted_mask(p: Program) -> None:
    own = p.inputs
    p.inputs = lambda batch: {**own(batch), "attention_mask": 1 - batch["mask"]}  # type: ignore[method-assign]


def no_positions(p: Program) -> None:
    own = p.inputs
    p.inputs = lambda batch: {**own(batch), "position_ids": torch.arange(batch["tokens"].shape[1])[None]}  # type: ignore[method-assign]


def causal_mask_only(p: Program) -> None:
    own = p.inputs

    def inputs(batch: Batch) -> dict[str, Any]:
        return own({**batch, "documents": torch.zeros_like(batch["documents"])})

    p.inputs = inputs  # type: ignore[method-assign]


def positions_one_off(p: Program) -> None:
    own = p.inputs
    p.inputs = lambda batch: {**own(batch), "position_ids": batch["positions"] + 1}  # type: ignore[method-assign]


def shifted_by_both(p: Program) -> None:
    p.loss_of_model = lambda batch, tokens: p.net(**p.inputs(batch), labels=batch["labels"], num_items_in_batch=tokens).loss  # type: ignore[method-assign]


def items_not_passed(p: Program) -> None:
    own = p.loss_of_model
    p.loss_of_model = lambda batch, _tokens: own(batch, None) / p.setting.micro  # type: ignore[method-assign,arg-type]


def pads_in_labels(p: Program) -> None:
    own = p.loss_of_model
    p.loss_of_model = lambda batch, tokens: own({**batch, "labels": batch["labels"].clamp_min(0)}, tokens)  # type: ignore[method-assign]


def norm_off(name: str) -> Any:
    def edit(model: Any) -> None:
        for layer in model.model.layers:
            getattr(layer.self_attn, name).forward = lambda x: x

    return edit


def biases_zero(model: Any) -> None:
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.bias.data.zero_()


def biases_drawn(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.bias.data.copy_(torch.randn(part.bias.shape, generator=generator) * 0.02)


def routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def router_gives_probabilities(model: Any) -> None:
    for router in routers(model):
        own = router.forward
        router.forward = lambda x, own=own: (lambda found: (found[0].float().softmax(-1), *found[1:]))(own(x))


def router_narrow(model: Any) -> None:
    for router in routers(model):

        def forward(x: Tensor, router: Any = router) -> Any:
            logits = torch.nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
            values, found = torch.topk(torch.softmax(logits, -1), router.top_k, -1)
            return logits, values / values.sum(-1, keepdim=True), found

        router.forward = forward


def not_renormalised(model: Any) -> None:
    for router in routers(model):

        def forward(x: Tensor, router: Any = router) -> Any:
            logits = torch.nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
            values, found = torch.topk(torch.softmax(logits.float(), -1), router.top_k, -1)
            return logits, values, found

        router.forward = forward


def fused_halves_swapped(model: Any) -> None:
    for experts in every(model, "MixtralExperts"):
        experts.gate_up_proj.data = torch.cat(experts.gate_up_proj.data.chunk(2, 1)[::-1], 1)


def shared_gate_open(model: Any) -> None:
    """The shared expert is added without its gate: a gate of zero weights gives one half, and here it gives one."""
    for layer in model.model.layers:
        own = layer.mlp.shared_expert_gate.forward
        layer.mlp.shared_expert_gate.forward = lambda x, own=own: own(x) + 20.0


def padding_balanced(p: Program) -> None:
    """Tokens of padding count in the loss that balances experts."""
    own = code_of("mixtral").load_balancing_loss_func
    code_of("mixtral").load_balancing_loss_func = lambda logits, count, top, mask=None: own(logits, count, top, None)
    assert p


def input_gradients_off(p: Program) -> None:
    p.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    p.model.model.embed_tokens.weight.requires_grad_(False)


def input_gradients_on(p: Program) -> None:
    p.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    p.model.enable_input_require_grads()


ATTENTION = r"mask|layers\.0\.self_attn|scaled_dot_product|attention_mask|mask"
ROUTER = r"layers\.0\.mlp|gate|router|topk|softmax"

CASES = (
    Fault(
        "llama: rotary base",
        LLAMA,
        setting_of_model(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
        r"rotary_emb",
        "rope_theta of a config not read",
        (*ALL, "monitor"),
    ),
    Fault("llama: rotary frequencies cast", LLAMA, in_model(frequencies_cast), r"rotary_emb", f"{HF}#29285", ALL),
    Fault(
        "llama: rotary pairs interleaved",
        LLAMA,
        other_code("llama", "rotate_half", lambda _own: interleaved),
        r"layers\.0\.self_attn|interleaved",
        "weights of Meta's layout",
        ALL,
    ),
    Fault(
        "llama: keys repeated in the wrong order",
        EAGER,
        other_code("llama", "repeat_kv", wrong_repeat),
        r"layers\.0\.self_attn|repeat",
        "repeat for repeat_interleave",
        ALL,
    ),
    Fault("llama: eps of norms", LLAMA, setting_of_model(rms_norm_eps=1e-5), r"layers\.0\.input_layernorm", "default of the config", ALL),
    Fault("llama: norms in bf16", LLAMA, in_model(norms_narrow), r"layernorm|norm", "fused norm without upcast", ALL),
    Fault(
        "llama: softmax in bf16",
        EAGER,
        other_code("llama", "eager_attention_forward", eager_not_upcast),
        r"layers\.0\.self_attn|softmax",
        "eager attention without upcast",
        ALL,
    ),
    Fault(
        "llama: mask not passed",
        LLAMA,
        when_ready(no_mask),
        ATTENTION + r"|in find_packed|module model, Tensor.__sub__",
        "attention_mask left out",
        ALL,
    ),
    Fault("llama: mask inverted", LLAMA, when_ready(inverted_mask), ATTENTION + "|rsub|__sub__", "1 for masked", TWO),
    Fault(
        "llama: positions not reset",
        replace(LLAMA, packed=True),
        when_ready(no_positions),
        r"rotary_emb|arange|position",
        "huggingface/trl#3526",
        ALL,
    ),
    Fault(
        "llama: documents see each other",
        replace(LLAMA, packed=True),
        when_ready(causal_mask_only),
        ATTENTION + "|zeros_like|__eq__|in allowed",
        "huggingface/trl#784",
        ALL,
    ),
    Fault(
        "llama: labels shifted by both",
        OWN,
        when_ready(shifted_by_both),
        LOSS + "|pad|labels",
        "shifted labels given to labels=",
        (*ALL, "monitor"),
        coarse=HEAD + "|lm_head",
    ),
    Fault(
        "llama: items of the batch not passed",
        OWN_MICRO,
        when_ready(items_not_passed),
        LOSS,
        f"{HF}#34191",
        (*ALL, "monitor"),
        coarse=HEAD + "|lm_head",
    ),
    Fault("llama: pads in the labels", OWN, when_ready(pads_in_labels), LOSS + "|clamp|labels", "pad token not ignored", TWO),
    Fault(
        "llama: no input gradients under recomputation",
        LLAMA,
        when_ready(input_gradients_off),
        r"layers\.[01]|embed|requires|checkpoint",
        f"{HF} enable_input_require_grads",
        ALL,
    ),
    Fault(
        "llama: untied head",
        replace(LLAMA, changes=(("tie_word_embeddings", True),)),
        setting_of_model(tie_word_embeddings=False),
        r"lm_head|embed_tokens",
        f"{HF} tie_word_embeddings",
        ALL,
    ),
    Fault(
        "llama: beta2",
        LLAMA,
        lambda p: setattr(p, "setting", replace(p.setting, optimizer=(("betas", (0.9, 0.999)),))),
        UPDATE + "|parameter|weight",
        "default betas",
        ("mix", "L0", "monitor"),
    ),
    Fault("gpt2: other gelu", GPT2, setting_of_model(activation_function="gelu"), r"h\.0\.mlp|gelu", "gelu for gelu_new", ALL),
    Fault(
        "gpt2: other gelu, fp32",
        replace(GPT2, dtype="fp32"),
        setting_of_model(activation_function="gelu"),
        r"h\.0\.mlp|gelu",
        "gelu for gelu_new",
        ALL,
    ),
    Fault("gpt2: eps of norms", GPT2, setting_of_model(layer_norm_epsilon=1e-6), r"h\.0\.ln_1|layer_norm\.0", "layer_norm_epsilon", ALL),
    Fault(
        "gpt2: scores scaled by layer",
        GPT2,
        setting_of_model(scale_attn_by_inverse_layer_idx=True),
        r"h\.1\.attn|scaled_dot_product_attention\.1",
        "scale_attn_by_inverse_layer_idx",
        ALL,
    ),
    Fault("gpt2: scores not scaled", GPT2, setting_of_model(scale_attn_weights=False), r"h\.0\.attn|scaled_dot", "scale_attn_weights", TWO),
    Fault(
        "gpt2: positions one off",
        GPT2,
        when_ready(positions_one_off),
        r"wpe|embedding|position|__add__",
        "left padding without position_ids",
        ALL,
    ),
    Fault("gpt2: attention dropout on", GPT2, setting_of_model(attn_pdrop=0.1), r"h\.0\.attn|scaled_dot|dropout", "dropout left on", ALL),
    Fault("gpt2: untied head", GPT2, setting_of_model(tie_word_embeddings=False), r"lm_head|wte", "tie_word_embeddings", TWO),
    Fault(
        "qwen2: window one off",
        replace(QWEN2, changes=WINDOW),
        setting_of_model(**{**dict(WINDOW), "sliding_window": 9}),
        ATTENTION + r"|with input.1 = 9",
        "sliding window one off",
        ALL,
    ),
    Fault(
        "qwen2: biases not loaded",
        QWEN2,
        in_model(biases_drawn),
        r"layers\.0\.self_attn\.[qkv]_proj|linear\.[0-2]\.",
        "biases of another checkpoint",
        ALL,
    ),
    Fault("qwen3: norm of queries off", QWEN3, in_model(norm_off("q_norm")), r"q_norm|layers\.0\.self_attn", "ports of Qwen3", ALL),
    Fault("qwen3: norm of keys off", QWEN3, in_model(norm_off("k_norm")), r"k_norm|layers\.0\.self_attn", "ports of Qwen3", TWO),
    Fault("mixtral: softmax twice in the balance", MIXTRAL, in_model(router_gives_probabilities), ROUTER, f"{HF}#45120", (*ALL, "monitor")),
    Fault("mixtral: router in bf16", MIXTRAL, in_model(router_narrow), ROUTER, "router in the model's dtype", ALL),
    Fault("mixtral: weights not normalised", MIXTRAL, in_model(not_renormalised), ROUTER + "|div", "router normalisation", ALL),
    Fault(
        "mixtral: balance weighted ten times",
        MIXTRAL,
        setting_of_model(router_aux_loss_coef=0.1),
        r"auxiliary|aux|loss|__r?mul__|gate|router",
        "router_aux_loss_coef",
        (*ALL, "monitor"),
    ),
    Fault(
        "mixtral: padding balanced",
        MIXTRAL,
        when_ready(padding_balanced),
        r"load_balancing|balance|mean|softmax|aux|gate|__truediv__",
        f"{HF} load_balancing_loss_func without mask",
        ALL,
    ),
    Fault("mixtral: one expert", MIXTRAL, setting_of_model(num_experts_per_tok=1), ROUTER, "top_k", TWO),
    Fault("mixtral: gate and up swapped", MIXTRAL, in_model(fused_halves_swapped), r"layers\.0\.mlp", "fused experts", ALL),
    Fault("qwen2_moe: weights not normalised", QWEN_MOE, setting_of_model(norm_topk_prob=False), ROUTER + "|div", "norm_topk_prob", ALL),
    Fault(
        "qwen2_moe: shared expert not gated",
        QWEN_MOE,
        in_model(shared_gate_open),
        r"layers\.0\.mlp|sigmoid|__add__",
        "shared_expert_gate",
        ALL,
    ),
)
