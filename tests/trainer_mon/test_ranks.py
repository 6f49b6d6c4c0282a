"""`TrainerMon` over ranks: duplicates left out, alerts placed in the pipeline, Megatron and DeepSpeed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import probe_ranks as pr
import pytest
import torch
import torch.distributed as dist
from monitored import build, config, loop, steps_of, tables

from msprobe.pytorch import TrainerMon

pytestmark = pytest.mark.framework


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))


def names(root: Path, rank: int, family: str) -> set[str]:
    return {row["name"] for row in tables(root, rank).get(family, [])}


@pytest.mark.parametrize("groups", ["dp_group", "tp_group"])
def test_duplicates_are_left_out(tmp_path: Path, groups: str) -> None:
    """dp_group: the second data-parallel rank writes no reduced gradients. tp_group: the second tensor-parallel rank writes only those
    of parameters that are split. Everything else is written by both."""

    def job() -> None:
        net, optimizer = build()
        net.head.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        with TrainerMon(config(tmp_path / str(dist.get_rank()), targets={}, wg_distribution=True, param_distribution=True)) as monitor:
            monitor.set_monitor(ddp, optimizer, **{groups: dist.group.WORLD})
            loop(ddp, optimizer, 2)

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pr.run(job, ranks=2, directory=tmp_path)
    out = tmp_path / "out"
    everything = names(out, 0, "grad_reduced")
    assert len(everything) == 14
    assert names(out, 1, "grad_reduced") == (set() if groups == "dp_group" else {"head.weight"})
    for family in ("grad_unreduced", "param_origin", "param_updated"):
        assert names(out, 1, family) == everything
    assert steps_of(out, "param_updated", 1) == [0, 1]


def test_alerts_know_their_pipeline(tmp_path: Path) -> None:
    """process_group is the pipeline group: records hold this rank's stage and the ranks of its pipeline."""

    def job() -> None:
        net, optimizer = build()
        with torch.no_grad():
            net.head.weight[0, 0] = math.nan
        alert = {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}
        path = config(tmp_path / str(dist.get_rank()), targets={}, wg_distribution=True, alert=alert)
        with TrainerMon(path, process_group=dist.group.WORLD) as monitor:
            monitor.set_monitor(net, optimizer)
            loop(net, optimizer, 1)

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pr.run(job, ranks=2, directory=tmp_path)
    for rank in range(2):
        records = json.loads((tmp_path / f"out/anomaly_detected/rank{rank}/anomaly.json").read_text())
        assert {(r["rank"], r["pp_stage"], tuple(r["group_mates"])) for r in records.values()} == {(rank, rank, (0, 1))}


def test_a_rank_subset(tmp_path: Path) -> None:
    """module_ranks: the others write nothing."""

    def job() -> None:
        net, optimizer = build()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        with TrainerMon(config(tmp_path / str(dist.get_rank()), targets={}, wg_distribution=True, module_ranks=[1])) as monitor:
            monitor.set_monitor(ddp, optimizer)
            loop(ddp, optimizer, 2)

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    pr.run(job, ranks=2, directory=tmp_path)
    assert steps_of(tmp_path / "out", rank=1) == [0, 1]
    assert not [p for p in (tmp_path / "out").rglob("grad_*") if "-rank0-" in str(p)]


def two_chunks() -> Any:
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(2)]


def test_a_list_of_models_is_chunks(tmp_path: Path) -> None:
    """The index in the list is the stage; a target with a stage is meant for that chunk only."""
    chunks = two_chunks()
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    path = config(tmp_path, targets={"1:0": {}}, wg_distribution=True, xy_distribution=True)
    with TrainerMon(path) as monitor:
        monitor.set_monitor(chunks, optimizer)
        x = torch.randn(2, 4)
        for chunk in chunks:
            x = chunk(x)
        x.sum().backward()
        optimizer.step()
    rows = tables(tmp_path / "out")
    for family, expected in (("grad_reduced", {"0.weight", "0.bias"}), ("actv", {"0.input", "0.output"})):
        assert {(row["vpp_stage"], row["name"]) for row in rows[family]} == {("1", name) for name in expected}


@pytest.mark.slow
def test_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DeepSpeed engine (ZeRO 1, bf16, two micro batches per update), given as model with its optimizer: updates are the steps."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")

    def job() -> None:
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # the first use would compile C++ for more than a minute
        net, _ = build()
        engine, optimizer, _, _ = deepspeed.initialize(
            model=net,
            model_parameters=net.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 1},
            },
        )
        monitor = TrainerMon(config(tmp_path / str(dist.get_rank()), targets={}, wg_distribution=True, mv_distribution=True))
        monitor.set_monitor(engine, optimizer, grad_acc_steps=2)
        for _ in range(6):
            ids = torch.randint(0, 11, (3, 5))
            engine.backward(torch.nn.functional.cross_entropy(engine(ids).flatten(0, 1).float(), ids.flatten()))
            engine.step()
        monitor.stop()

    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    done = pr.run(job, ranks=2, directory=tmp_path, timeout=300)
    assert not done[0].lines("switched off"), done[0].log[-2000:]
    out = tmp_path / "out"
    for rank in range(2):
        assert steps_of(out, rank=rank) == [0, 1, 2]
        assert steps_of(out, "exp_avg", rank)[-2:] == [1, 2]
    assert names(out, 0, "grad_reduced") | names(out, 1, "grad_reduced") >= {"head.weight", "layers.0.up.weight"}
