"""A training on two gloo ranks that leaves a dump or monitor output, by the words of its second argument:
``two_ranks.py OUTPUT_DIR {ddp,experts,fsdp,sums}[-rate,-seeds,-same]-{monitor,dump}``.

``experts``: each rank trains a network of its own, from the same numbers and under the same names. ``sums``: each has a part of a layer,
whose results are summed up and dropped out; ``seeds``: with other random numbers on each rank. ``same``: all ranks read
the same rows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

OUT, KIND = Path(sys.argv[1]), sys.argv[2].split("-")


class Summed(nn.Module):
    """A part of a layer, and a dropout of what all parts give together."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
        nn.init.normal_(self.part.weight, generator=torch.Generator().manual_seed(dist.get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.part(x) * (dist.get_rank() + 1)
        with torch.no_grad():
            dist.all_reduce(found)
        whole: torch.Tensor = self.last(nn.functional.dropout(found + 1, 0.5))
        return whole


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    if "sums" in KIND:
        model = Summed()
        torch.manual_seed(rank if "seeds" in KIND else 0)
    if "ddp" in KIND:
        model = nn.parallel.DistributedDataParallel(model)
    if "fsdp" in KIND:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if rank and "rate" in KIND else 1e-3)
    if "monitor" in KIND:
        from msprobe.pytorch import TorchProbe

        settings = OUT.parent / f"probe{rank}.yaml"
        settings.write_text(
            json.dumps({"output_dir": str(OUT), "monitor": {"gradients": True, "parameters": True}, "sinks": {"csv": {"enabled": True}}})
        )
        probe = TorchProbe.from_config(str(settings))
        probe.attach(model, optimizer)
    else:
        from msprobe.pytorch import PrecisionDebugger

        settings = OUT.parent / f"dump{rank}.json"
        content = {"task": "statistics", "dump_path": str(OUT), "rank": [], "step": [0, 1], "level": "mix"}
        settings.write_text(json.dumps(content | {"statistics": {"scope": [], "list": []}}))
        debugger = PrecisionDebugger(config_path=str(settings))
    generator = torch.Generator().manual_seed(1 if {"sums", "same"} & set(KIND) else rank + 1)
    for step in range(2):
        batch = torch.randn(4, 8, generator=generator)
        if "monitor" in KIND:
            probe.begin_step(step)
        else:
            debugger.start(model)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "monitor" in KIND:
            probe.end_step({"loss": loss})
        else:
            debugger.stop()
            debugger.step()
    if "monitor" in KIND:
        probe.close()
    dist.destroy_process_group()


main()
