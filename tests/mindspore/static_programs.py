"""Small programs that run in every mode, for the tests of compiled graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from msprobe.mindspore import PrecisionDebugger

MODES = ("pynative", "graph", "one_step", "jit", "jit_all")


class Twice(nn.Cell):  # type: ignore[misc]
    """Takes a tuple of tensors, a number, a dict and a keyword; gives a tuple with a dict, a tensor without dimensions and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Dense(4, 4)

    def construct(self, pair, ids, *, scale=2.0, mask=None):  # type: ignore[no-untyped-def]
        a, b = pair
        y = self.d(a) * scale + b
        if mask is not None:
            y = y * mask
        return (y, {"sum": (a * a).sum(), "ids": ids["ids"] + 1}), (b - 1.0).astype(ms.bfloat16)


class Part(nn.Cell):  # type: ignore[misc]
    """Uses its input three times, beside a residual; its result goes on at several places."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Dense(4, 4), nn.Dense(4, 4), nn.Dense(4, 4)

    def construct(self, x):  # type: ignore[no-untyped-def]
        return ops.softmax(self.q(x) * self.k(x), -1) * self.v(x) + x * 0.37


class Net(nn.Cell):  # type: ignore[misc]
    """A Cell called twice, members of a CellList, containers, keywords, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.parts = nn.CellList([Part(), Part()])
        self.twice = Twice()
        self.norm = nn.LayerNorm((4,))

    def construct(self, ids):  # type: ignore[no-untyped-def]
        x = self.emb(ids)
        for part in self.parts:
            x = x + part(x) * ops.tanh(x) + self.norm(x)
        (y, more), low = self.twice((x, ops.sin(x)), {"ids": ids}, scale=0.5, mask=ops.cos(x))
        return y.sum() + more["sum"] + low.astype(ms.float32).mean()


IDS = Tensor(np.array([[1, 2, 3], [3, 2, 1]], np.int32))


def config(path: Path, **dump: Any) -> str:
    """A configuration file for level L0."""
    task = dump.get("task", "statistics")
    section = dump.pop("section", {})
    settings = {"task": task, "dump_path": str(path / "dump"), "level": "L0", "rank": [], "step": [], task: section} | dump
    (path / "config.json").write_text(json.dumps(settings))
    return str(path / "config.json")


def train(mode: str, debugger: PrecisionDebugger | None = None, steps: int = 2, started: int = 0) -> list[bytes]:
    """All bits of a training: losses, and weights at the end. `started`: first step that begins with ``start``."""
    ms.set_context(mode=ms.GRAPH_MODE if mode in ("graph", "one_step") else ms.PYNATIVE_MODE)
    ms.set_seed(3)
    np.random.seed(3)
    net = Net()
    optimizer = nn.Adam(net.trainable_params(), 1e-2)
    forward: Any = net
    if mode == "jit":

        @ms.jit
        def forward(ids):  # type: ignore[no-untyped-def]
            return net(ids)

    gradient: Any = ms.value_and_grad(forward, None, net.trainable_params())
    one_step: Any = nn.TrainOneStepCell(net, optimizer) if mode == "one_step" else None
    if mode == "jit_all":
        inner = gradient

        @ms.jit
        def gradient(ids):  # type: ignore[no-untyped-def]
            return inner(ids)

    bits = []
    for step in range(steps):
        if debugger is not None and step >= started:
            debugger.start(net)
        if one_step is not None:
            loss = one_step(IDS)
        else:
            loss, gradients = gradient(IDS)
            optimizer(gradients)
        bits.append(loss.asnumpy().tobytes())
        if debugger is not None and step >= started:
            debugger.stop()
        if debugger is not None:
            debugger.step()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    return bits + [p.asnumpy().tobytes() for p in net.trainable_params()]
