"""Dumps of small imagined trainings for tests of the graph page: files of the existing format, written without any framework."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msprobe_engine.report.graph.options import GraphOptions
from msprobe_engine.report.graph.run import run

FILE = "/job/model/attention.py"
HOSTILE = (
    "Module.<img src=x onerror=document.title='run'>.A.forward.0",
    "Module.</script><script>document.title='run'</script>.B.forward.0",
    "Module.\u202egnp.exe\u202c.C.forward.0",
    "Module.a\u0000b\u0007c\u001b[31m.D.forward.0",
    'Module.=HYPERLINK("http://x").E.forward.0',
    "Module." + "x" * 100_000 + ".F.forward.0",
    "Module.constructor.__proto__.forward.0",
    "Module.模型.中文.forward.0",
)
"""Names that are text and nothing else."""

Tensor = dict[str, Any]


@dataclass
class Sample:
    """One rank of one step.

    Attributes:
        seed: equal seeds make equal numbers.
        fault: module whose output is a hundredth too large, and all after it; "" none.
        nan: module whose output has NaN, and all after it; "" none.
        extra: a module that others have not; it gives out what it takes in.
        missing: the second attention leaves out a multiplication.
        names: further modules at the end.
    """

    seed: int = 0
    layers: int = 3
    fault: str = ""
    nan: str = ""
    extra: bool = False
    missing: bool = False
    names: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    construct: dict[str, str | None] = field(default_factory=dict)
    stacks: dict[str, list[Any]] = field(default_factory=dict)
    wrong: float = 1.0
    bad: bool = False

    def tensor(self, key: str) -> Tensor:
        """A tensor with numbers that follow from its key."""
        draw = random.Random(f"{self.seed} {key}").uniform
        size, low = draw(1, 3), draw(-3, -1)
        four = [value * self.wrong for value in (size, low, (size + low) / 9, math.hypot(size, low) * 4)]
        found = dict(zip(("Max", "Min", "Mean", "Norm"), [math.nan] * 4 if self.bad else four))
        return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 8], **found, "requires_grad": True}

    def module(self, path: str, kind: str, x: Tensor, calls: tuple[str, ...], parent: str | None, line: int) -> Tensor:
        """A call of a module with calls of functions inside; returns its output."""
        name = f"Module.{path}.{kind}.forward.0"
        inner = x
        left_out = self.missing and path == "layers.1.attn"
        calls = tuple(call for call in calls if not (left_out and call == "mul"))
        for i, call in enumerate(calls):
            number = sum(one.startswith(f"Functional.{call}.") for one in self.data)
            api = f"Functional.{call}.{number}.forward"
            if i == len(calls) - 1:
                self.wrong = 1.01 if path == self.fault else 1.5 if left_out else self.wrong
                self.bad = self.bad or path == self.nan
            y = inner if path.endswith("adapter") else self.tensor(f"{path} {call} {calls[:i].count(call)}")
            weight = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [8, 8], "Max": 0.5, "Min": -0.5, "Mean": 0.0, "Norm": 2.0}
            self.record(
                api, {"input_args": [inner, weight], "input_kwargs": {"eps": {"type": "float", "value": 1e-5}}, "output": [y]}, name, line
            )
            inner = y
        self.record(name, {"input_args": [x], "input_kwargs": {}, "output": [inner]}, parent, line)
        return inner

    def record(self, name: str, record: dict[str, Any], parent: str | None, line: int) -> None:
        self.data[name] = record
        self.construct[name] = parent
        lines = [
            f"File {FILE}, line {line}, in forward, \n x = self.linear(x)",
            "File /job/train.py, line 7, in <module>, \n loss = model(batch)",
        ]
        self.stacks[str(len(self.stacks))] = [[name], lines]

    def write(self, directory: Path) -> None:
        """The files of the rank."""
        x = self.tensor("start")
        first = x
        for i in range(self.layers):
            layer = f"Module.layers.{i}.Layer.forward.0"
            start = x
            x = self.module(f"layers.{i}.attn", "Attention", x, ("linear", "mul", "softmax"), layer, 10 + i)
            if self.extra and i == 1:
                x = self.module(f"layers.{i}.adapter", "Adapter", x, ("linear",), layer, 50)
            x = self.module(f"layers.{i}.mlp", "MLP", x, ("linear", "gelu", "linear"), layer, 20 + i)
            self.record(layer, {"input_args": [start], "input_kwargs": {}, "output": [x]}, None, 30)
        group = {"type": "torch.ProcessGroup", "group_ranks": [0, 1], "group_id": "g"}
        reduced = self.tensor("reduced")
        self.record(
            "Distributed.all_reduce.0.forward", {"input_args": [x], "input_kwargs": {"group": group}, "output": [reduced]}, None, 40
        )
        for i in reversed(range(self.layers)):
            name = f"Module.layers.{i}.Layer.backward.0"
            self.record(name, {"input": [self.tensor(f"{name} in")], "output": [self.tensor(f"{name} out")]}, None, 30)
        for name in self.names:
            self.record(name, {"input_args": [first], "input_kwargs": {}, "output": [self.tensor(name)]}, None, 60)
        directory.mkdir(parents=True)
        header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
        for file, content in (("dump", header | {"data": self.data}), ("construct", self.construct), ("stack", self.stacks)):
            (directory / f"{file}.json").write_text(json.dumps(content), encoding="utf-8")


def ranks(root: Path, *samples: Sample, steps: int = 1) -> Path:
    """A dump with a rank for each sample; its root."""
    for step in range(steps):
        for rank, sample in enumerate(samples):
            fresh = Sample(sample.seed + 100 * step, sample.layers, sample.fault, sample.nan, sample.extra, sample.missing, sample.names)
            fresh.write(root / f"step{step}" / f"rank{rank}")
    return root


def page_of(output: Path, target: Path, golden: Path | None = None) -> Path:
    """The page of a dump, or of two."""
    run(target, golden, output, GraphOptions(formats=("html",)))
    (page,) = output.glob("*.html")
    return page
