"""Small modules under Lightning's Trainer, with batches in order, so that the training can be written by hand."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from trainer_checks import asked, by_hand, digest, seen

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


def samples() -> torch.Tensor:
    """[32, 8] float32."""
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(5))


def make_net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def module(package: Any = pl) -> Any:
    """A LightningModule of `package`, with automatic optimization."""

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
            loss = (self.net(batch[0]) - 1).pow(2).mean()
            self.log("logged", loss * 2)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            self.log("valid", self.net(batch[0]).mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)

    return Module()


class Manual(pl.LightningModule):
    """Two optimizers, stepped by hand in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.two = make_net(), make_net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
        loss = None
        for net, optimizer in zip((self.one, self.two), self.optimizers()):
            optimizer.zero_grad()
            loss = (net(batch[0]) - 1).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0) for net in (self.one, self.two)]


class Sharded(pl.LightningModule):
    """FSDP2 by ModelParallelStrategy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[2], self.net):
            if not hasattr(layer, "set_requires_all_reduce"):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
        return (self.net(batch[0]) - 1).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0, foreach=False)


def loader() -> Any:
    """Batches of 4 samples; ranks take turns."""
    batches, group = samples().view(8, 4, 8), torch.distributed
    if group.is_initialized():
        batches = batches[group.get_rank() :: group.get_world_size()]
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batches.reshape(-1, 8)), batch_size=4)


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


def train(folder: Path, file: Path | None, arguments: dict[str, Any], made: Any = module, package: Any = pl) -> tuple[str, dict[str, Any]]:
    """Fit, followed when `file` is given; the bits of this rank's parameters and what was seen."""
    asked(file, "lightning")
    model = made()
    trainer = make_trainer(folder, package, **arguments)
    data = loader()
    trainer.fit(model, data, data if arguments.get("val_check_interval") else None)
    return digest(model.parameters()), seen()


def reference(ranks: int = 1, per_step: int = 1, prefix: str = "net.", clip: float = 0) -> dict[Any, float]:
    """The same by hand in float64."""

    def loss(model: Any, numbers: Any) -> torch.Tensor:
        return (model(samples().double()[list(numbers)]) - 1).pow(2).mean()

    batches = [range(4 * ranks * i, 4 * ranks * (i + 1)) for i in range(8 // ranks)]
    steps = [batches[i : i + per_step] for i in range(0, len(batches), per_step)]
    found = by_hand(make_net(), loss, steps, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0), clip)
    return {(family, step, prefix + name): value for (family, step, name), value in found.items()}
