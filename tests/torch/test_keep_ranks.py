"""Saved tensors of two ranks: collectives before and after, local shards, each rank in its own directory."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from msprobe_engine.dump.reader import open_dump
from msprobe_integrations.torch.backend import TorchBackend
from msprobe_integrations.torch.debugger import PrecisionDebugger

pytestmark = pytest.mark.framework


def work(rank: int, port: int, config: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    debugger = PrecisionDebugger(config)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    for _ in range(2):
        debugger.start(model)
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        gathered = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(gathered, torch.full((2,), float(rank)), async_op=True).wait()
        whole = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        torch.relu(whole)
        debugger.stop()
        debugger.step()
    debugger.run.at_exit()
    dist.destroy_process_group()


@pytest.mark.parametrize("form", ["files", "packed"])
def test_two_ranks(tmp_path: Path, form: str) -> None:
    """What a collective read is the value before it, what it wrote the value after it was waited for; a DTensor is its local shard."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"task": "tensor", "level": "mix", "dump_path": str(tmp_path / "dump"), "tensor": {"tensor_format": form}})
    )
    mp.start_processes(work, (port, str(config)), nprocs=2, start_method="fork")
    dump, backend = open_dump(tmp_path / "dump"), TorchBackend()
    assert dump.steps == [0, 1]
    for rank in range(2):
        step = dump.load(1, rank)
        assert step.complete
        found = {name: step.files.load(name, backend) for name in step.files.names()}
        assert {t.data_name for e in step.entries.values() for _, t in e.tensors() if t.data_name} == set(found)
        assert found["Distributed.all_reduce.0.forward.input.0.pt"].tolist() == [rank + 1.0] * 3
        assert found["Distributed.all_reduce.0.forward.output.0.pt"].tolist() == [3.0] * 3
        gathered = [found[f"Distributed.all_gather.0.forward.output.0.{i}.pt"].tolist() for i in range(2)]
        assert gathered == [[0.0, 0.0], [1.0, 1.0]]
        assert found["Torch.relu.0.forward.input.0.pt"].tolist() == torch.arange(8.0).view(4, 2)[2 * rank : 2 * rank + 2].tolist()
        assert found["Functional.linear.0.forward.input.0.pt"].tolist() == [[rank + 1.0] * 4] * 2
