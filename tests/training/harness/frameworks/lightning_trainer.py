"""Small modules under Lightning's Trainer, with batches in order.

Parallelism: ``dp`` (DDP), ``fsdp2`` (ModelParallelStrategy). Features: ``evaluation``, ``checkpoint``, ``pytorch_lightning`` (the other
package of that name).
"""

from __future__ import annotations

import importlib
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from harness.case import Training, TrainingCase
from harness.memory import seen
from harness.models import MODELS as SHARED
from harness.models import OPTIMIZER, mlp_loss
from harness.run import ask, digest

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore")

ARM = ("lightning",)
SCALARS = ("loss", "learning_rate", "skipped")


def make_module(package: Any = pl, net: Any = None, sharded: bool = False) -> Any:
    """A LightningModule of `package`, with automatic optimization."""

    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net if net is not None else SHARED["mlp"].make()

        def training_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
            loss = mlp_loss(self.net, batch[0])
            self.log("logged", loss * 2)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            self.log("valid", self.net(batch[0]).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), **OPTIMIZER, foreach=False)

    class Sharded(Module):
        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for layer in (*(part for part in self.net if list(part.parameters())), self.net):
                if not hasattr(layer, "set_requires_all_reduce"):
                    fully_shard(layer, mesh=mesh)

    return Sharded() if sharded else Module()


def make_loader(count: int = 8) -> Any:
    """`count` batches of 4 samples in all; ranks take turns."""
    group = torch.distributed
    first, stride = (group.get_rank(), group.get_world_size()) if group.is_initialized() else (0, 1)
    batches = [SHARED["mlp"].batch(number // stride, 0, number % stride) for number in range(first, count, stride)]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(batches)), batch_size=4)


def make_trainer(folder: Path, package: Any = pl, **arguments: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    known = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "default_root_dir": str(folder),
        "use_distributed_sampler": False,
        **quiet,
    }
    return package.Trainer(**{**known, **arguments})


def train_with(folder: Path, file: Path | None, arguments: dict[str, Any], made: Any = make_module) -> tuple[str, dict[str, Any]]:
    """Fit, followed when `file` is given; the bits of this rank's parameters and what was seen."""
    ask(file, "lightning")
    model = made()
    make_trainer(folder, **arguments).fit(model, make_loader())
    return digest(model.parameters()), seen()


def make_arguments(case: TrainingCase) -> dict[str, Any]:
    found: dict[str, Any] = {"devices": case.ranks, "accumulate_grad_batches": case.micro_batches, "gradient_clip_val": case.clip or None}
    if case.precision != "fp32":
        found["precision"] = f"{case.precision}-mixed"
    if "fsdp2" in case.parallelism:
        found["strategy"] = pl.strategies.ModelParallelStrategy(case.ranks, 1)
    elif case.ranks > 1:
        found["strategy"] = "ddp"
    if "evaluation" in case.features:
        found["val_check_interval"] = 1
    if "checkpoint" in case.features:
        found["enable_checkpointing"] = True
    return found


def train(training: Training) -> Any:
    """Bits of this rank's parameters, and the losses."""
    case, kind = training.case, SHARED[training.case.model]
    package = importlib.import_module("pytorch_lightning") if "pytorch_lightning" in case.features else pl
    losses: list[float] = []

    class Telling(package.Callback):  # type: ignore[misc]
        updates = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            losses.append(float(outputs["loss"]))
            if trainer.global_step > self.updates:
                self.updates = trainer.global_step
                training.updated()

    net = training.model(kind.make())
    module = make_module(package, net, "fsdp2" in case.parallelism)
    samples = [kind.batch(step, micro, training.data_rank()) for step in range(case.steps) for micro in range(case.micro_batches)]
    data = training.data(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(samples)), batch_size=4))
    trainer = make_trainer(training.folder, package, callbacks=[Telling()], **training.launch(make_arguments(case)))
    training.start(net, trainer)
    trainer.fit(module, data, data if "evaluation" in case.features else None)
    return digest(net.parameters()), losses
