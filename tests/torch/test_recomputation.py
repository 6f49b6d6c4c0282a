"""Activation checkpointing: recomputed calls are marked, stand below the backward record during which they ran, and lose nothing.
And what runs inside a backward pass without being a recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from capturing import Block, capture, entries
from torch import nn
from torch.utils.checkpoint import checkpoint


class Stack(nn.Module):
    """Checkpoints its blocks, or a function over their parts."""

    def __init__(self, how: str, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.how, self.reentrant = how, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "function":
            return torch.sigmoid(checkpoint(lambda h: self.layers[0].fc(torch.relu(h)), x, use_reentrant=self.reentrant))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.how == "module" else layer(x)
        return x


def run(how: str, reentrant: bool, level: str = "mix") -> dict[str, Any]:
    model = nn.Sequential(Stack(how, reentrant))
    x = torch.ones(2, 4, requires_grad=True)
    return entries(capture(model, lambda: model(x).sum().backward(), level)[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", ["L0", "mix"])
def test_recomputed_modules(reentrant: bool, level: str) -> None:
    """Every call of the checkpointed block is recorded again, marked, below the backward record during which it runs: that of the
    module around the checkpoint, or of the block itself, whose graph is used in the other kind."""
    found = run("module", reentrant, level)
    plain = run("plain", reentrant, level)
    again = {name: entry for name, entry in found.items() if entry.tags.get("is_recompute")}
    assert {n for n in plain if ".forward" in n} <= set(found)
    assert {n.split(".forward")[0] for n in again if n.startswith("Module.")} == {
        f"Module.0.layers.{i}.{part}" for i in (0, 1) for part in ("Block", "fc.Linear", "act.GELU")
    }
    for i in (0, 1):
        during = "Module.0.Stack.backward.0" if reentrant else f"Module.0.layers.{i}.Block.backward.0"
        assert again[f"Module.0.layers.{i}.Block.forward.1"].parent == during
        assert again[f"Module.0.layers.{i}.fc.Linear.forward.1"].parent == f"Module.0.layers.{i}.Block.forward.1"
    number = 1 if reentrant else 0  # where the graph of the recomputed call is the one that is used
    assert found[f"Module.0.layers.0.fc.Linear.backward.{number}"].parent == f"Module.0.layers.0.Block.backward.{number}"
    assert found[f"Module.0.layers.0.Block.backward.{number}"].parent == ("Module.0.Stack.backward.0")
    if level == "mix":
        assert again["Functional.linear.2.forward"].parent == "Module.0.layers.1.fc.Linear.forward.1"
        assert not [n for n in found if "CheckpointFunction" in n]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_functions(reentrant: bool) -> None:
    """A checkpointed function: its calls stand directly below the backward record."""
    found = run("function", reentrant)
    for name in ("Torch.relu.1.forward", "Module.0.layers.0.fc.Linear.forward.1"):
        assert found[name].tags.get("is_recompute") is True
        assert found[name].parent == "Module.0.Stack.backward.0"


def test_a_recomputation_that_is_stopped_early_says_so() -> None:
    """Non-reentrant checkpoints stop when they have what they need: the call that was cut off has no output and is no failure."""
    found = run("function", False)
    cut = [e for e in found.values() if e.tags.get("stopped_early")]
    assert cut
    assert all(e.tags.get("is_recompute") and "raised" not in e.tags and e.sections["output"] is None for e in cut)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * torch.square(x)


def test_code_of_a_backward_pass_is_no_recomputation() -> None:
    """Calls of a custom function's backward and of a tensor hook are recorded below the backward record, not marked."""

    class Around(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = Cube.apply(x * 2)
            y.register_hook(lambda g: g.clamp(max=1e9))
            return y * 1

    model = nn.Sequential(Around())
    found = entries(capture(model, lambda: model(torch.ones(2, requires_grad=True)).sum().backward(), "mix")[0])
    for name in ("Torch.square.0.forward", "Tensor.clamp.0.forward"):
        assert "is_recompute" not in found[name].tags
        assert found[name].parent == "Module.0.Around.backward.0"


def test_records_stand_before_what_encloses_them() -> None:
    """Gradients of weights arrive after those of inputs; their records stand before the backward records of the modules around."""
    names = list(run("plain", True))
    place = {name: i for i, name in enumerate(names)}
    for i in (0, 1):
        block = [
            f"Functional.linear.{i}.backward",
            f"Module.0.layers.{i}.fc.Linear.parameters_grad.0",
            f"Module.0.layers.{i}.fc.Linear.backward.0",
            f"Module.0.layers.{i}.Block.backward.0",
            "Module.0.Stack.backward.0",
        ]
        assert sorted(block, key=place.__getitem__) == block
