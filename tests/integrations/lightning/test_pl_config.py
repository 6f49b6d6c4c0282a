"""What a run under Lightning's Trainer was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from harness.frameworks import lightning_trainer as pl_small
from harness.models import MODELS
from harness.run import ranks, write_settings

from msprobe_engine.config.pack.reader import read_pack


class Kept(pl.LightningModule):
    """A module that keeps its arguments."""

    def __init__(self, width: int = 16, api_key: str = "abc") -> None:  # noqa: ARG002
        super().__init__()
        self.save_hyperparameters()
        self.net = MODELS["mlp"].make()

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def test_trainer_and_hyperparameters(tmp_path: Path) -> None:
    """Arguments of the Trainer under their names, the optimizer that the module made, ``hparams`` without secrets."""
    pack = tmp_path / "pack.zip"
    arguments = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    ranks(1, pl_small.train_with, tmp_path / "run", write_settings(tmp_path, config_check={"path": str(pack)}), arguments, Kept)
    found = read_pack(pack).json("msprobe/hyperparameters/rank0.json")
    expected = {
        "accumulate_grad_batches": (2, "code", "lightning"),
        "gradient_clip_val": (0.5, "code", "lightning"),
        "num_nodes": (1, "default", "lightning"),
        "hparams.width": (16, "code", "lightning"),
        "optimizer.class": ("AdamW", "code", "torch"),
        "optimizer.lr": (0.01, "code", "torch"),
        "optimizer.weight_decay": (0.01, "default", "torch"),
    }
    assert {name: (found[name]["value"], found[name]["origin"], found[name]["framework"]) for name in expected} == expected
    assert "precision" in found
    assert "abc" not in read_pack(pack).text("msprobe/hyperparameters/rank0.json")
