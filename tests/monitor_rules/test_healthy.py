"""All rules at their default settings are silent in healthy trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_trainings import WIDTH, WORDS, Gpt, Mixture, Recorder, settings, train
from torch import nn
from torch.nn.functional import cross_entropy

from msprobe_engine.core.settings.schema import MonitorSettings, RuleSettings
from msprobe_integrations.torch.monitor.probe import TorchProbe

STEPS = 150
RECOMMENDED = (RuleSettings(rule="recommended"),)
CHEAP = MonitorSettings(gradients=True, parameters=True, updates=True, digest=True)
CENTRES = torch.randn(10, 20, generator=torch.Generator().manual_seed(7))
Loss = Callable[[int], torch.Tensor]
Hook = Callable[[int], None]


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


def points(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy points around ten centres; the same for equal steps."""
    generator = torch.Generator().manual_seed(5000 + step)
    classes = torch.randint(0, 10, (32,), generator=generator)
    return CENTRES[classes] + torch.randn(32, 20, generator=generator), classes


def classifier(out: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, out))


def fit(model: nn.Module) -> Loss:
    def loss(step: int) -> torch.Tensor:
        x, classes = points(step)
        return cross_entropy(model(x), classes)

    return loss


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def loop(probe: TorchProbe, model: nn.Module, optimizer: Any, loss_of: Loss, before: Hook | None = None, after: Hook | None = None) -> None:
    """A training of `STEPS` steps. `before` comes between the backward pass and the update, `after` behind the update."""
    probe.attach(model, optimizer)
    for step in range(STEPS):
        probe.begin_step(step)
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        if before is not None:
            before(step)
        optimizer.step()
        probe.end_step({"loss": loss.detach()})
        if after is not None:
            after(step)


def layers_left_out(probe: TorchProbe) -> None:
    """Stochastic depth: one call in four passes a layer by."""

    class Depth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(20, WIDTH), nn.Linear(WIDTH, 10)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                if torch.rand(()) > 0.25:
                    x = x + torch.relu(layer(x))
            return self.last(x)

    model = Depth()
    loop(probe, model, torch.optim.SGD(model.parameters(), lr=0.05), fit(model))


def tasks_in_turn(probe: TorchProbe) -> None:
    """Two heads: the second, with a loss ten times as large, in every fifth step."""
    model = nn.ModuleDict({"trunk": classifier(32), "classes": nn.Linear(32, 10), "restored": nn.Linear(32, 20)})

    def loss(step: int) -> torch.Tensor:
        x, classes = points(step)
        features = model["trunk"](x)
        return (
            cross_entropy(model["classes"](features), classes) if (step + 3) % 5 else (model["restored"](features) - x).square().sum() / 32
        )

    loop(probe, model, adam(model.parameters()), loss)


class Adapted(nn.Module):
    """A frozen layer beside two small matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.up = base.requires_grad_(False), nn.Parameter(torch.zeros(base.out_features, 4))
        self.down = nn.Parameter(torch.randn(4, base.in_features) / 8.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += self.up @ self.down
            self.down.normal_(std=1.0 / 8.0)
            self.up.zero_()


def merged_adapters(probe: TorchProbe) -> None:
    """ReLoRA: every 50 steps adapters are merged and made anew, the optimizer forgets, and the learning rate warms up."""
    model = nn.Sequential(*(Adapted(part) if isinstance(part, nn.Linear) else part for part in classifier(64)), nn.Linear(64, 10))
    optimizer = adam(p for p in model.parameters() if p.requires_grad)

    def merge(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, ((step + 1) % 50 + 1) / 10)
        if step % 50 == 49:
            for part in model[:-1]:
                if isinstance(part, Adapted):
                    part.merge()
            optimizer.state.clear()

    loop(probe, model, optimizer, fit(model), after=merge)


def pruning(probe: TorchProbe) -> None:
    """Half of one layer is pruned, later a mask on all; masks are applied after every update, and to the gradients."""
    model = classifier()
    masks: dict[nn.Parameter, torch.Tensor] = {}

    def mask_gradients(_step: int) -> None:
        for weight, mask in masks.items():
            weight.grad.mul_(mask)

    def prune(step: int) -> None:
        if step in (60, 100):
            for part in model[2:3] if step == 60 else model[::2]:
                masks[part.weight] = part.weight.detach().abs() > part.weight.detach().abs().median()
        for weight, mask in masks.items():
            weight.data.mul_(mask)

    loop(probe, model, adam(model.parameters()), fit(model), mask_gradients, prune)


def teacher_of_its_own(probe: TorchProbe) -> None:
    """A moving average of the student, in the same module and no optimizer, from the first step on."""
    model = nn.ModuleDict({"student": classifier(), "teacher": classifier()})

    def follow(_step: int) -> None:
        with torch.no_grad():
            for mine, theirs in zip(model["student"].parameters(), model["teacher"].parameters()):
                theirs.lerp_(mine, 0.01)

    loop(probe, model, adam(model["student"].parameters()), fit(model["student"]), after=follow)


def one_layer_moved_and_put_back(probe: TorchProbe) -> None:
    """Sharpness-aware, of the last layer: the gradient is taken elsewhere, and what is put back differs by round-off."""
    model = classifier()
    loss, weight = fit(model), model[4].weight

    def at_a_distance(step: int) -> None:
        with torch.no_grad():
            distance = 0.05 * weight.grad / weight.grad.norm()
            weight.add_(distance)
        model.zero_grad()
        loss(step).backward()
        with torch.no_grad():
            weight.sub_(distance)

    loop(probe, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, at_a_distance)


def unfreezing(probe: TorchProbe) -> None:
    """The last layer first, one more every 50 steps."""
    model = classifier()
    for part in model[:4]:
        part.requires_grad_(False)
    optimizer = adam(model[4].parameters())
    probe.attach(model, optimizer)

    def unfreeze(step: int) -> None:
        if step % 50 == 49 and step < 140:
            part = model[2 - 2 * (step // 50)].requires_grad_(True)
            optimizer.add_param_group({"params": part.parameters()})
            probe.attach(model, optimizer)

    loop(probe, model, optimizer, fit(model), after=unfreeze)


def evaluation_before_the_update(probe: TorchProbe) -> None:
    """Between a backward pass and its update; train() stands at the beginning of the loop."""
    model = classifier()
    loss = fit(model)

    def in_training_mode(step: int) -> torch.Tensor:
        model.train()
        return loss(step)

    def evaluate(step: int) -> None:
        if step % 20 == 10:
            model.eval()
            with torch.no_grad():
                loss(step)
            model.train(step % 40 == 10)

    loop(probe, model, adam(model.parameters()), in_training_mode, evaluate)


def bias_before_a_batch_norm(probe: TorchProbe) -> None:
    """Its gradient is what round-off leaves of 0, and the update smaller than the bias can hold."""
    model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    loop(probe, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), fit(model))


RECIPES = (
    layers_left_out, tasks_in_turn, merged_adapters, pruning, teacher_of_its_own, one_layer_moved_and_put_back, unfreezing,
    evaluation_before_the_update, bias_before_a_batch_norm,
)  # fmt: skip


@pytest.mark.fast_cells("tasks_in_turn")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_no_alert_of_a_recipe(recipe: Callable[[TorchProbe], None], tmp_path: Path) -> None:
    """What programs do to their own weights, optimizers, losses and modes is no fault."""
    torch.manual_seed(0)
    recorder = Recorder()
    probe = TorchProbe(settings(tmp_path, RECOMMENDED, CHEAP), extra_sinks=[recorder])
    try:
        recipe(probe)
    finally:
        probe.close()
    assert recorder.frames == STEPS
    assert [alert.message for alert in recorder.alerts] == []
