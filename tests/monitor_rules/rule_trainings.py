"""Small trainings under the probe, healthy ones and such with a planted fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.alerts import Alert
from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.schema import CsvSettings, IncidentSettings, MonitorSettings, ProbeSettings, RuleSettings, SinkSettings
from msprobe_engine.probe.sinks.base import Sink
from msprobe_integrations.torch.monitor.probe import TorchProbe

WIDTH, HEADS, LENGTH, WORDS = 32, 2, 16, 61
EVERYTHING = MonitorSettings(
    activations=True,
    activation_gradients=True,
    unreduced_gradients=True,
    parameters=True,
    optimizer_states=True,
    updates=True,
    digest=True,
    ops=("norm", "min", "max", "mean", "zeros", "nans", "underflow"),
)
ALL_RULES = (RuleSettings(rule="recommended"), RuleSettings(rule="turbulence"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.drop(self.fc2(self.act(self.fc1(self.norm2(x)))))


class Gpt(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Router(nn.Module):
    """Two of four experts per token, by softmax weights."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(experts))
        self.closed: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        if self.closed is not None:
            logits[..., self.closed] = float("-inf")
        weights, chosen = logits.softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            weight = (weights * (chosen == i)).sum(-1, keepdim=True)
            rows = weight[..., 0] > 0
            if rows.any():
                out[rows] += expert(x[rows]) * weight[rows]
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mixture, self.head = nn.Embedding(WORDS, WIDTH), Router(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return self.head(x + self.mixture(x))


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Words that follow each other by a rule, with noise; the same for equal steps."""
    g = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, WORDS, (size, 1), generator=g)
    out = [ids]
    for _ in range(LENGTH):
        noise = torch.randint(0, 3, (size, 1), generator=g)
        out.append((out[-1] * 3 + noise) % WORDS)
    text = torch.cat(out, 1)
    return text[:, :-1], text[:, 1:]


@dataclass
class Step:
    """What a fault may change before and after a backward pass."""

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_factor: float = 1.0


class Recorder(Sink):
    """Keeps the alerts of all frames."""

    name = "recorder"

    def __init__(self) -> None:
        self.alerts: list[Alert] = []
        self.frames = 0

    def write(self, _frame: Frame, alerts: Sequence[Alert]) -> None:
        self.frames += 1
        self.alerts += alerts


def settings(place: Path, rules: Sequence[RuleSettings], monitor: MonitorSettings = EVERYTHING, csv: bool = False) -> ProbeSettings:
    """Everything is watched; nothing is written but CSV files where asked for."""
    return ProbeSettings(
        output_dir=str(place),
        strict=True,
        log_level="silent",
        monitor=monitor,
        rules=tuple(rules),
        sinks=SinkSettings(csv=CsvSettings(enabled=csv)),
        incident=IncidentSettings(enabled=False),
    )


def warm_cosine(step: int, warmup: int, steps: int) -> float:
    """Factor of the learning rate."""
    return (step + 1) / warmup if step < warmup else 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def train(
    place: Path,
    steps: int,
    *,
    until: int | None = None,
    model: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=3e-3, betas=(0.9, 0.95)),
    rules: Sequence[RuleSettings] = ALL_RULES,
    monitor: MonitorSettings = EVERYTHING,
    csv: bool = False,
    seed: int = 0,
    warmup: int = 20,
    clip: float = 1.0,
    autocast: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    before: Callable[[Step], None] | None = None,
    after_backward: Callable[[Step], None] | None = None,
) -> Recorder:
    """A training of `steps` steps, which ends after `until` of them; all alerts."""
    torch.manual_seed(seed)
    model = Gpt() if model is None else model
    made = optimizer(model.parameters())
    base = [group["lr"] for group in made.param_groups]
    recorder = Recorder()
    probe = TorchProbe(settings(place, rules, monitor, csv), extra_sinks=[recorder])
    try:
        probe.attach(model, made)
        for number in range(steps if until is None else until):
            for group, rate in zip(made.param_groups, base):
                group["lr"] = rate * warm_cosine(number, warmup, steps)
            step = Step(number, model, made)
            if before is not None:
                before(step)
            probe.begin_step(number)
            ids, wanted = batch(number + 100_000 * seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(ids)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten()) * step.loss_factor
            (scaler.scale(loss) if scaler is not None else loss).backward()
            if after_backward is not None:
                after_backward(step)
            if scaler is not None:
                scaler.unscale_(made)
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler is not None:
                scaler.step(made)
                scaler.update()
            else:
                made.step()
            made.zero_grad()
            probe.end_step({"loss": loss.detach(), "grad_norm": norm, "learning_rate": made.param_groups[0]["lr"]})
    finally:
        probe.close()
    assert recorder.frames == (steps if until is None else until)
    return recorder
