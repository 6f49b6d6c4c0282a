"""Trainings of torchtitan for the cells of docs/integrations.md: spied on without a probe, with everything watched, spoiled, and with a
probe that comes and goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import titan_job
import torch
import torch.distributed as dist
import trainer_cells as tc
from restored import snapshot
from torch.distributed.pipelining import stage
from trainer_checks import asked, digest

from msprobe_integrations.autoload import request
from msprobe_integrations.torchtitan import autoload

STEPS = 2


class Layout(NamedTuple):
    """One row of the table."""

    ranks: int
    keys: dict[str, int]
    """Of `titan_job.config`."""
    failing: str
    """A module of the last rank."""
    copy: str = ""
    """A parameter that ranks hold alike, if there is one."""


LAYOUTS = {
    "1 rank": Layout(1, {}, "layers.0.feed_forward.w2"),
    "FSDP2, 2 ranks": Layout(2, {"dp": 2}, "layers.0.feed_forward.w2"),
    "TP 2, 2 ranks": Layout(2, {"tp": 2}, "layers.0.feed_forward.w2", "norm.weight"),
    "PP 2, 2 ranks": Layout(2, {"pp": 2}, "layers.1.feed_forward.w2"),
}


class Truth(tc.Spy):
    """Norms of the whole tensors, gathered, in float64, at the moments at which the probe looks."""

    def __init__(self) -> None:
        super().__init__("RMSNorm", "rms_norm")
        self.whole: dict[tuple[str, int, str], float] = {}
        self.paused = False
        self._restore: list[Callable[[], None]] = []

    def begins(self, model: torch.nn.Module) -> None:
        """A stage of a pipeline that prepares itself runs its modules on memory without values: that is no training."""
        super().begins(model)
        for cls in (stage._PipelineStageBase, stage.PipelineStage):
            for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
                if name in vars(cls):
                    setattr(cls, name, self._unseen(vars(cls)[name]))
                    self._restore.append(partial(setattr, cls, name, vars(cls)[name].__wrapped__))

    def _unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False

        return call

    def _left(self, *args: Any) -> None:
        if not self.paused:
            super()._left(*args)

    def _keep(self, *args: Any) -> None:
        if not self.paused:
            super()._keep(*args)

    def leaves(self) -> None:
        super().leaves()
        for restore in self._restore:
            restore()

    def note(self, family: str, parts: list[torch.nn.Module], tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for part in parts:
            for name, parameter in part.named_parameters():
                value = tensor(parameter).detach()
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                self.whole[family, self.step, name] = float(value.double().norm())


def single() -> None:
    """A group of this process alone, which torchtitan wants."""
    if not dist.is_initialized():
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def followed(trainer: Any, eye: tc.Eye) -> list[float]:
    """Train, with the eye on it; losses."""
    from torchtitan.distributed import utils

    parts, losses = trainer.model_parts, []
    clip, step, passes, whole = utils.clip_grad_norm_, trainer.optimizers.step, trainer.forward_backward_step, trainer.train_step

    def clipped(*args: Any, **kwargs: Any) -> Any:
        if isinstance(eye, Truth):
            eye.note("grad_reduced", parts, lambda p: p.grad)
            eye.note("param_origin", parts, lambda p: p)
        return clip(*args, **kwargs)

    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if isinstance(eye, Truth):
            states = {p: state for optimizer in trainer.optimizers.optimizers for p, state in optimizer.state.items()}
            eye.note("param_updated", parts, lambda p: p)
            for name in ("exp_avg", "exp_avg_sq"):
                eye.note(name, parts, lambda p, name=name: states[p][name])
        return result

    def over(*args: Any, **kwargs: Any) -> Any:
        result = whole(*args, **kwargs)
        eye.updated()
        return result

    def passed(*args: Any, **kwargs: Any) -> Any:
        loss = passes(*args, **kwargs)
        losses.append(float(loss))
        return loss

    utils.clip_grad_norm_, trainer.optimizers.step = clipped, stepped
    trainer.forward_backward_step, trainer.train_step = passed, over
    (part,) = parts
    eye.begins(part)
    try:
        trainer.train()
    finally:
        utils.clip_grad_norm_ = clip
        del trainer.optimizers.step, trainer.forward_backward_step, trainer.train_step
    return losses


def train(layout: Layout, folder: Path, steps: int, file: Path | None, eye: tc.Eye) -> Any:
    """As `trainer_cells.Train`: bits of this rank's parameters, losses, and the random state."""
    single()
    asked(file, "torchtitan")
    trainer = titan_job.config(folder, steps=steps, log=100, **layout.keys).build()  # where it logs it ends the training of a NaN
    losses = followed(trainer, eye)
    bits = digest(p for part in trainer.model_parts for p in part.parameters())
    return bits, losses, torch.get_rng_state().numpy().tobytes()


def watched(layout: Layout, folder: Path, given: Mapping[str, Path]) -> dict[str, Any]:
    """In a rank: see `trainer_cells.watched`; with the norms of whole tensors, and what a probe left behind."""
    spy = Truth()
    found = tc.watched(partial(train, layout, folder, STEPS), given, spy)
    return {**found, "whole": spy.whole, "left": left_behind(layout, folder, given["mix"])}


def spoiled(layout: Layout, folder: Path, given: Mapping[str, Path]) -> Any:
    """In a rank: see `trainer_cells.spoiled`."""
    return tc.spoiled(partial(train, layout, folder, 4), given, tc.Drift(layout.copy) if layout.copy else None, layout.failing)


def left_behind(layout: Layout, folder: Path, file: Path) -> list[str]:
    """What differs after a probe has come to a Trainer that has trained, and has left again."""
    autoload.arm()
    request.forget()
    trainer = titan_job.config(folder, steps=3, **layout.keys).build()
    batches = trainer.batch_generator(trainer.dataloader)
    trainer.step += 1
    trainer.train_step(batches)
    optimizers = [trainer.optimizers, *trainer.optimizers.optimizers]
    before = snapshot(*trainer.model_parts, *optimizers, trainer, trainer.metrics_processor, trainer.checkpointer)
    request.ask(str(file))
    for _ in range(STEPS):
        trainer.step += 1
        trainer.train_step(batches)
    steps = [frame.step for frame in tc.close()]
    return before.changed() if steps == [1, 2] else [f"steps {steps} were followed"]
