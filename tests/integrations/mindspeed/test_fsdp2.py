"""Trainers of the form of MindSpeed's FSDP2 backends: numbers of steps, several optimizers, steps that raise."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.frameworks.mindspeed_trainer import import_anew
from torch import nn

from msprobe_integrations.autoload import request
from msprobe_integrations.mindspeed import fsdp2
from msprobe_integrations.torch.training import owner


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


def batches(rank: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(3, 6, generator=generator) for _ in range(2)] for _ in range(3)]


def train(
    config: str, broken: bool = False, several: bool = False, engine: bool = False
) -> tuple[list[tuple[float, float]], list[bytes], list[bool]]:
    """What the Trainer logs, the weights after it, and whether the optimizer's step and the owner are what they were."""
    module = import_anew()
    owner.release()
    request.forget()
    if config:
        request.request_probe(config)
    follow = fsdp2.patch_engine if engine else fsdp2.patch_trainer
    follow(module)
    follow(module)  # a second time changes nothing
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    net = model()
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
def test_steps_after_a_checkpoint(tmp_path: Path, engine: bool) -> None:
    """Every update is a step with the Trainer's number, loss and gradient norm as it logs them, and what else its engine says; evaluations
    are of no step; log and weights are the same bits, and the optimizer has its own step again."""
    plain = train("", engine=engine)
    probed = train(config(tmp_path), engine=engine)
    assert probed[:2] == plain[:2]
    assert (plain[2], probed[2]) == ([True, False], [True, True])
    scalars = {(row["step"], row["name"]): float(row["value"]) for row in rows(tmp_path, "scalars", 0)}
    for number, (loss, norm) in enumerate(probed[0], 7):
        assert scalars[str(number), "loss"] == pytest.approx(loss, rel=1e-6)
        assert scalars[str(number), "grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert scalars[str(number), "learning_rate"] == 0.1
        assert scalars.get((str(number), "aux_loss")) == (0.5 if engine else None)
    micro = {(row["step"], row["micro_step"]) for row in rows(tmp_path, "actv", 0)}
    assert micro == {(str(step), str(number)) for step in (7, 8, 9) for number in (0, 1)}


def test_several_optimizers(tmp_path: Path) -> None:
    """With expert parallelism the Trainer's optimizer is a mapping of optimizers: an update of all of them is one step, and all parameters
    have their updates."""
    plain = train("", several=True)
    probed = train(config(tmp_path), several=True)
    assert probed[:2] == plain[:2]
    assert probed[2] == [True, True]
    found = rows(tmp_path, "param_updated", 0)
    assert {row["step"] for row in found} == {"7", "8", "9"}
    assert {row["name"] for row in found} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {row["value"] for row in rows(tmp_path, "scalars", 0) if row["name"] == "learning_rate"} == {"0.1"}


@pytest.mark.parametrize("engine", [False, True], ids=["MindSpeed-LLM", "MindSpeed-MM"])
def test_a_step_that_raises(tmp_path: Path, engine: bool) -> None:
    """An error of the training comes out as it is, and the step it was raised in is there, marked as interrupted."""
    train(config(tmp_path), broken=True, engine=engine)
    scalars = {(row["step"], row["name"]): float(row["value"]) for row in rows(tmp_path, "scalars", 0)}
    assert scalars["8", "interrupted"] == 1.0
    assert {step for step, _ in scalars} == {"7", "8"}


def test_nobody_asks() -> None:
    """Without a request the Trainer trains and nobody observes."""
    log, _, restored = train("")
    assert len(log) == 3
    assert restored == [True, False]
