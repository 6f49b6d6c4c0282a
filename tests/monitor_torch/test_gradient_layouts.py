"""Gradients that DTensor lays out in another way than their parameters: an embedding and norms under tensor parallel."""

from __future__ import annotations

from typing import Any

import parameter_cases as pc
import pytest
import torch
from forkpool import run_ranks
from log_lines import heard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

pytestmark = pytest.mark.framework
ROWS = 63
"""Of the embedding: two ranks have 32 and 31."""


def job() -> Any:
    """Two steps of an embedding, a norm on parts of the sequence and a head; what was said."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": ColwiseParallel(input_layouts=Shard(1)),
    }
    model = parallelize_module(nn.Sequential(nn.Embedding(ROWS, 8), nn.LayerNorm(8), nn.Linear(8, 6)), mesh, plan)
    optimizer = pc.optimizer("adamw", model.parameters(), foreach=False)
    lines = heard()
    probe = pc.probe(gradients=True, parameters=True)
    with pc.closing(probe) as frames:
        probe.attach(model, optimizer)
        for step in range(2):
            probe.begin_step(step)
            optimizer.zero_grad()
            words = torch.randint(0, ROWS, (2, 8), generator=torch.Generator().manual_seed(step))
            model(words).square().mean().backward()
            optimizer.step()
            probe.end_step()
    seen = pc.samples(frames[1])
    added_up = set()
    for name, p in model.named_parameters():
        if any(one.is_partial() for one in p.grad.placements):
            added_up.add(name)
            assert ("grad_reduced", name, "reduced") not in seen
        else:
            pc.assert_same(seen["grad_reduced", name, "reduced"], pc.whole(p.grad), name)
        pc.assert_same(seen["param_updated", name, ""], pc.whole(p), name)
    return model[0].weight.grad.placements != model[0].weight.placements, added_up, [line for line in lines if "laid out" in line]


@pytest.mark.slow
def test_other_layouts() -> None:
    """Of a gradient that every rank has whole, the rows of its part are taken; one that is still to be added over ranks makes no row, and
    one message says so."""
    for differs, added_up, lines in run_ranks(2, job):
        assert differs
        assert added_up
        assert len(lines) == 1
        assert any(name in lines[0] for name in added_up)
