"""Trainings under Lightning's Trainer for the cells of docs/integrations.md: spied on without a probe, with everything watched, spoiled,
and with a probe that comes and goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pl_job
import torch
import trainer_cells as tc
from restored import snapshot
from trainer_checks import asked, digest

from msprobe_integrations.autoload import request
from msprobe_integrations.lightning import autoload

STEPS = 2


class Layout(NamedTuple):
    """One row of the table."""

    ranks: int
    arguments: Callable[[], dict[str, Any]]
    """Of the Trainer."""
    made: Callable[[], Any]
    copies: bool
    """Do ranks hold the same?"""


def _fsdp2() -> dict[str, Any]:
    return {"strategy": pl.strategies.ModelParallelStrategy(2, 1), "devices": 2}


LAYOUTS = {
    "1 rank": Layout(1, dict, pl_job.module, False),
    "DDP, 2 ranks": Layout(2, lambda: {"strategy": "ddp", "devices": 2}, pl_job.module, True),
    "FSDP2, 2 ranks": Layout(2, _fsdp2, pl_job.Sharded, False),
}


class Watch(pl.Callback):
    """Losses of all batches, each an update."""

    def __init__(self, eye: tc.Eye) -> None:
        self.eye = eye
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        self.losses.append(float(outputs["loss"]))
        self.eye.updated()


def train(layout: Layout, folder: Path, steps: int, file: Path | None, eye: tc.Eye) -> Any:
    """As `trainer_cells.Train`: bits of this rank's parameters, losses, and the random state."""
    asked(file, "lightning")
    watch, model = Watch(eye), layout.made()
    eye.begins(model)
    torch.manual_seed(1)
    pl_job.make_trainer(folder, callbacks=[watch], max_steps=steps, **layout.arguments()).fit(model, pl_job.loader())
    return digest(model.parameters()), watch.losses, torch.get_rng_state().numpy().tobytes()


def watched(layout: Layout, folder: Path, given: Mapping[str, Path]) -> dict[str, Any]:
    """In a rank: see `trainer_cells.watched`; and what a probe left behind."""
    found = tc.watched(partial(train, layout, folder, STEPS), given, tc.Spy())
    return {**found, "left": left_behind(layout, folder, given["mix"])}


def spoiled(layout: Layout, folder: Path, given: Mapping[str, Path]) -> Any:
    """In a rank: see `trainer_cells.spoiled`."""
    return tc.spoiled(partial(train, layout, folder, 4), given, tc.Drift("net.2.bias") if layout.copies else None, "net.0")


def left_behind(layout: Layout, folder: Path, file: Path) -> list[str]:
    """What differs after a probe has come to a Trainer that has trained, and has left again."""
    autoload.arm()
    request.forget()
    model = layout.made()
    optimizers: list[Any] = []
    configure = model.configure_optimizers
    model.configure_optimizers = lambda: optimizers[0] if optimizers else optimizers.append(configure()) or optimizers[0]
    trainer = pl_job.make_trainer(folder, max_steps=1, max_epochs=-1, **layout.arguments())
    trainer.fit(model, pl_job.loader())
    before = snapshot(model, *optimizers, trainer, trainer.strategy, trainer.fit_loop)
    request.ask(str(file))
    trainer.fit_loop.epoch_loop.max_steps = 1 + STEPS
    trainer.fit(model, pl_job.loader())
    steps = [frame.step for frame in tc.close()]
    drawn = "process.random state of torch"  # by the loader
    return before.changed(drawn.__eq__) if len(steps) == STEPS else [f"steps {steps} were followed"]
