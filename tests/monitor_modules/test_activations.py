"""Activations and their gradients against float64 references taken by the test."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from watched import monitor, norm, values, watch

from msprobe_engine.probe.sinks.memory import MemorySink

pytestmark = pytest.mark.framework
BOTH = monitor(activations=True, activation_gradients=True)


class Odd(nn.Module):
    """Tensors at every place a call can have them."""

    def forward(self, x: torch.Tensor, n: int, pair: Any, *, mask: torch.Tensor, more: Any = None) -> Any:
        return x * n + pair[1], None, {"a": x + mask, "b": [x - more["z"]]}, pair[0] * 2


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.odd(x, 2, (x + 1, x + 2), mask=x + 3, more=OrderedDict(z=x + 4))
        self.seen = y
        out: torch.Tensor = y[0] + y[2]["a"] + y[2]["b"][0] + y[3]
        return out


def test_names_and_values_of_odd_signatures() -> None:
    """Inputs count tensors, positional ones first, then keywords; outputs count all places; tensors inside of containers have their
    place and the place inside. Values are those of the tensors, and each gradient is that of the call."""
    model = Holder()
    x = torch.randn(3, requires_grad=True)
    kept: dict[str, torch.Tensor] = {}

    def step(_: int) -> None:
        out = model(x)
        for name, tensor in zip(("0", "2_a", "2_b_0", "3"), (model.seen[0], model.seen[2]["a"], model.seen[2]["b"][0], model.seen[3])):
            tensor.retain_grad()
            kept[name] = tensor
        (out * torch.arange(3)).sum().backward()

    found = values(watch(model, BOTH, step))
    given = {"0": x, "1": x + 3, "2_0": x + 1, "2_1": x + 2, "more_z": x + 4}
    expected = {("actv", f"odd.input_{k}"): norm(t) for k, t in given.items()}
    expected |= {("actv", f"odd.output_{k}"): norm(t) for k, t in kept.items()}
    expected |= {("actv_grad", f"odd.output_{k}"): norm(t.grad) for k, t in kept.items() if t.grad is not None}
    ones = norm(torch.arange(3))
    shares = {"0": 2 * ones + ones + ones, "1": ones, "2_0": 2 * ones, "2_1": ones, "more_z": ones}  # of g: 2+1+1, 1, 2, 1, -1
    expected |= {("actv_grad", f"odd.input_{k}"): value for k, value in shares.items()}
    got = {(family, name): v.norm for (_, family, name, _), v in found.items() if name.startswith("odd")}
    assert got == pytest.approx(expected, rel=1e-6)
    assert (0, "actv", ".input", 0) in found
    assert (0, "actv_grad", ".output", 0) in found


def test_forward_only_and_backward_only() -> None:
    """Each direction alone gives the rows of that direction, with the values of both together."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    x = torch.randn(2, 3)

    def step(_: int) -> None:
        model(x).sum().backward()

    both = values(watch(model, BOTH, step))
    forward = values(watch(model, monitor(activations=True), step))
    backward = values(watch(model, monitor(activation_gradients=True), step))
    assert {k[1] for k in forward} == {"actv"}
    assert {k[1] for k in backward} == {"actv_grad"}
    assert forward | backward == both


def test_input_that_the_module_changes_in_place() -> None:
    """An input is what the module got, not what it made of it."""
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    x = torch.tensor([-3.0, 4.0])
    found = values(watch(model, monitor(activations=True), lambda _: model(x.clone())))
    assert found[0, "actv", "1.input", 0].norm == pytest.approx(5)
    assert found[0, "actv", "1.output", 0].norm == pytest.approx(4)


def accumulate(model: nn.Module, n: int) -> Any:
    def step(number: int) -> None:
        for i in range(n):
            model(torch.full((1, 2), float(10 * number + i + 1))).sum().backward()

    return step


def test_micro_steps_are_counted() -> None:
    """Nobody says which micro batch it is: the forward passes of the model count, from 0 in every step, gradients included."""
    model = nn.Sequential(nn.Linear(2, 2))
    found = values(watch(model, BOTH, accumulate(model, 3), steps=2))
    for step in (0, 1):
        for i in range(3):
            assert found[step, "actv", "0.input", i].mean == pytest.approx(10 * step + i + 1)
            assert (step, "actv_grad", "0.output", i) in found


def test_micro_step_that_the_training_sets() -> None:
    """What the training says about the micro batch counts more."""
    from watched import make

    memory, model = MemorySink(), nn.Sequential(nn.Linear(2, 2))
    probe = make(monitor(activations=True), memory)
    probe.attach(model)
    probe.begin_step(0)
    for i in (5, 7):
        probe.micro_step = i
        model(torch.ones(1, 2))
    probe.end_step()
    probe.close()
    assert {k[3] for k in values(memory.frames)} == {5, 7}


def test_several_models_count_for_themselves() -> None:
    """Two models that take turns have micro steps of their own."""
    a, b = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))

    def step(_: int) -> None:
        for model in (a, a, b):
            model(torch.ones(1, 2))

    (frame,) = watch([a, b], monitor(activations=True), step)
    assert {(s.vpp_stage, s.micro_step) for s in frame.samples} == {(0, 0), (0, 1), (1, 0)}


def test_evaluation_is_not_seen() -> None:
    """A pass in evaluation mode, or while the probe is paused, has no rows and is no micro batch; a frozen part in evaluation mode
    inside of a training pass is seen."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()

    def step(_: int) -> None:
        model(torch.ones(1, 2))
        model.eval()
        with torch.no_grad():
            model(torch.ones(5, 2))
        model.train()
        model[1].eval()
        model(torch.ones(1, 2))

    found = values(watch(model, monitor(activations=True), step))
    assert {(k[2], k[3]) for k in found} == {(f"{n}{p}", i) for n in ("", "0", "1") for p in (".input", ".output") for i in (0, 1)}
    assert all(v.numel == 2 for v in found.values())


class Block(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            plain: torch.Tensor = self.fc(x)
            return plain
        out: torch.Tensor = checkpoint(self.fc, x, use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_counted_twice(reentrant: bool) -> None:
    """With either kind of checkpointing rows are the same as without: every activation and every gradient once, with its micro step."""

    def rows(kind: bool | None) -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), Block(kind), Block(kind))

        def step(_: int) -> None:
            for _ in range(2):
                model(torch.randn(2, 4)).square().sum().backward()

        return values(watch(model, BOTH, step, steps=2))

    plain, checkpointed = rows(None), rows(reentrant)
    assert plain.keys() == checkpointed.keys()
    assert {k: v.norm for k, v in checkpointed.items()} == pytest.approx({k: v.norm for k, v in plain.items()}, rel=1e-5)


def test_call_that_raises_leaves_nothing() -> None:
    """A call that raised has an input and no output; the next call of the module is not mistaken for it."""

    class Fragile(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.numel() > 2:
                raise ValueError("too many")
            return x * 2

    model = nn.Sequential(Fragile())

    def step(_: int) -> None:
        with pytest.raises(ValueError, match="too many"):
            model(torch.ones(3, requires_grad=True))
        model(torch.ones(2, requires_grad=True)).sum().backward()

    found = values(watch(model, BOTH, step, steps=2))
    assert {k[2] for k in found if k[3] == 1 and k[0] == 1} == {"0.input", "0.output", ".input", ".output"}
    assert {k[2] for k in found if k[3] == 0} == {"0.input", ".input"}


def test_hooks_are_there_in_due_steps_only() -> None:
    """A step that is not due has no hooks, and after the last one nothing is left behind."""
    model = nn.Sequential(nn.Linear(2, 2))
    from watched import make

    probe = make(monitor(activations=True, interval=2), MemorySink())
    probe.attach(model)
    there = []
    for number in range(4):
        probe.begin_step(number)
        there.append(len(model[0]._forward_hooks) + len(model[0]._forward_pre_hooks))
        model(torch.ones(1, 2))
        probe.end_step()
    probe.close()
    assert there == [2, 0, 2, 0]
    assert not model[0]._forward_hooks
    assert not model._forward_pre_hooks
