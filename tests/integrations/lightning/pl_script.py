"""A training script that knows nothing of the probe: `pl_script.py STRATEGY`, two ranks."""

import sys

import lightning.pytorch as pl
import torch


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):  # noqa: ARG002
        return (self.net(batch[0]) - 1).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    model = Module()
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy=sys.argv[1], **off)
    trainer.fit(model, data)
    if trainer.global_rank == 0:
        print("PARAMETERS", [p.tolist() for p in model.parameters()])
