"""Features of layers in a training: which modules, which values, and that nothing else changes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from watched import features, make, values, watch

from msprobe_engine.core.errors import UsageError
from msprobe_engine.probe.sinks.memory import MemorySink

pytestmark = pytest.mark.framework


class Core(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q + k + v).sum((2, 3))


class Router(nn.Module):
    topk = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.fc = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.core = Core()
        self.router = Router()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        heads = x.view(*x.shape[:2], 2, 3)
        out: torch.Tensor = self.norm(self.fc(x)).sum() + self.core(heads, heads + 1, heads).sum() + self.router(x).square().sum()
        return out


def step_of(model: nn.Module, passes: int = 1) -> Any:
    def step(_: int) -> None:
        for i in range(passes):
            model(torch.arange(4).view(2, 2) + i).backward()

    return step


def test_every_feature() -> None:
    """Each named module has its columns: once per call for attention and routing, once per step for weights; '*' of linear leaves
    embeddings out."""
    torch.manual_seed(0)
    model = Layer()
    setup = features(
        attention=("core",),
        attention_layout="b,s,h,d",
        linear=("*",),
        router_weights=("router",),
        router_logits=("router",),
        power_iterations=100,
    )
    found = values(watch(model, setup, step_of(model, 2), steps=2))
    weight = model.fc.weight.detach().double()
    sigma = float(torch.linalg.svdvals(weight)[0])
    frobenius = float(weight.norm())
    assert found[0, "linear_hook", "fc.linear/kernel_norm", -1].mean == pytest.approx(sigma, rel=3e-3)
    assert found[1, "linear_hook", "fc.linear/sr", -1].mean == pytest.approx(frobenius / sigma, rel=3e-3)
    assert found[1, "linear_hook", "fc.linear/stable_rank", -1].mean == pytest.approx((frobenius / sigma) ** 2, rel=6e-3)
    assert {k[2].split("/")[0] for k in found if k[1] == "linear_hook"} == {"fc.linear", "router.linear"}
    assert {k[3] for k in found if k[1] == "attention_hook"} == {0, 1}
    assert {k[2] for k in found if k[1] == "attention_hook"} == {"core.attention/entropy", "core.attention/softmax_max"}
    assert found[0, "attention_hook", "core.attention/entropy", 0].mean == pytest.approx(math.log(2) / 2, rel=0.5)
    similarity = found[0, "moe_router_weight_hook", "router.moe_router/router_weight_similarity", -1].mean
    assert similarity is not None
    assert -1 <= similarity <= 1
    columns = {"per_token_expert_entropy", "load_min_ratio", "load_max_ratio", "dead_experts"}
    assert {k[2] for k in found if k[1] == "moe_router_logit_hook"} == {f"router.moe_router/{c}" for c in columns}
    logits = model.router(model.embed(torch.arange(4).view(2, 2))).detach()
    counts = torch.bincount(logits.view(-1, 4).topk(2).indices.flatten(), minlength=4).double()
    assert found[1, "moe_router_logit_hook", "router.moe_router/load_max_ratio", 0].mean == pytest.approx(
        float(counts.max() / counts.mean())
    )


def test_precision_of_autocast_does_not_count() -> None:
    """Features are taken in float32 under autocast as well, and the model's own precision stays what it is."""
    torch.manual_seed(0)
    model = Layer()
    setup = features(linear=("fc",), power_iterations=100)
    kinds: list[torch.dtype] = []
    model.fc.register_forward_hook(lambda _m, _a, out: kinds.append(out.dtype))

    def step(_: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.arange(4).view(2, 2))

    found = values(watch(model, setup, step))
    sigma = float(torch.linalg.svdvals(model.fc.weight.detach().double())[0])
    assert found[0, "linear_hook", "fc.linear/kernel_norm", -1].mean == pytest.approx(sigma, rel=1e-3)
    assert kinds == [torch.bfloat16]


def test_feature_of_a_module_that_is_none() -> None:
    """A module that gets no q and k is an error that says what it got; the others go on."""
    model = Layer()
    setup = features(attention=("norm",), linear=("fc",))
    with pytest.raises(UsageError, match=r"norm.*q and k"):
        watch(model, setup, step_of(model))
    memory, model = MemorySink(), Layer()
    probe = make(setup, memory, strict=False)
    probe.attach(model)
    for number in range(3):
        probe.begin_step(number)
        model(torch.arange(4).view(2, 2))
        probe.end_step()
    probe.close()
    assert probe.faults.counts == {"attention_hook of norm": 1}
    assert len(values(memory.frames)) == 9


def test_shard_of_a_tensor_parallel_weight() -> None:
    """A weight that its framework marks as a shard has the numbers of the shard, and says so."""
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].weight.tensor_model_parallel = True  # type: ignore[union-attr]
    found = values(watch(model, features(linear=("0",)), lambda _: model(torch.ones(1, 3))))
    assert {v.extra["scope"] for v in found.values()} == {"shard"}


def test_random_streams_stay_untouched() -> None:
    """Features draw no random numbers."""
    model = Layer()
    setup = features(attention=("core",), linear=("*",), router_weights=("router",), router_logits=("router",))

    def step(_: int) -> None:
        before = torch.get_rng_state()
        model(torch.arange(4).view(2, 2)).backward()
        assert torch.equal(before, torch.get_rng_state())

    assert values(watch(model, setup, step, steps=2))


def test_nothing_is_computed_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of the probe would become a part of the user's CUDA graph and run at every replay."""
    recording = SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr("msprobe_integrations.torch.tensors.devices.in_use", lambda: [("cuda", recording)])
    found = values(watch(Layer(), features(linear=("fc",), router_weights=("router",)), step_of(Layer()), steps=1))
    assert not [key for key in found if key[1] in ("linear_hook", "moe_router_weight_hook")]
