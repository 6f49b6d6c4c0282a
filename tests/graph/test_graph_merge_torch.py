"""Dumps of torch's own parallelism on two real processes, put together and held against one process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "frameworks"))

import torch.distributed as dist  # noqa: E402
from forkpool import run_ranks  # noqa: E402
from torch import nn  # noqa: E402

from msprobe.pytorch import PrecisionDebugger  # noqa: E402
from msprobe_engine.formats.dump.read_table import read_side  # noqa: E402
from msprobe_engine.report.graph.merge import device_mesh  # noqa: E402
from msprobe_engine.report.graph.merge.make import build_merged_graph  # noqa: E402
from msprobe_engine.report.graph.merge.merge_ranks import merge_ranks  # noqa: E402
from msprobe_engine.report.graph.nodes.model import Comparison, Graph  # noqa: E402
from msprobe_engine.report.graph.options import GraphOptions  # noqa: E402
from msprobe_engine.report.graph.source import jobs_of  # noqa: E402

SIZE, BATCH = 16, 8
AUTO = GraphOptions(merge="auto")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def train(kind: str, out: str, ranks: int) -> None:
    """One step of two blocks, cut in one way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, SIZE), Block(), Block(), nn.Linear(SIZE, 4))
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 4, generator=generator)
    if kind in ("ddp", "fsdp2"):
        here = slice(dist.get_rank() * BATCH // ranks, (dist.get_rank() + 1) * BATCH // ranks)
        x, y = x[here], y[here]
    blocks = (model[1], model[2])
    trained: nn.Module = model
    if kind == "ddp":
        trained = nn.parallel.DistributedDataParallel(model)
    elif kind != "one":
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (ranks,))
        if kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            for block in blocks:
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(task="statistics", level="mix", dump_path=out, step=[0])
    debugger.start(model=trained)
    nn.functional.mse_loss(trained(x), y).backward()
    optimizer.step()
    debugger.stop()
    debugger.step()


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("torch_merge")
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)  # once, not in each of the processes that are forked
    for kind, ranks in (("one", 1), ("tp", 2), ("fsdp2", 2), ("ddp", 2)):
        run_ranks(ranks, train, kind, str(root / kind), ranks, timeout=240)
    return root


@pytest.mark.parametrize("axis", ["", "cp"])
@pytest.mark.slow
def test_tensor_parallel_dtensors_are_one_model(axis: str, dumps: Path) -> None:
    """Every tensor of two ranks together has the shape and the statistics that it has in one process; also of terms of a sum. The header
    may say along which axis the ranks hold pieces."""
    sides = {rank: read_side(dumps / "tp" / "step0" / f"rank{rank}" / "dump.json") for rank in (0, 1)}
    if axis:
        for rank, side in sides.items():
            side.header["parallel"] = {"rank": {axis: rank}, "size": {axis: 2}}
    found = merge_ranks(device_mesh.infer_meshes(sides))
    one = read_side(dumps / "one" / "step0" / "rank0" / "dump.json")
    rows = {name: row for row, name in enumerate(one.name)}
    compared = put_together = 0
    for row, name in enumerate(found.side.name):
        other = rows.get(name, -1)
        if other < 0 or not isinstance(one.shape[other], list):
            continue
        assert found.side.shape[row] == one.shape[other], name
        np.testing.assert_allclose(found.side.stats[row], one.stats[other], rtol=1e-4, atol=1e-6, err_msg=name)
        compared += 1
        put_together += found.side.op[row] in found.notes
    assert compared > 150
    assert put_together > 40
    assert not found.said


@pytest.mark.slow
def test_ranks_of_one_batch_are_one_graph(dumps: Path) -> None:
    """The dumps say nothing of the layout: ranks that were given the same batch are one model, ranks with a batch each are copies."""
    (job,) = jobs_of(dumps / "tp", None, AUTO).jobs
    assert [rank for rank, _ in job.members] == [0, 1]
    assert isinstance(build_merged_graph(job, AUTO, [], []), Graph)
    for kind in ("ddp", "fsdp2"):
        found = jobs_of(dumps / kind, None, AUTO)
        assert [[rank for rank, _ in job.members] for job in found.jobs] == [[0], [1]]
        assert any("do not say how the job was cut" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["tp", "fsdp2", "ddp"])
def test_no_difference_to_one_process(kind: str, dumps: Path) -> None:
    """Tensor parallel, sharded and replicated: nothing is found against one process with the whole batch."""
    (job,) = jobs_of(dumps / kind, dumps / "one", AUTO).jobs
    notes: list[str] = []
    found = build_merged_graph(job, AUTO, [], notes)
    assert isinstance(found, Comparison)
    assert found.suspect is None
    assert not any(value == 1 for value in found.index)
    assert not (found.units > 4).any()
    assert ("2 times the golden run's" in " ".join(notes)) == (kind != "tp")
