"""CPU seconds, memory and size of the files of graphs for TensorBoard, beside those of the existing tool, of the same dumps.

Makes dumps of statistics of a made-up transformer, level mix with call stacks, one rank and step, and draws one and two of them in
processes of their own.

    python benchmarks/graph_files.py --calls 20000 200000
    python benchmarks/graph_files.py --calls 20000 --existing VENV     # of version 26.2.0, also
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks"))

from existing_environment import environment_of

OURS = "import sys; from msprobe_engine.cli.main import main; sys.exit(main(sys.argv[1:]))"
THEIRS = "import sys; from msprobe.msprobe import main; main()"
MODULES = (
    ("ln_1.LayerNorm", ("Functional.layer_norm",)),
    ("attn.qkv.Linear", ("Functional.linear",)),
    ("attn.core.Attention", ("Tensor.view", "Torch.matmul", "Tensor.__mul__", "Functional.softmax", "Functional.dropout", "Torch.matmul")),
    ("attn.proj.Linear", ("Functional.linear",)),
    ("ln_2.LayerNorm", ("Functional.layer_norm",)),
    ("mlp.fc.Linear", ("Functional.linear",)),
    ("mlp.act.GELU", ("Functional.gelu",)),
    ("mlp.proj.Linear", ("Functional.linear", "Tensor.__add__")),
)
"""Modules of a layer, and the calls inside of each."""
CALLS_OF_LAYER = 2 * (2 + sum(1 + len(calls) for _, calls in MODULES))
"""Records of a layer, forward and backward, with its modules."""


class Dump:
    """Records of one run; `noise` is the relative difference of its numbers from those of noise 0."""

    def __init__(self, calls: int, noise: float) -> None:
        self.truth, self.noise, self.size = random.Random(7), random.Random(11), noise
        self.data: dict[str, Any] = {}
        self.construct: dict[str, str | None] = {}
        self.stacks: dict[str, list[str]] = {}
        self.numbers: dict[str, int] = {}
        for layer in range(max(calls // CALLS_OF_LAYER, 1)):
            self.layer(layer)

    def layer(self, layer: int) -> None:
        """Forward and backward records of one block, the innermost first, as hooks write them."""
        for phase in ("forward", "backward"):
            path = f"Module.module.model.layers.{layer}"
            block, attention = f"{path}.Block.{phase}.0", f"{path}.attn.SelfAttention.{phase}.0"
            for module, calls in MODULES:
                inner = f"{path}.{module}.{phase}.0"
                for call in calls:
                    number = self.numbers[call + phase] = self.numbers.get(call + phase, -1) + 1
                    self.record(f"{call}.{number}.{phase}", phase, inner, 2 if "Linear" in module else 1, module)
                self.record(inner, phase, attention if module.startswith("attn.") else block, 0, module)
            self.record(attention, phase, block, 0, "attn")
            self.record(block, phase, None, 0, "block")

    def tensor(self) -> dict[str, Any]:
        """The same numbers in every run but for the noise."""
        high, low, mean = self.truth.uniform(1, 5), -self.truth.uniform(1, 5), self.truth.gauss(0, 0.01)
        four = [value * (1 + self.size * self.noise.gauss(0, 1)) for value in (high, low, mean, high * 4096**0.5)]
        statistics = dict(zip(("Max", "Min", "Mean", "Norm"), four))
        return {"type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": [4, 1024, 4096], **statistics, "requires_grad": True}

    def record(self, name: str, phase: str, parent: str | None, weights: int, place: str) -> None:
        """One call or module, with its place in the hierarchy and its stack."""
        if phase == "forward":
            arguments = [self.tensor() for _ in range(1 + weights)]
            self.data[name] = {"input_args": arguments, "input_kwargs": {"inplace": {"type": "bool", "value": False}}}
            self.data[name]["output"] = [self.tensor()]
        else:
            self.data[name] = {"input": [self.tensor()], "output": [self.tensor() for _ in range(1 + weights)]}
        self.construct[name] = parent
        line = f"File /home/user/model/gpt.py, line {40 + len(place)}, in forward, \n x = self.{place}(x)"
        outer = [f"File /opt/torch/nn/modules/module.py, line {1700 + i}, in _call_impl, \n return forward(*args)" for i in range(9)]
        self.stacks[name] = ["File /opt/wrap.py, line 60, in __call__, \n out = f(*args)", line, *outer]

    def write(self, root: Path) -> None:
        """Lay the three files below ``root/step0/rank0``."""
        place = root / "step0" / "rank0"
        place.mkdir(parents=True)
        header = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
        grouped: dict[str, list[Any]] = {}  # the form of both tools: number -> [names, lines]
        for name, lines in self.stacks.items():
            grouped.setdefault("".join(lines), [[], lines])[0].append(name)
        numbered = {str(number): entry for number, entry in enumerate(grouped.values())}
        for name, content in (("dump", header | {"data": self.data}), ("construct", self.construct), ("stack", numbered)):
            path = place / f"{name}.json"
            path.write_text(json.dumps(content))
            path.chmod(0o640)
        for directory in (root, place.parent, place):
            directory.chmod(0o750)


def measured(command: list[str], out: Path) -> tuple[float, float, float]:
    """Wall and CPU seconds and MiB of a process and those it starts."""
    environment = environment_of(command[0])
    begun = time.monotonic()
    with (out.parent / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=out.parent)
        _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)} ended with {process.returncode}: {(out.parent / f'{out.name}.log').read_text()[-2000:]}")
    return time.monotonic() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def rows(calls: int, work: Path, existing: str) -> Iterator[str]:
    """Lines of the table for one size."""
    for name, noise in (("target", 1e-3), ("golden", 0.0)):
        Dump(calls, noise).write(work / name)
    tools = [("ours", [sys.executable, "-c", OURS, "graph_visualize"], ["--format", "db"])]
    if existing:
        tools.append(("26.2.0", [f"{existing}/bin/python", "-c", THEIRS, "graph_visualize"], []))
    for sides, given in (("one run", []), ("two runs", ["-gp", str(work / "golden/step0")])):
        for tool, command, more in tools:
            out = work / f"{tool}{len(given)}"
            wall, cpu, memory = measured([*command, "-tp", str(work / "target/step0"), *given, "-o", str(out), *more], out)
            size = sum(path.stat().st_size for path in out.iterdir()) / 1e6
            yield f"| {calls:,} | {sides} | {tool} | {wall:.1f} s | {cpu:.1f} s | {memory:,.0f} MiB | {size:,.0f} MB |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, nargs="+", default=[20_000])
    parser.add_argument("--existing", default="", metavar="VENV", help="environment with 26.2.0")
    parser.add_argument("--keep", type=Path, help="directory for dumps and files; else they go")
    arguments = parser.parse_args()
    print("| calls | | tool | time | CPU | memory | file |\n|---|---|---|---|---|---|---|")
    for calls in arguments.calls:
        work = Path(tempfile.mkdtemp(dir=arguments.keep, prefix=f"{calls}_"))
        work.chmod(0o750)
        try:
            for line in rows(calls, work, arguments.existing):
                print(line, flush=True)
        finally:
            if arguments.keep is None:
                shutil.rmtree(work)


if __name__ == "__main__":
    main()
