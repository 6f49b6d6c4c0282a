"""Another network than the GPT of the fault set: convolutions with batch norm, a GRU, a mixture of experts, SGD with momentum; and defects
in it. A diagnosis that was tuned to one model is found out here.
"""

from __future__ import annotations

import atexit
import multiprocessing
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fault_dumps import debugger_of, prepare
from torch import nn

STEPS = 3


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))) + x)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Each token goes through the two experts of its highest weights."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.gate(x), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.weights(x).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            for place in range(2):
                mine = chosen[..., place] == number
                if mine.any():
                    out[mine] = out[mine] + weights[..., place][mine].unsqueeze(-1) * expert(x[mine])
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Residual(8), Residual(8))
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.gru = nn.GRU(8, 16, batch_first=True)
        self.norm, self.mixture = nn.RMSNorm(16), Mixture(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.blocks(F.relu(self.stem(x)))).flatten(2).transpose(1, 2)
        x, _ = self.gru(x)
        x = x + self.mixture(self.norm(x))
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Run:
    """What a defect may change.

    Attributes:
        data: (step, images, labels) -> images, labels.
        gradients: called between the backward pass and the update, with the step.
    """

    def __init__(self) -> None:
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.loss: Callable[..., torch.Tensor] = F.cross_entropy
        self.data: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = lambda _, x, y: (x, y)
        self.gradients: Callable[[int], None] = lambda _: None


class Defect(NamedTuple):
    """`truth`: record names that are right as first suspect, as regular expressions; `step`: where it shows first."""

    name: str
    plant: Callable[[Run], Any]
    truth: str
    step: int = 0
    finding: str = "divergence"


def _without_residual(run: Run) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))))

    block = run.net.blocks[1]
    block.forward = types.MethodType(forward, block)  # type: ignore[method-assign]


def _sharper_gate(run: Run) -> None:
    mixture = run.net.mixture
    mixture.weights = types.MethodType(lambda self, x: torch.softmax(self.gate(x) * 1.01, -1), mixture)  # type: ignore[method-assign]


def _smoothed(run: Run) -> None:
    run.loss = lambda a, b: F.cross_entropy(a, b, label_smoothing=0.05)


def _momentum(run: Run) -> None:
    run.optimizer.param_groups[0]["momentum"] = 0.8


def _clamped(run: Run) -> None:
    run.gradients = lambda _: run.net.head.weight.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr,assignment,return-value]


def _other_data(run: Run) -> None:
    run.data = lambda step, x, y: (x if step < 1 else x * 1.0001, y)


def _nan_gradient(run: Run) -> None:
    def gradients(step: int) -> None:
        weight = run.net.gru.weight_ih_l0
        if step == 1:
            weight.grad = weight.grad * float("nan")  # type: ignore[operator]

    run.gradients = gradients


DEFECTS = (
    Defect("batch norm left in evaluation", lambda run: run.net.blocks[1].norm1.eval(), r"Functional\.batch_norm\.2\.forward"),
    Defect(
        "running statistics of another momentum",
        lambda run: setattr(run.net.blocks[0].norm2, "momentum", 0.5),
        r"Functional\.batch_norm\.1\.forward",
    ),
    Defect("residual of one block lost", _without_residual, r"Tensor\.__add__\.1\.forward|Functional\.relu\.4\.forward"),
    Defect("sharper gate", _sharper_gate, r"Tensor\.__mul__\.0\.forward|Torch\.softmax\.0\.forward"),
    Defect(
        "one expert's weight scaled by 1.001",
        lambda run: run.net.mixture.experts[2].down.weight.data.mul_(1.001),
        r"Functional\.linear\.\d+\.forward",
    ),
    Defect("recurrent weights negated", lambda run: run.net.gru.weight_hh_l0.data.neg_(), r"Torch\.gru\.0\.forward"),
    Defect("label smoothing", _smoothed, r"Functional\.cross_entropy\.0\.forward"),
    Defect("momentum of the optimizer", _momentum, r"Tensor\.mul_\.0\.forward", 1),
    Defect("one gradient clamped", _clamped, r"Tensor\.clamp_\.0\.forward"),
    Defect("data scaled by 1.0001 from the second step on", _other_data, r"Functional\.conv2d\.0\.forward|Tensor\.__mul__\.0\.forward", 1),
    Defect("one gradient becomes NaN", _nan_gradient, r"Tensor\.__mul__\.\d+\.forward", 1, "nonfinite"),
    Defect("eps of a norm", lambda run: setattr(run.net.norm, "eps", 0.1), r"Functional\.rms_norm\.0\.forward"),
)


def dump(path: Path, plant: Callable[[Run], Any], level: str = "mix", task: str = "statistics") -> None:
    """Train in a process of its own and leave the dump at `path`; an existing one is kept.

    Raises:
        RuntimeError: it failed.
    """
    if (path / "done").exists():
        return
    prepare()
    shutil.rmtree(path, ignore_errors=True)
    process = multiprocessing.get_context("fork").Process(target=_train, args=(path, plant, level, task))
    process.start()
    process.join(300)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"{path.name}: exit code {process.exitcode}")
    (path / "done").touch()


def _train(path: Path, plant: Callable[[Run], Any], level: str, task: str) -> None:
    torch.set_num_threads(1)
    run = Run()
    plant(run)
    debugger = debugger_of(path, level, task, STEPS)
    for step in range(STEPS):
        torch.manual_seed(50 + step)
        images, labels = run.data(step, torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,)))
        debugger.start(run.net)
        run.loss(run.net(images), labels).backward()
        run.gradients(step)
        run.optimizer.step()
        run.optimizer.zero_grad()
        debugger.stop()
        debugger.step()
    atexit._run_exitfuncs()  # a forked child ends without them, and they finish the files
