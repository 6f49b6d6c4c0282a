"""A Trainer with the loop of MindSpeed-LLM's FSDP2 backend in two ranks, looked at by an eye of the test's own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from restored import snapshot
from torch import nn
from torch.distributed.fsdp import fully_shard
from trainer_cells import close, spoiled, watched
from trainer_checks import digest
from trainer_eyes import Eye, Spy, local

from msprobe_integrations.autoload import request
from msprobe_integrations.mindspeed import autoload, fsdp2
from msprobe_integrations.torch import owner

STEPS = 2
KIND, FUNCTION = "LayerNorm", "layer_norm"
LIMIT = 0.1
"""The Trainer clips to this norm."""


class Looking(Spy):
    """Also sees gradients and parameters just before the optimizer's step: of the whole ones, after they were clipped.

    Attributes:
        gradients, parameters: by step, parameter -> norm.
    """

    def __init__(self) -> None:
        super().__init__(KIND, FUNCTION)
        self.gradients: list[dict[str, float]] = []
        self.parameters: list[dict[str, float]] = []

    def steps_now(self, model: nn.Module) -> None:
        """All ranks call it."""
        named = dict(model.named_parameters())
        self.gradients.append({name: whole(p.grad) for name, p in named.items() if p.grad is not None})
        self.parameters.append({name: whole(p) for name, p in named.items()})


def whole(tensor: torch.Tensor) -> float:
    """Norm of all parts, in double precision."""
    square = local(tensor).pow(2).sum()
    dist.all_reduce(square)
    return float(square.sqrt())


def imported() -> Any:
    """The Trainer's module, as it is without the probe."""
    sys.modules.pop("fsdp2_trainer", None)
    return importlib.import_module("fsdp2_trainer")


def trainer_of(module: Any) -> Any:
    """The same on all ranks, batches are a rank's own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    fully_shard(net)
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [[torch.randn(3, 6, generator=generator) for _ in range(2)] for _ in range(STEPS)]
    return module.Trainer(net, torch.optim.AdamW(net.parameters(), lr=0.1), batches)


def trained(file: Path | None, eye: Eye) -> Any:
    """What the Trainer logs, the weights, the random state."""
    owner.release()
    request.forget()
    if file is not None:
        request.ask(str(file))
    module = imported()
    fsdp2.follow(module)
    trainer = trainer_of(module)
    eye.begins(trainer.model)
    if isinstance(eye, Looking):
        trainer.optimizer.register_step_pre_hook(lambda *_: eye.steps_now(trainer.model))
    trainer.optimizer.register_step_post_hook(lambda *_: eye.updated())
    trainer.train()
    request.forget()
    return trainer.log, digest([*(local(p) for p in trainer.model.parameters()), torch.get_rng_state()])


def job(given: dict[str, Path]) -> dict[str, Any]:
    """In a rank: everything watched, then a module that fails."""
    spy = Looking()
    found = watched(trained, given, spy)
    spoiled(trained, given, None, "4")
    return {**found, "gradients": spy.gradients, "parameters": spy.parameters}


def left_behind(file: Path) -> list[str]:
    """What differs after a Trainer has gone on with a probe that was closed, and does not when it has gone on without one."""

    def differs(asked: bool) -> list[str]:
        owner.release()
        request.forget()
        module = imported()
        trainer = trainer_of(module)
        trainer.train()  # FSDP2 puts its hooks on in the first pass
        before = snapshot(trainer.model, trainer.optimizer, trainer)
        own = [module.Trainer.train, module.Trainer.training_step, module.clip_grad_norm]
        if asked:
            fsdp2.follow(module)
            request.ask(str(file))
        trainer.train()
        if asked:
            close()
            autoload.disarm()
        assert own == [module.Trainer.train, module.Trainer.training_step, module.clip_grad_norm]
        request.forget()
        return before.changed()

    plain = {line.partition(":")[0] for line in differs(False)}
    return [line for line in differs(True) if line.partition(":")[0] not in plain]
