"""Models of the set of bugs from the field: a GPT in plain torch, with or without experts, and small models of Transformers.

Every part that a reported bug sits in is a function or an attribute of its own, so that a case changes one of them and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, LAYERS, HEADS, GROUPS, LENGTH, EXPERTS = 256, 64, 2, 4, 2, 32, 4


@dataclass
class Config:
    """Of the GPT in plain torch."""

    base: float = 10000.0
    eps: float = 1e-6
    dropout: float = 0.0
    experts: int = 0
    top: int = 2
    auxiliary: float = 0.01
    tied: bool = False
    bias: bool = True
    fused: bool = True
    checkpoint: str = ""
    query_norm: bool = False


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of positions, computed in float32."""

    inverse: Tensor

    def __init__(self, size: int, base: float) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / base ** (torch.arange(0, size, 2).float() / size), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None, :, None].float() * self.inverse.float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def repeated(x: Tensor, times: int) -> Tensor:
    """Keys or values once per head of their group."""
    return x.repeat_interleave(times, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, fused: bool) -> Tensor:
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    return torch.matmul(torch.softmax(scores.float(), -1).to(q.dtype), v)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = HIDDEN // HEADS
        self.q = nn.Linear(HIDDEN, HEADS * self.size, bias=config.bias)
        self.k = nn.Linear(HIDDEN, GROUPS * self.size, bias=config.bias)
        self.v = nn.Linear(HIDDEN, GROUPS * self.size, bias=config.bias)
        self.o = nn.Linear(HEADS * self.size, HIDDEN, bias=False)
        self.q_norm = RMSNorm(self.size, config.eps) if config.query_norm else nn.Identity()
        self.k_norm = RMSNorm(self.size, config.eps) if config.query_norm else nn.Identity()
        self.scale, self.fused = self.size**-0.5, config.fused

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], allowed: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q(x).view(batch, length, HEADS, self.size)).transpose(1, 2)
        k = self.k_norm(self.k(x).view(batch, length, GROUPS, self.size)).transpose(1, 2)
        v = self.v(x).view(batch, length, GROUPS, self.size).transpose(1, 2)
        cos, sin = turn
        q, k = q * cos + rotated(q) * sin, k * cos + rotated(k) * sin
        y = attend(q, repeated(k, HEADS // GROUPS), repeated(v, HEADS // GROUPS), allowed, self.scale, self.fused)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width: int = 2 * HIDDEN) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((HIDDEN, width), (HIDDEN, width), (width, HIDDEN)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A router in float32 and experts that take the tokens that chose them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, config.experts, bias=False)
        self.experts = nn.ModuleList(MLP(HIDDEN) for _ in range(config.experts))
        self.top, self.auxiliary = config.top, torch.zeros(())

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.softmax(self.router(x).float(), -1)

    def chosen(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = probabilities.topk(self.top, -1)
        return weights / weights.sum(-1, keepdim=True), experts

    def balance(self, probabilities: Tensor, experts: Tensor) -> Tensor:
        share = F.one_hot(experts, probabilities.shape[-1]).float().mean((0, 1))
        return probabilities.shape[-1] * (share * probabilities.mean(0)).sum()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probabilities = self.probabilities(flat)
        weights, experts = self.chosen(probabilities)
        self.auxiliary = self.balance(probabilities, experts)
        return self.mix(flat, weights, experts).view_as(x)

    def mix(self, flat: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What the chosen experts of each token give, by its weights."""
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(experts == number)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None].to(flat.dtype))
        return out


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(HIDDEN, config.eps), RMSNorm(HIDDEN, config.eps)
        self.attention = Attention(config)
        self.mlp: nn.Module = Experts(config) if config.experts else MLP()
        self.drop1, self.drop2 = nn.Dropout(config.dropout), nn.Dropout(config.dropout)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], allowed: Tensor) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x), turn, allowed))
        return x + self.drop2(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding, self.rotary = nn.Embedding(VOCAB, HIDDEN), Rotary(HIDDEN // HEADS, config.base)
        self.layers = nn.ModuleList(Block(config) for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(HIDDEN, config.eps), nn.Linear(HIDDEN, VOCAB, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * LAYERS) if name.endswith(("o.weight", "down.weight")) else 1))
            elif name.endswith("bias"):
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight

    def allowed(self, batch: dict[str, Tensor]) -> Tensor:
        """Which keys a query sees: earlier ones of its own document that are no padding."""
        length = batch["tokens"].shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        documents = batch["documents"]
        same = documents[:, :, None] == documents[:, None, :]
        seen = (causal & same & batch["mask"][:, None, :].bool()) | torch.eye(length, dtype=torch.bool)
        return seen[:, None]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embedding(batch["tokens"])
        turn, allowed = self.rotary(x, batch["positions"]), self.allowed(batch)
        for layer in self.layers:
            if self.config.checkpoint:
                x = torch.utils.checkpoint.checkpoint(layer, x, turn, allowed, use_reentrant=self.config.checkpoint == "reentrant")
            else:
                x = layer(x, turn, allowed)
        return self.head(self.norm(x))


def transformers_model(family: str, changes: dict[str, Any], attention: str) -> nn.Module:
    """A small model of Transformers, from its config class."""
    import transformers

    common: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 4 * LENGTH,
    }
    experts = {"output_router_logits": True, "router_aux_loss_coef": 0.01, "num_experts_per_tok": 2}
    table: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("Llama", {**sizes, "rms_norm_eps": 1e-6}),
        "qwen2": ("Qwen2", {**sizes, "rms_norm_eps": 1e-6}),
        "qwen3": ("Qwen3", {**sizes, "head_dim": HIDDEN // HEADS, "rms_norm_eps": 1e-6}),
        "gpt2": (
            "GPT2",
            {
                "n_embd": HIDDEN,
                "n_layer": LAYERS,
                "n_head": HEADS,
                "n_positions": 4 * LENGTH,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
        "mixtral": ("Mixtral", {**sizes, **experts, "num_local_experts": EXPERTS, "intermediate_size": HIDDEN}),
        "qwen2_moe": (
            "Qwen2Moe",
            {
                **sizes,
                **experts,
                "num_experts": EXPERTS,
                "moe_intermediate_size": HIDDEN,
                "shared_expert_intermediate_size": HIDDEN,
                "norm_topk_prob": True,
            },
        ),
    }
    name, own = table[family]
    config = getattr(transformers, f"{name}Config")(**{**common, **own, **changes}, attn_implementation=attention, use_cache=False)
    made: nn.Module = getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")(config)
    return made
