"""An engine in each layout of docs/integrations.md, asked for as by the environment and looked at by an eye of the test's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed_harness as harness
import ds_jobs as jobs
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from deepspeed.pipe import LayerSpec, PipelineModule
from restored import snapshot
from torch import nn
from trainer_cells import spoiled, watched
from trainer_checks import asked
from trainer_eyes import Eye, Spy

STEPS = 2
MICRO = 2
SIZE = 12
KIND, FUNCTION = "LayerNorm", "layer_norm"


class Net(nn.Module):
    """Sizes that fit no partition; experts, if any, one on each rank."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.a, self.first = nn.Linear(SIZE, 13), nn.LayerNorm(13)
        self.b, self.second = nn.Linear(13, SIZE, bias=False), nn.LayerNorm(SIZE)
        self.last = MoE(SIZE, nn.Linear(SIZE, SIZE), num_experts=2, ep_size=2, k=1) if experts else nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.second(torch.tanh(self.b(self.first(self.a(x))))))
        y, auxiliary = y[:2] if isinstance(y, tuple) else (y, 0.0)
        loss: torch.Tensor = (y - x).float().pow(2).mean() + 0.01 * auxiliary
        return loss


def stages() -> Any:
    """Linear, LayerNorm, Tanh | Linear, LayerNorm, Linear."""
    specs = [LayerSpec(nn.Linear, SIZE, 13), LayerSpec(nn.LayerNorm, 13), LayerSpec(nn.Tanh)]
    specs += [LayerSpec(nn.Linear, 13, SIZE), LayerSpec(nn.LayerNorm, SIZE), LayerSpec(nn.Linear, SIZE, SIZE)]
    return PipelineModule(specs, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True)


LAYOUTS: dict[str, tuple[Callable[[], Any], int]] = {
    **{f"ZeRO {stage}, 2 ranks": (lambda: Net(False), stage) for stage in range(4)},
    "PP 2, 2 ranks": (stages, 0),
    "EP 2 (MoE), ZeRO 1, 2 ranks": (lambda: Net(True), 1),
}
HPZ = "ZeRO 3, hpZ and qgZ of ZeRO++, 2 ranks"
LAYOUTS[HPZ] = LAYOUTS["ZeRO 3, 2 ranks"]
FAILING = {"PP 2, 2 ranks": "4"}
"""The module that gives NaN, on the last rank; else ``second``."""


class Looking(Spy):
    """Also sees gradients: DeepSpeed's own gathered ones, or those that the optimizer is about to use.

    Attributes:
        gradients, parameters: by step, parameter -> norm before the update.
    """

    def __init__(self) -> None:
        super().__init__(KIND, FUNCTION)
        self.gradients: list[dict[str, float]] = []
        self.parameters: list[dict[str, float]] = []

    def about_to_update(self, engine: Any) -> None:
        """All ranks call it."""
        named = list(engine.module.named_parameters())
        whole = {name: harness.deepspeed.utils.safe_get_full_grad(p) for name, p in named}
        self.gradients.append(norms({name: g for name, g in whole.items() if g is not None}))
        with harness.deepspeed.zero.GatheredParameters([p for _, p in named], enabled=engine.zero_optimization_stage() == 3):
            self.parameters.append(norms(dict(named)))

    def optimizer_steps(self, engine: Any) -> None:
        """A hook of the inner optimizer."""
        named = dict(engine.module.named_parameters())
        self.gradients.append(norms({name: p.grad for name, p in named.items() if p.grad is not None}))
        self.parameters.append(norms(named))


def norms(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """In double precision."""
    return {name: float(tensor.detach().double().norm()) for name, tensor in tensors.items()}


def engine_of(layout: str) -> Any:
    """Made anew, the same on all ranks."""
    make, stage = LAYOUTS[layout]
    if not harness.deepspeed.comm.is_initialized():
        harness.deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    net = make()
    expert = layout.startswith("EP")
    given = split([{"params": list(net.parameters()), "name": "all", "lr": 1e-2}]) if expert else list(net.parameters())
    zero = {"zero_hpz_partition_size": 2, "zero_quantized_gradients": True} if layout == HPZ else {}
    conf = harness.config(stage, "bf16" if expert else "fp32", MICRO, zero=zero)
    engine, *_ = harness.deepspeed.initialize(model=net, model_parameters=given, config=conf)
    return engine


def data(dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of a rank; of a pipeline both stages have the same."""
    generator = torch.Generator().manual_seed(100 + harness.deepspeed.comm.get_rank() * (dtype != torch.float64))
    while True:
        x = torch.randn(4, SIZE, generator=generator)
        yield x.to(torch.float32 if dtype == torch.float64 else dtype), x.flip(1)


def trained(layout: str, file: Path | None, eye: Eye) -> Any:
    """Losses, weights and the random state of `STEPS` updates."""
    asked(file, "deepspeed", "torch")
    engine = engine_of(layout)
    pipeline, looking = layout.startswith("PP"), isinstance(eye, Looking)
    batches = data(torch.float64 if pipeline else torch.bfloat16 if layout.startswith("EP") else torch.float32)
    eye.begins(engine.module)
    if pipeline and looking:
        engine.optimizer.register_step_pre_hook(lambda *_: eye.optimizer_steps(engine))  # type: ignore[attr-defined]
    losses = []
    for _ in range(STEPS):
        if pipeline:
            losses.append(float(engine.train_batch(data_iter=batches)))
        else:
            for micro in range(MICRO):
                loss = engine(next(batches)[0])
                engine.backward(loss)
                if looking and micro == MICRO - 1:
                    eye.about_to_update(engine)  # type: ignore[attr-defined]
                engine.step()
                losses.append(float(loss.detach()))
        eye.updated()
    weights = jobs.weights_of(engine)
    digest = hashlib.sha256(b"".join(weights[name] for name in sorted(weights)) + torch.get_rng_state().numpy().tobytes())
    return losses, digest.hexdigest()


def job(layout: str, given: dict[str, Path]) -> dict[str, Any]:
    """In a rank: everything watched, then a module that fails."""
    train = lambda file, eye: trained(layout, file, eye)  # noqa: E731
    spy = Looking()
    found = watched(train, given, spy)
    spoiled(train, given, None, FAILING.get(layout, "second"))
    return {**found, "gradients": spy.gradients, "parameters": spy.parameters}


def left_behind(layout: str) -> list[str]:
    """What differs after a probe has come to an engine and has left again."""
    engine = engine_of(layout)
    batches = data(torch.float32)

    def update() -> None:
        for _ in range(MICRO):
            engine.backward(engine(next(batches)[0]))
            engine.step()

    update()
    before = snapshot(engine, engine.module, engine.optimizer, engine.monitor)
    callback = jobs.follow(engine, jobs.settings(monitor=jobs.MONITOR))
    update()
    assert callback is not None
    callback.close()
    return before.changed()
