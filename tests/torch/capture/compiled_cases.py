"""Trains compiled models with a capture and without, and prints what the compiler counted and what was recorded, as JSON lines.

    python compiled_cases.py CASE...      cases: LEVEL-FIRST-NAME, FIRST is `in` or `out`: is the first step inside a window?

A process of its own: other tests switch the compiler off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from capturing import capture
from torch import nn
from torch._dynamo.utils import counters

BACKEND = "aot_eager"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x)) + x


class Broken(Block):
    """Compiled in pieces."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        torch._dynamo.graph_break()
        return self.act(y) + x


class Net(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.sigmoid(x))


Pair = tuple[nn.Module, Callable[..., Any]]


def whole() -> Pair:
    compiled = torch.compile(Net(), backend=BACKEND)
    return compiled, compiled


def inside_only() -> Pair:
    """The capture is given the model, the training calls the compiled one."""
    model = Net()
    return model, torch.compile(model, backend=BACKEND)


def in_pieces() -> Pair:
    model = Net(Broken)
    return model, torch.compile(model, backend=BACKEND)


def one_layer() -> Pair:
    model = Net()
    model.layers[1].compile(backend=BACKEND)
    return model, model


def wrapped_layer() -> Pair:
    model = Net()
    model.layers[1] = torch.compile(model.layers[1], backend=BACKEND)
    return model, model


def function() -> Pair:
    model = Net()
    compiled = torch.compile(lambda x: torch.tanh(x) * 2, backend=BACKEND)
    return model, lambda x: compiled(model(compiled(x)))


CASES = {f.__name__: f for f in (whole, inside_only, in_pieces, one_layer, wrapped_layer, function)}


def run(make: Callable[[], Pair], level: str, first_inside: bool, probed: bool) -> tuple[list[float], list[int], list[str]]:
    """Losses; frames, graphs and graph breaks after every step; names of the first frame."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, call = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    losses: list[float] = []
    counted: list[int] = []
    names: list[str] = []

    def step() -> None:
        loss = call(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for i in range(4):
        if probed and (i % 2 == 0) == first_inside:
            frame = capture(model, step, level)[0]
            names = names or [e.name for e in frame.entries]
        else:
            step()
        counted += [counters["frames"]["total"], counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())]
    return losses, counted, names


if __name__ == "__main__":
    for case in sys.argv[1:]:
        level, first, name = case.split("-")
        plain = run(CASES[name], level, first == "in", probed=False)
        probed = run(CASES[name], level, first == "in", probed=True)
        print(json.dumps({"losses": [plain[0], probed[0]], "counted": [plain[1], probed[1]], "names": probed[2]}))
