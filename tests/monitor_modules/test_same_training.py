"""The training is bit by bit the same with every family of the module side on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._dynamo  # once here instead of in every forked rank
from forkpool import run_ranks
from small_model import EVERYTHING, Model, differing, train
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from watched import features, watch

pytestmark = pytest.mark.framework
FAMILIES = {"actv", "actv_grad", "attention_hook", "linear_hook", "moe_router_weight_hook", "moe_router_logit_hook"}


def model(kind: bool | None) -> Model:
    torch.manual_seed(1)
    return Model(kind)


@pytest.mark.parametrize("kind", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_one_process(tmp_path: Path, kind: bool | None) -> None:
    """Dropout, in-place activations and both kinds of checkpointing: weights, losses and random state are the same, and every family
    has rows in every step."""
    without, _ = train(model(kind), None)
    with_it, frames = train(model(kind), EVERYTHING, tmp_path)
    assert differing(without, with_it) == []
    for frame in frames:
        assert {s.family for s in frame.samples} >= FAMILIES
        assert {s.micro_step for s in frame.samples if s.family == "actv_grad"} == {0, 1}


def wrapped(kind: str, output: Path) -> tuple[list[str], set[str], set[str]]:
    def build() -> torch.nn.Module:
        found: torch.nn.Module = model(None)
        if kind == "ddp":
            return DistributedDataParallel(found)
        for block in found.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        return fully_shard(found)

    without, _ = train(build(), None)
    with_it, frames = train(build(), EVERYTHING, output)
    names = {s.name for s in frames[1].samples if s.family in ("actv", "actv_grad", "linear_hook")}
    return differing(without, with_it), {s.family for s in frames[1].samples}, names


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.fast_cells("ddp")
def test_ranks(tmp_path: Path, kind: str) -> None:
    """DDP and FSDP2 on two ranks: the same bits, every family, and names without the wrapper."""
    for differs, families, names in run_ranks(2, wrapped, kind, tmp_path):
        assert differs == []
        assert families >= {*FAMILIES, "other"}
        assert {".input", "blocks.0.norm.input", "blocks.1.out.output", "head.linear"} <= names


def sharded_features() -> tuple[dict[str, float], dict[str, float], set[str]]:
    found = model(None)
    truth = {
        n: float(torch.linalg.svdvals(m.weight.detach().double())[0]) for n, m in found.named_modules() if isinstance(m, torch.nn.Linear)
    }
    for block in found.blocks:
        fully_shard(block)
    fully_shard(found)
    _, frames = train(found, EVERYTHING, steps=1)
    from msprobe_engine.core.statistics import rows

    linear = [s for s in frames[0].samples if s.family == "linear_hook"]
    norms = {
        s.name.removesuffix(".linear"): rows.read_row(frames[0].rows[s.ref.row]).mean or 0.0
        for s in linear
        if s.extra["column"] == "kernel_norm"
    }
    return truth, norms, {s.extra.get("scope", "") for s in linear}


@pytest.mark.slow
def test_weights_are_whole_under_fsdp2() -> None:
    """A weight that FSDP2 has sharded is looked at while it is whole."""
    for truth, norms, scopes in run_ranks(2, sharded_features):
        assert scopes == {""}
        assert norms.keys() == truth.keys()
        for name, value in norms.items():
            assert value == pytest.approx(truth[name], rel=0.05), name  # four iterations


def tensor_parallel() -> tuple[float, dict[str, tuple[float, str]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    from msprobe_engine.core.statistics import rows

    torch.manual_seed(0)
    found = torch.nn.Sequential(torch.nn.Linear(6, 8))
    part = found[0].weight.detach().double().chunk(2)[torch.distributed.get_rank()]
    parallelize_module(found, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    setup = features(linear=("0",))
    (frame,) = watch(found, setup, lambda _: found(torch.ones(2, 6)))
    values_of = {s.extra["column"]: (rows.read_row(frame.rows[s.ref.row]).mean or 0.0, s.extra["scope"]) for s in frame.samples}
    return float(torch.linalg.svdvals(part)[0]), values_of


def test_shards_of_tensor_parallel_layers() -> None:
    """A weight that stays a DTensor while its module runs has the numbers of the local shard, marked as such."""
    for truth, found in run_ranks(2, tensor_parallel):
        assert found["kernel_norm"] == (pytest.approx(truth, rel=1e-3), "shard")
