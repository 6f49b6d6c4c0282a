"""MindSpeed-LLM's FSDP2 backend: steps, their numbers and values, with a Trainer of the same form, in two ranks that shard their model."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forkpool import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from msprobe_integrations.autoload import request
from msprobe_integrations.mindspeed import fsdp2
from msprobe_integrations.torch import owner


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def batches(rank: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(3, 6, generator=generator) for _ in range(2)] for _ in range(3)]


def train(
    config: str, sharded: bool = True, broken: bool = False, several: bool = False, engine: bool = False
) -> tuple[list[tuple[float, float]], list[bytes], list[bool]]:
    """What the Trainer logs, the weights after it, and whether the optimizer's step and the owner are what they were."""
    sys.modules.pop("fsdp2_trainer", None)
    module: Any = importlib.import_module("fsdp2_trainer")
    owner.release()
    request.forget()
    if config:
        request.ask(config)
    follow = fsdp2.follow_engine if engine else fsdp2.follow
    follow(module)
    follow(module)  # a second time changes nothing
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    net = model()
    if sharded:
        fully_shard(net)
    given = batches(rank)
    if broken:
        given[1][1].fill_(float("nan"))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1)
    if several:
        kinds = {name: torch.optim.AdamW(net[number].parameters(), lr=0.1) for name, number in {"ep": 0, "non_ep": 2}.items()}
        optimizer = module.MultiOptimizer(kinds)
    trainer = (module.TrainEngine if engine else module.Trainer)(net, optimizer, given)
    setattr(trainer, "iteration" if engine else "global_step", 7)  # as after a checkpoint
    try:
        trainer.train()
    except ValueError:
        assert broken
    observer = owner.current()
    if observer is not None:
        observer.close()
    restored = ["step" not in vars(trainer.optimizer) or "msprobe" not in repr(vars(trainer.optimizer)["step"]), observer is not None]
    owner.release()
    request.forget()
    weights = [(p.to_local() if hasattr(p, "to_local") else p).detach().numpy().tobytes() for p in net.parameters()]
    return trainer.log, weights, restored


def config(tmp_path: Path) -> str:
    file = tmp_path / "probe.yaml"
    file.write_text(f"output_dir: {tmp_path / 'out'}\nstrict: true\nmonitor: {{gradients: true, parameters: true, activations: true}}\n")
    return str(file)


def rows(tmp_path: Path, family: str, rank: int) -> list[dict[str, str]]:
    (file,) = (tmp_path / "out" / "monitor").glob(f"*rank{rank}*/{family}_*.csv")
    with file.open() as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("engine", [False, True], ids=["MindSpeed-LLM", "MindSpeed-MM"])
def test_two_ranks(tmp_path: Path, engine: bool) -> None:
    """Every update is a step with the Trainer's number, loss and gradient norm as it logs them; reduced gradients are those of the whole
    model on both ranks; log and weights are bitwise those of a training without the probe, and the optimizer has its own step again. The
    same with the engine of MindSpeed-MM, and its evaluations are of no step."""
    plain = run_ranks(2, train, "", True, False, False, engine)
    probed = run_ranks(2, train, config(tmp_path), True, False, False, engine)
    assert [found[:2] for found in probed] == [found[:2] for found in plain]
    assert [found[2] for found in probed] == [[True, True]] * 2
    assert plain[0][2] == [True, False]
    for rank in (0, 1):
        log = probed[rank][0]
        scalars = {(row["step"], row["name"]): float(row["value"]) for row in rows(tmp_path, "scalars", rank)}
        for number, (loss, norm) in enumerate(log, 7):
            assert scalars[str(number), "loss"] == pytest.approx(loss, rel=1e-6)
            assert scalars[str(number), "grad_norm"] == pytest.approx(norm, rel=1e-6)
            assert scalars[str(number), "learning_rate"] == 0.1
            assert scalars.get((str(number), "aux_loss")) == (0.5 if engine else None)
        micro = {(row["step"], row["micro_step"]) for row in rows(tmp_path, "actv", rank)}
        assert micro == {(str(step), str(number)) for step in (7, 8, 9) for number in (0, 1)}
        gradients = rows(tmp_path, "grad_reduced", rank)
        assert {row["step"] for row in gradients} == {"7", "8", "9"}
        for number, (_, norm) in enumerate(log, 7):
            squares = sum(
                float(row["norm"]) ** 2 for row in gradients if row["step"] == str(number) and row["phase"] == gradients[0]["phase"]
            )
            assert squares**0.5 == pytest.approx(min(norm, 0.1) if gradients[0]["phase"] == "clipped" else norm, rel=1e-4)
    _layout, _version = "MindSpeed-LLM FSDP2, 2 ranks", "stand-in for MindSpeed-LLM's Trainer"
    if engine:
        _layout, _version = "MindSpeed-MM FSDP2, 2 ranks", "stand-in for MindSpeed-MM's engine"


def test_several_optimizers(tmp_path: Path) -> None:
    """With expert parallelism the Trainer's optimizer is a mapping of optimizers: an update of all of them is one step, and all parameters
    have their updates."""
    plain = train("", sharded=False, several=True)
    probed = train(config(tmp_path), sharded=False, several=True)
    assert probed[:2] == plain[:2]
    assert probed[2] == [True, True]
    found = rows(tmp_path, "param_updated", 0)
    assert {row["step"] for row in found} == {"7", "8", "9"}
    assert {row["name"] for row in found} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {row["value"] for row in rows(tmp_path, "scalars", 0) if row["name"] == "learning_rate"} == {"0.1"}


@pytest.mark.parametrize("engine", [False, True], ids=["MindSpeed-LLM", "MindSpeed-MM"])
def test_a_step_that_raises(tmp_path: Path, engine: bool) -> None:
    """An error of the training comes out as it is, and the step it was raised in is there, marked as interrupted."""
    train(config(tmp_path), sharded=False, broken=True, engine=engine)
    scalars = {(row["step"], row["name"]): float(row["value"]) for row in rows(tmp_path, "scalars", 0)}
    assert scalars["8", "interrupted"] == 1.0
    assert {step for step, _ in scalars} == {"7", "8"}


def test_nobody_asks() -> None:
    """Without a request the Trainer trains and nobody observes."""
    log, _, restored = train("", sharded=False)
    assert len(log) == 3
    assert restored == [True, False]
