"""Reported bugs in models: rotary embeddings, norms, attention, masks, experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from reported_bugs import models
from reported_bugs.case import Fault, every, in_model, other_function, setting_of_model, when_ready
from reported_bugs.training import Program, Setting
from torch import Tensor
from torch.nn import functional as F

GPT = Setting()
EAGER = Setting(changes=(("fused", False),))
AMP = Setting(dtype="amp")
PACKED = Setting(packed=True)
QUERY_NORM = Setting(changes=(("query_norm", True),))
MOE = Setting(changes=(("experts", 4),))
ALL = ("mix", "L1", "L0")
TWO = ("mix", "L1")


def interleaved(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def inverse_in_bf16(model: Any) -> None:
    model.rotary.inverse = model.rotary.inverse.bfloat16()


def angles_in_bf16(model: Any) -> None:
    def forward(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None].to(torch.bfloat16) * model.rotary.inverse.to(torch.bfloat16)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    model.rotary.forward = forward


def norms_in_low_precision(model: Any) -> None:
    for norm in every(model, models.RMSNorm):
        norm.forward = lambda x, norm=norm: norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps))


def mean_taken_out(model: Any) -> None:
    """LayerNorm's centring where RMSNorm is asked for."""
    norm = model.layers[1].norm2
    own = norm.forward
    norm.forward = lambda x: own(x - x.mean(-1, keepdim=True))


def scale_of_hidden(model: Any) -> None:
    for attention in every(model, models.Attention):
        attention.scale = models.HIDDEN**-0.5


def softmax_in_low_precision(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, fused: bool) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores, -1), v)


def gate_and_up_swapped(model: Any) -> None:
    for mlp in every(model, models.MLP):
        mlp.gate.weight, mlp.up.weight = mlp.up.weight, mlp.gate.weight


def bias_not_loaded(model: Any) -> None:
    for attention in every(model, models.Attention):
        attention.k.bias.data.zero_()
        attention.v.bias.data.zero_()


def key_norm_left_out(model: Any) -> None:
    for attention in every(model, models.Attention):
        attention.k_norm.forward = lambda x: x


def untied(model: Any) -> None:
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())


def no_last_norm(model: Any) -> None:
    model.norm.forward = lambda x: x


def residual_after_norm(model: Any) -> None:
    """The residual is the normed input, in one block."""
    block = model.layers[1]

    def forward(x: Tensor, turn: Any, allowed: Tensor) -> Tensor:
        x = block.norm1(x)
        x = x + block.attention(x, turn, allowed)
        return x + block.mlp(block.norm2(x))

    block.forward = forward


def not_causal(model: Any) -> None:
    own = model.layers[1].attention.forward
    model.layers[1].attention.forward = lambda x, turn, allowed: own(x, turn, torch.ones_like(allowed))


def padding_seen(model: Any) -> None:
    own = model.allowed
    model.allowed = lambda batch: own({**batch, "mask": torch.ones_like(batch["mask"])})


def padding_inverted(model: Any) -> None:
    own = model.allowed
    model.allowed = lambda batch: own({**batch, "mask": 1 - batch["mask"]})


def documents_mixed(model: Any) -> None:
    own = model.allowed
    model.allowed = lambda batch: own({**batch, "documents": torch.zeros_like(batch["documents"])})


def positions_not_reset(model: Any) -> None:
    own = model.forward
    model.forward = lambda batch: own({**batch, "positions": torch.arange(models.LENGTH).expand_as(batch["positions"])})


def rotary_cache_stale(model: Any) -> None:
    """Cosines and sines of the first batch are kept although positions change."""
    own, kept = model.rotary.forward, []

    def forward(x: Tensor, positions: Tensor) -> Any:
        if not kept:
            kept.append(tuple(part.detach() for part in own(x, positions)))
        return kept[0]

    model.rotary.forward = forward


def index_wraps(model: Any) -> None:
    """Rows behind 2^7 wrap around, as an index of too few bits."""
    model.embedding.forward = lambda tokens: F.embedding(tokens % 128, model.embedding.weight)


def kept_input_changed(model: Any) -> None:
    """What the backward pass of a product needs is overwritten after it was used."""
    down = model.layers[1].mlp.down

    def after(_module: Any, inputs: Any, _output: Any) -> None:
        inputs[0].data.mul_(1.5)

    down.register_forward_hook(after)


def heads_not_transposed(model: Any) -> None:
    attention = model.layers[0].attention
    own = attention.o.forward
    attention.o.forward = lambda y: own(y.view(y.shape[0], y.shape[1], models.HEADS, -1).transpose(1, 2).reshape(y.shape))


def residual_not_scaled(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(("o.weight", "down.weight")):
            parameter.data.mul_(2.0)


def mlp_detached(model: Any) -> None:
    own = model.layers[1].mlp.forward
    model.layers[1].mlp.forward = lambda x: own(x.detach())


def dropout_off(program: Program) -> None:
    program.model.eval()


def no_train_after_evaluation(program: Program) -> None:
    """The model stays in evaluation mode after an evaluation between the first two steps."""
    own = program.step

    def step(number: int) -> Tensor:
        if number == 1:
            program.model.eval()
        return own(number)

    program.step = step  # type: ignore[method-assign]


def random_state_not_kept(_program: Program) -> None:
    own = torch.utils.checkpoint.checkpoint
    torch.utils.checkpoint.checkpoint = lambda *args, **more: own(*args, **more, preserve_rng_state=False)  # type: ignore[assignment]


HF = "huggingface/transformers"
ROTARY, NORM0, ATTENTION0 = r"rotary", r"layers\.0\.norm1", r"layers\.0\.attention"
MASK = r"Block\.forward\.0\.input\.2|layers\.0\.attention|scaled_dot_product|in allowed|masked|__and__"

CASES = (
    Fault("rotary base", GPT, setting_of_model(base=500000.0), ROTARY, f"{HF} rope_theta not read from the config", ALL),
    Fault("rotary frequencies cast", GPT, in_model(inverse_in_bf16), ROTARY, f"{HF}#29285, EleutherAI/gpt-neox#1016", ALL),
    Fault("rotary angles in bf16", GPT, in_model(angles_in_bf16), ROTARY, f"{HF}#29285", TWO),
    Fault("rotary angles in bf16, amp", AMP, in_model(angles_in_bf16), ROTARY, f"{HF}#29496", TWO),
    Fault(
        "rotary pairs interleaved",
        GPT,
        other_function("rotated", interleaved),
        rf"{ATTENTION0}|interleaved|rotated",
        "conversion of Llama weights",
        ALL,
    ),
    Fault(
        "keys repeated in the wrong order",
        GPT,
        other_function("repeated", lambda x, n: x.repeat(1, n, 1, 1)),
        rf"{ATTENTION0}|repeat",
        "grouped queries: repeat for repeat_interleave",
        ALL,
    ),
    Fault("norm of keys left out", QUERY_NORM, in_model(key_norm_left_out), r"k_norm|layers\.0\.attention", "ports of Qwen3", ALL),
    Fault("eps of norms", GPT, setting_of_model(eps=1e-5), NORM0, "rms_norm_eps left at its default", ALL),
    Fault("norms in bf16", GPT, in_model(norms_in_low_precision), r"norm", f"{HF} norms without upcast", ALL),
    Fault("a norm takes out the mean", GPT, in_model(mean_taken_out), r"layers\.1\.norm2|mean|__sub__", "LayerNorm for RMSNorm", TWO),
    Fault("scores scaled by the hidden size", GPT, in_model(scale_of_hidden), ATTENTION0 + "|scaled_dot", "wrong softmax_scale", ALL),
    Fault(
        "softmax in bf16",
        EAGER,
        other_function("attend", softmax_in_low_precision),
        ATTENTION0 + "|softmax",
        "eager attention without upcast",
        ALL,
    ),
    Fault("gate and up swapped", GPT, in_model(gate_and_up_swapped), r"layers\.0\.mlp", "conversion of fused weights", ALL),
    Fault(
        "biases not loaded",
        GPT,
        in_model(bias_not_loaded),
        r"layers\.0\.attention\.[kv]|linear\.[12]\.forward",
        "Qwen2 biases of q, k, v",
        ALL,
    ),
    Fault(
        "tied embedding untied",
        replace(GPT, changes=(("tied", True),)),
        in_model(untied),
        r"embedding|head|tied",
        f"{HF} tie_word_embeddings after FSDP",
        ALL,
    ),
    Fault("last norm left out", GPT, in_model(no_last_norm), r"\bnorm\b|head", "port without final norm", TWO),
    Fault("residual after the norm", GPT, in_model(residual_after_norm), r"layers\.1", "BLOOM's residual option", TWO),
    Fault("not causal in one layer", GPT, in_model(not_causal), r"layers\.1\.attention|ones_like", "is_causal lost with a mask", ALL),
    Fault("padding seen", GPT, in_model(padding_seen), MASK + "|ones_like", "attention_mask not passed on", ALL),
    Fault("mask of padding inverted", GPT, in_model(padding_inverted), MASK + "|rsub|__sub__", "1 for masked or for kept", TWO),
    Fault("documents see each other", PACKED, in_model(documents_mixed), MASK + "|zeros_like|__eq__", "huggingface/trl#784, #1230", ALL),
    Fault("positions not reset", PACKED, in_model(positions_not_reset), ROTARY + "|arange|positions", "huggingface/nanoVLM#204", ALL),
    Fault(
        "rotary cache stale",
        PACKED,
        in_model(rotary_cache_stale),
        ROTARY + "|layers\\.0\\.attention|embedding",
        "cached cos and sin",
        ALL,
        1,
    ),
    Fault("index wraps around", GPT, in_model(index_wraps), r"embedding|remainder|__mod__", "int32 index in a kernel", ALL),
    Fault(
        "a saved tensor changed in place",
        GPT,
        in_model(kept_input_changed),
        r"layers\.1\.mlp|linear\.\d+\.backward|mul_",
        ".data written to after use",
        ALL,
    ),
    Fault(
        "heads merged without transposing",
        GPT,
        in_model(heads_not_transposed),
        r"layers\.0\.attention|transpose|reshape",
        "view for transpose",
        TWO,
    ),
    Fault(
        "residual weights not scaled",
        GPT,
        in_model(residual_not_scaled),
        r"layers\.0\.(attention\.o|mlp\.down)|linear\.3\.forward",
        "GPT-2 init",
        TWO,
    ),
    Fault("a branch without gradient", GPT, in_model(mlp_detached), r"layers\.1\.(mlp|norm2)|detach", "detach left in", ALL),
    Fault("dropout off", replace(GPT, changes=(("dropout", 0.1),)), when_ready(dropout_off), r"drop", "model.eval() left on", ALL),
    Fault(
        "no train() after an evaluation",
        replace(GPT, changes=(("dropout", 0.1),)),
        when_ready(no_train_after_evaluation),
        r"drop",
        "evaluation between steps",
        TWO,
        1,
    ),
    Fault(
        "random state not kept in recomputation",
        replace(GPT, changes=(("dropout", 0.1), ("checkpoint", "new"))),
        random_state_not_kept,
        r"drop|recomput|layers\.1|checkpoint",
        "preserve_rng_state=False",
        TWO,
    ),
)
