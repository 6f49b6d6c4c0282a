"""A tiny net and its settings for the tests of `PrecisionDebugger`, all in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, nn, ops

from msprobe.mindspore import PrecisionDebugger
from msprobe_engine.formats.dump.notebook.step_dump import StepDump
from msprobe_engine.formats.dump.reader import open_dump


class Pair(nn.Cell):  # type: ignore[misc]
    """A Cell with two tensor inputs."""

    def construct(self, x: Any, y: Any) -> Any:
        return ops.tanh(x) * y


class Net(nn.Cell):  # type: ignore[misc]
    """Two linear layers, one used twice; Cells of nn and mint, functions of ops and mint, methods of Tensor."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        mindspore.set_seed(7)
        self.a = nn.Dense(width, width)
        self.b = nn.SequentialCell(mint.nn.Linear(width, width), nn.ReLU())
        self.pair = Pair()

    def construct(self, x: Any) -> Any:
        h = self.b(self.a(x))
        return mint.add(self.pair(h, self.a(h)), x).sum()


def x(rows: int = 2, width: int = 4) -> Any:
    """An input."""
    return Tensor(np.linspace(-1, 1, rows * width, dtype=np.float32).reshape(rows, width))


class Job:
    """A training: forward and backward pass, update. All its bits are in `state`."""

    def __init__(self, width: int = 4) -> None:
        self.net = Net(width)
        self.optimizer = nn.Adam(self.net.trainable_params(), learning_rate=0.01)
        self.pass_ = mindspore.value_and_grad(self.net, None, self.optimizer.parameters)
        self.losses: list[bytes] = []
        self.gradients: Any = ()

    def forward_backward(self, data: Any = None) -> Any:
        loss, self.gradients = self.pass_(x() if data is None else data)
        self.losses.append(loss.asnumpy().tobytes())
        return loss

    def update(self) -> None:
        self.optimizer(self.gradients)

    def state(self) -> list[bytes]:
        parts = (*self.optimizer.parameters, *self.optimizer.moment1, *self.gradients)
        return [*self.losses, *(t.asnumpy().tobytes() for t in parts)]


def train(debugger: PrecisionDebugger | None, steps: int = 2, within: Callable[[Job, Any], None] | None = None) -> list[bytes]:
    """A training under a debugger; `within` is called before ``stop()`` with the loss."""
    job = Job()
    for _ in range(steps):
        if debugger is not None:
            debugger.start(job.net)
        loss = job.forward_backward()
        if within is not None:
            within(job, loss)
        if debugger is not None:
            debugger.stop()
        job.update()
        if debugger is not None:
            debugger.step()
    return job.state()


def config(directory: Path, level: str = "L0", task: str = "statistics", **keys: Any) -> Path:
    """A config.json with the keys at the top, and ``section`` as the task's section."""
    section = keys.pop("section", {})
    document = {"task": task, "dump_path": str(directory / "dump"), "level": level, "rank": [], "step": [], **keys, task: section}
    path = directory / "config.json"
    path.write_text(json.dumps({k: v for k, v in document.items() if v is not ...}))
    return path


def written(directory: Path, step: int = 0) -> StepDump:
    """The one rank of a step, when everything is written."""
    debugger = PrecisionDebugger._instance
    assert debugger is not None
    debugger.run.files.wait()
    return open_dump(directory / "dump").load(step)


def names(directory: Path, step: int = 0) -> list[str]:
    """Record names of a step."""
    return list(written(directory, step).entries)


def steps(directory: Path) -> list[int]:
    """Steps that are written."""
    debugger = PrecisionDebugger._instance
    assert debugger is not None
    debugger.run.files.wait()
    return open_dump(directory / "dump").steps if (directory / "dump").exists() else []
