"""A small regression with DeepSpeed. Nothing in this file knows of the probe.

    deepspeed --num_accelerators 2 train.py --deepspeed_config ds_config.json     (or torchrun --nproc_per_node 2 train.py ...)

Without an accelerator: DS_ACCELERATOR=cpu.
"""

import argparse

import deepspeed
import torch
from torch import nn


class Net(nn.Module):
    """Three layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.middle = nn.Linear(64, 64)
        self.down = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.middle(torch.relu(self.up(x))))
        return (self.down(hidden) - y).pow(2).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=6)
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    torch.manual_seed(0)
    net = Net()
    engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
    generator = torch.Generator().manual_seed(engine.global_rank)
    dtype = next(net.parameters()).dtype
    for _ in range(args.steps):
        for _ in range(engine.gradient_accumulation_steps()):
            x = torch.randn(8, 16, generator=generator)
            y = x.sum(1, keepdim=True) / 4
            loss = engine(x.to(engine.device, dtype), y.to(engine.device, dtype))
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0:
            print(f"step {engine.global_steps - 1} loss {loss.item():.6f}", flush=True)
    torch.distributed.destroy_process_group()  # gloo's threads end before the interpreter does


if __name__ == "__main__":
    main()
