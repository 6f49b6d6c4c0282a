"""A loop of one's own around an `Accelerator`, with batches in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from trainer_checks import asked, by_hand, deepspeed_on_gloo, digest, fsdp_on_cpu, seen

deepspeed_on_gloo()
fsdp_on_cpu()


def samples() -> torch.Tensor:
    """[64, 8] float32."""
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(5))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)


def train(folder: Path, file: Path | None, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Two batches of four samples per update, clipped, with an evaluation, a gathered metric and a checkpoint in between."""
    asked(file, "deepspeed", "torch", "accelerate")
    made = {name: make() if callable(make) else make for name, make in arguments.items()}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **made)
    net = Net()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples()), batch_size=4)
    net, optimizer, data = accelerator.prepare(net, adamw(net.parameters()), data)
    for number, (x,) in enumerate(data):
        with accelerator.accumulate(net):
            loss = (net(x).float() - 1).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.gather(loss.detach())
        net.eval()
        with torch.no_grad():
            net(x)
        net.train()
        if number == 3 and "fsdp_plugin" not in arguments:
            accelerator.save_state(str(folder / "state"))
        if number == 7:
            break
    return digest(net.parameters()), seen()


def reference(ranks: int = 1, steps: int = 4, clip: float = 0.5) -> dict[Any, float]:
    """The same by hand in float64."""

    def loss(model: Any, numbers: Any) -> torch.Tensor:
        return (model(samples().double()[list(numbers)]) - 1).pow(2).mean()

    each = 4 * ranks
    batches = [[range(each * i, each * (i + 1)) for i in (2 * s, 2 * s + 1)] for s in range(steps)]
    return by_hand(Net(), loss, batches, adamw, clip)
