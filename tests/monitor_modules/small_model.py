"""A small transformer-like model with everything the module side looks at."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from watched import make

from msprobe_engine.core.settings.schema import LayerFeatureSettings, MonitorSettings
from msprobe_engine.probe.sinks.memory import MemorySink

EVERYTHING = MonitorSettings(
    activations=True, activation_gradients=True, unreduced_gradients=True, micro_batch_gradients=True, parameters=True,
    optimizer_states=True, collectives=True, collective_inputs=True, stack_info=True, print_struct=True,
    layer_features=LayerFeatureSettings(
        attention=("blocks.*.core",), attention_layout="b,s,h,d", linear=("*",), router_weights=("blocks.*.gate",),
        router_logits=("blocks.*.gate",), power_iterations=4,
    ),
)  # fmt: skip


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.core = Core()
        self.drop = nn.Dropout(0.2)
        self.gate = nn.Linear(8, 4, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Linear(8, 8)
        self.reentrant = reentrant

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 4).unbind(2)
        y = self.drop(self.core(q, k, v).flatten(2))
        return x + self.out(self.act(y + 0)) * self.gate(x).softmax(-1).amax(-1, keepdim=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.inner(x)
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class Model(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(reentrant) for _ in range(2)])
        self.head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def train(model: nn.Module, settings: MonitorSettings | None, output: Any = None, steps: int = 3) -> tuple[dict[str, Any], list[Any]]:
    """Weights, losses and random state at the end, and the frames."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    memory, losses = MemorySink(), []
    probe = make(settings, memory, output=output) if settings is not None else None
    if probe is not None:
        probe.attach(model, optimizer)
    for step in range(steps):
        if probe is not None:
            probe.begin_step(step)
        for micro in range(2):
            ids = (torch.arange(12).view(2, 6) + step + micro) % 11
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        if probe is not None:
            probe.end_step({"loss": loss})
    if probe is not None:
        probe.close()
    state = {k: copy.deepcopy(v.to_local() if hasattr(v, "to_local") else v) for k, v in model.state_dict().items()}
    return {**state, "losses": torch.stack(losses), "random": torch.get_rng_state()}, memory.frames


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names whose bytes differ."""
    return [k for k in a if a[k].numpy().tobytes() != b[k].numpy().tobytes()]
