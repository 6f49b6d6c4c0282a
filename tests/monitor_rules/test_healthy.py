"""All rules at their default settings are silent in healthy trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rule_trainings import WIDTH, WORDS, Gpt, Mixture, train
from torch import nn

STEPS = 150


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, WORDS))


RUNS: dict[str, dict[str, Any]] = {
    "gpt, AdamW, warm-up and cosine, dropout": {"model": lambda: Gpt(1)},
    "perceptron, SGD with momentum": {"model": perceptron, "optimizer": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)},
    "bfloat16 with a loss scale that grows": {"model": lambda: Gpt(1), "autocast": True, "scaled": True},
    "mixture of experts": {"model": Mixture},
}


@pytest.mark.fast_cells("perceptron, SGD with momentum")
@pytest.mark.parametrize("name", RUNS)
def test_no_alert(name: str, tmp_path: Path) -> None:
    """150 steps with every family watched and every rule on: not one alert."""
    run = dict(RUNS[name])
    torch.manual_seed(0)
    model = run.pop("model")()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=50) if run.pop("scaled", False) else None
    recorder = train(tmp_path, STEPS, model=model, scaler=scaler, **run)
    assert [alert.message for alert in recorder.alerts] == []
