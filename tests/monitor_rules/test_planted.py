"""Faults planted in real trainings are caught by the named rule within the stated number of steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from rule_trainings import EVERYTHING, Gpt, Mixture, Recorder, Step, train

from msprobe_engine.core.settings.schema import MonitorSettings, RuleSettings

RECOMMENDED = (RuleSettings(rule="recommended"),)
CHEAP = MonitorSettings(gradients=True, parameters=True, updates=True, digest=True)
START = 30


def caught(recorder: Recorder, rule: str) -> tuple[int, str]:
    """Step and name of the first alert of a rule."""
    alert = next(a for a in recorder.alerts if a.rule == rule)
    return alert.step, alert.name


def run(place: Path, steps: int, **how: Any) -> Recorder:
    how.setdefault("model", Gpt(1))
    how.setdefault("monitor", CHEAP)
    recorder = train(place, steps, rules=RECOMMENDED, **how)
    assert not [a for a in recorder.alerts if a.step < START], "the run is healthy before the fault"
    return recorder


def test_nan_gradient(tmp_path: Path) -> None:
    """NaN in one gradient: in the same step, by tensor; in the loss one step later, since the update spreads it."""

    def fault(step: Step) -> None:
        if step.number == START:
            step.model.layers[0].fc1.weight.grad[0, 0] = float("nan")

    recorder = run(tmp_path, START + 2, after_backward=fault)
    assert caught(recorder, "nan_inf") == (START, "layers.0.fc1.weight")
    assert caught(recorder, "loss_not_finite") == (START + 1, "loss")


def test_exploding_learning_rate(tmp_path: Path) -> None:
    """A learning rate of 1: the loss spikes within 5 steps."""

    def fault(step: Step) -> None:
        if step.number >= START:
            for group in step.optimizer.param_groups:
                group["lr"] = 1.0

    step, name = caught(run(tmp_path, START + 6, before=fault), "loss_spike")
    assert name == "loss"
    assert step <= START + 5


@pytest.mark.parametrize("digest", [False, True])
def test_frozen_parameter(tmp_path: Path, digest: bool) -> None:
    """A parameter that the optimizer was not given: in the third step, and no other is named."""

    def without_one(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for i, p in enumerate(parameters) if i != 6], lr=3e-3)

    model = Gpt(1)
    monitor = MonitorSettings(parameters=True, digest=digest)
    recorder = train(tmp_path, 8, model=model, rules=RECOMMENDED, monitor=monitor, optimizer=without_one)
    name = list(dict(model.named_parameters()))[6]
    assert [(a.rule, a.name, a.step) for a in recorder.alerts] == [("untrained_parameter", name, 2)]
    monitor = MonitorSettings(gradients=False, parameters=True, digest=digest)
    recorder = train(tmp_path, 8, model=Gpt(1), rules=RECOMMENDED, monitor=monitor, optimizer=without_one)
    assert [(a.rule, a.name, a.step) for a in recorder.alerts] == [("unchanged_parameter", name, 2)]


@pytest.mark.slow
def test_underflow_in_bfloat16(tmp_path: Path) -> None:
    """Gradients that come down to what bfloat16 cannot hold: within 10 steps."""

    def fault(step: Step) -> None:
        if step.number >= START:
            step.loss_factor = 1e-41

    monitor = MonitorSettings(gradients=True, ops=("norm", "underflow"))
    recorder = run(tmp_path, START + 11, before=fault, autocast=True, clip=1e9, monitor=monitor)
    assert caught(recorder, "gradient_underflow")[0] <= START + 10


@pytest.mark.slow
def test_dead_expert(tmp_path: Path) -> None:
    """An expert that the router never takes any more: after 20 steps."""

    def fault(step: Step) -> None:
        if step.number == START:
            step.model.mixture.closed = 1

    recorder = run(tmp_path, START + 21, model=Mixture(), before=fault)
    assert caught(recorder, "dead_expert") == (START + 19, "mixture.experts.1")


def test_loss_spike(tmp_path: Path) -> None:
    """One bad step of the loss: in that step."""

    def fault(step: Step) -> None:
        if step.number == START:
            step.loss_factor = 2.0

    assert caught(run(tmp_path, START + 2, before=fault), "loss_spike") == (START, "loss")


@pytest.mark.slow
def test_update_norm_doubles_before_the_loss_moves(tmp_path: Path) -> None:
    """Gradients that begin to point the same way, no larger than before: the update is said to have doubled within 8 steps, and neither
    loss nor gradient norm has said anything by then."""

    def noise(step: Step) -> None:
        generator = torch.Generator().manual_seed(7 if step.number >= 2 * START else step.number)
        for parameter in step.model.parameters():
            parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)

    recorder = run(
        tmp_path,
        2 * START + 9,
        after_backward=noise,
        warmup=10,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, betas=(0.9, 0.99)),
    )
    step, _ = caught(recorder, "update_norm_doubling")
    assert 2 * START < step <= 2 * START + 8
    assert {a.rule for a in recorder.alerts} == {"update_norm_doubling"}


def test_dead_activation(tmp_path: Path) -> None:
    """A ReLU that is pushed below zero: after 10 steps."""

    def fault(step: Step) -> None:
        if step.number == START:
            with torch.no_grad():
                step.model.layers[0].fc1.bias.fill_(-100.0)

    monitor = MonitorSettings(gradients=False, activations=True)
    assert caught(run(tmp_path, START + 11, before=fault, monitor=monitor), "dead_activation") == (START + 9, "layers.0.act.output")


def test_gradients_that_vanish_and_explode(tmp_path: Path) -> None:
    """A layer whose gradient explodes is named in that step, one whose gradient vanishes after 10."""

    def fault(step: Step) -> None:
        factor = 500.0 if step.number == START else 1e-6 if step.number > START else 1.0
        for parameter in step.model.layers[0].parameters():
            parameter.grad.mul_(factor)

    recorder = run(tmp_path, START + 12, after_backward=fault, monitor=MonitorSettings(gradients=True))
    assert caught(recorder, "exploding_gradient") == (START, "layers.0")
    assert caught(recorder, "vanishing_gradient") == (START + 10, "layers.0")


@pytest.mark.slow
def test_overflow_in_every_step(tmp_path: Path) -> None:
    """Inf in every step under a loss scale: skipped updates after 4 steps, the end of the scale when it is there."""

    def fault(step: Step) -> None:
        if step.number >= 60:
            step.model.layers[0].fc1.weight.grad[0, 0] = float("inf")

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    recorder = run(tmp_path, 72, after_backward=fault, autocast=True, scaler=scaler)
    assert caught(recorder, "skipped_updates") == (63, "skipped")
    assert caught(recorder, "loss_scale_collapse")[0] <= 69


@pytest.mark.parametrize("how", ["detached", "frozen", "left"])
def test_a_parameter_that_is_trained_no_more(how: str, tmp_path: Path) -> None:
    """Without a gradient after 3 steps, out of its optimizer at once; by name, once."""

    def fault(step: Step) -> None:
        layer = step.model.layers[0].fc2
        if step.number == START and how == "detached":
            layer.register_forward_hook(lambda _module, _inputs, output: output.detach())
        elif step.number == START and how == "frozen":
            layer.requires_grad_(False)
        elif step.number == START:
            for group in step.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if all(p is not q for q in layer.parameters())]

    recorder = run(tmp_path, START + 8, before=fault, monitor=MonitorSettings(gradients=True))
    alerts = [a for a in recorder.alerts if a.rule == "untrained_parameter"]
    assert {a.step for a in alerts} == {START if how == "left" else START + 2}
    assert {"layers.0.fc2.bias", "layers.0.fc2.weight"} <= {a.name for a in alerts}
    assert len(alerts) == len({a.name for a in alerts})


def test_gradients_of_a_module_that_are_set_to_zero(tmp_path: Path) -> None:
    """Said to be zero, of which module, and since when."""

    def fault(step: Step) -> None:
        if step.number >= START:
            for parameter in step.model.layers[0].parameters():
                parameter.grad.zero_()

    recorder = run(tmp_path, START + 8, after_backward=fault, monitor=MonitorSettings(gradients=True))
    (first, *others) = [a for a in recorder.alerts if a.rule == "untrained_parameter"]
    assert f"exact zeros, as all {len(others) + 1} parameters of layers, since step {START} (3 monitored steps)" in first.message


def test_a_layer_that_is_frozen_after_two_looks(tmp_path: Path) -> None:
    """As where every tenth step is looked at: after three looks without a gradient."""

    def fault(step: Step) -> None:
        if step.number == 2:
            step.model.layers[0].fc2.requires_grad_(False)

    recorder = train(tmp_path, 8, rules=RECOMMENDED, model=Gpt(1), monitor=MonitorSettings(gradients=True), before=fault)
    assert {(a.rule, a.step) for a in recorder.alerts} == {("untrained_parameter", 4)}


@pytest.mark.parametrize("since", [0, START])
def test_a_training_in_evaluation_mode(since: int, tmp_path: Path) -> None:
    """In the step in which it changes to it; from the start on it is meant."""

    def fault(step: Step) -> None:
        step.model.train(step.number < since)

    recorder = run(tmp_path, START + 5, before=fault, monitor=MonitorSettings(gradients=True))
    assert [(a.rule, a.name, a.step) for a in recorder.alerts] == [("broken_loop", "evaluation_mode", START)][: bool(since)]


def test_an_optimizer_that_loses_its_state(tmp_path: Path) -> None:
    """It counts its updates anew: in the next step, once."""

    def fault(step: Step) -> None:
        if step.number == START:
            step.optimizer.state.clear()

    recorder = run(tmp_path, START + 5, before=fault, monitor=MonitorSettings(gradients=True))
    assert [(a.rule, a.name, a.step) for a in recorder.alerts] == [("broken_loop", "updates_made", START + 1)]


def test_no_gradient_at_any_update(tmp_path: Path) -> None:
    """Gradients that are cleared before the update, which moves nothing: after 10 steps."""

    def fault(step: Step) -> None:
        step.optimizer.zero_grad()

    recorder = train(tmp_path, 12, rules=RECOMMENDED, model=Gpt(1), monitor=MonitorSettings(gradients=True), after_backward=fault)
    assert [(a.rule, a.step, a.name) for a in recorder.alerts] == [("no_progress", 9, "all reduced gradients")]


def test_a_parameter_that_never_was_trained(tmp_path: Path) -> None:
    """A module that is in the optimizer and is never called: after 20 steps."""
    model = Gpt(1)
    model.adapter = torch.nn.Linear(2, 2, bias=False)
    recorder = train(tmp_path, 24, rules=RECOMMENDED, model=model, monitor=MonitorSettings(gradients=True))
    assert [(a.rule, a.step, a.name) for a in recorder.alerts] == [("untrained_parameter", 19, "adapter.weight")]


def test_parameters_that_are_not_meant_to_be_trained(tmp_path: Path) -> None:
    """A teacher in no optimizer, and a bias whose gradient is zero beside that of its weight: no alert."""
    model = Gpt(1)

    def cancel(step: Step) -> None:
        bias = step.model.layers[0].fc2.bias
        assert bias.grad is not None
        bias.grad.zero_()

    teacher = torch.nn.Linear(2, 2)

    def of_the_student(parameters: Any) -> torch.optim.Optimizer:
        theirs = {id(p) for p in teacher.parameters()}
        return torch.optim.AdamW([p for p in parameters if id(p) not in theirs], lr=1e-3)

    model.teacher = teacher
    monitor = MonitorSettings(gradients=True)
    recorder = train(tmp_path, 24, rules=RECOMMENDED, model=model, monitor=monitor, optimizer=of_the_student, after_backward=cancel)
    assert recorder.alerts == []


@pytest.mark.fast_cells("False")
@pytest.mark.parametrize("digest", [False, True])
def test_a_parameter_that_something_writes_into(digest: bool, tmp_path: Path) -> None:
    """Between two updates, in the step in which it is seen; weights that are all loaded anew are no fault of one."""

    def fault(step: Step) -> None:
        with torch.no_grad():
            if step.number == START:
                step.model.layers[0].fc1.weight.view(-1)[7] *= 100.0
            elif step.number == START + 3:
                for parameter in step.model.parameters():
                    parameter.mul_(0.999)

    recorder = run(tmp_path, START + 6, before=fault, monitor=MonitorSettings(parameters=True, digest=digest))
    alerts = [(a.step, a.name) for a in recorder.alerts if a.rule == "written_parameter"]
    assert alerts == [(START, "layers.0.fc1.weight")]


@pytest.mark.slow
def test_a_learning_rate_that_becomes_zero(tmp_path: Path) -> None:
    """After 10 steps."""

    def fault(step: Step) -> None:
        if step.number >= START:
            for group in step.optimizer.param_groups:
                group["lr"] = 0.0

    assert caught(run(tmp_path, START + 11, before=fault), "no_progress") == (START + 9, "learning_rate")


def test_a_learning_rate_that_is_far_too_high_from_the_start(tmp_path: Path) -> None:
    """The loss is far above the first two, 5 steps in a row."""

    def rate_of_one(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1.0)

    torch.manual_seed(0)
    recorder = train(tmp_path, 12, rules=RECOMMENDED, model=Gpt(1), monitor=CHEAP, warmup=1, optimizer=rate_of_one)
    assert caught(recorder, "loss_spike") in [(step, "loss") for step in (5, 6, 7, 8)]


def test_training_is_the_same_with_all_rules(tmp_path: Path) -> None:
    """Parameters after 10 steps are bitwise the same with every family and rule on as with gradients and the default rule."""
    results = []
    for monitor, rules in ((EVERYTHING, RECOMMENDED), (MonitorSettings(), ())):
        torch.manual_seed(3)
        model = Gpt(1)
        train(tmp_path, 10, model=model, monitor=monitor, rules=rules)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))
