"""Cost of comparing saved tensors, next to the existing tool: one rank, many pairs of one million float32.

    python benchmarks/compare_tensor.py --existing /path/to/venv-of-26.2.0 [--tensors 300] [--rounds 3] [--directory DIR]

The two take turns on the same files. The first round is not counted: after it the files are in memory. CPU is of the process and its
children, memory the largest sum over the process tree, looked at every 20 ms. Both write a csv.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks"))

from existing_environment import environment_of

ELEMENTS = 1000


class Cost(NamedTuple):
    """Seconds and MiB of one run."""

    wall: float
    cpu: float
    memory: float


def make(root: Path, tensors: int) -> None:
    """Two dumps: the golden side, and one that is off by a thousandth everywhere."""
    torch.manual_seed(0)
    for side in ("target", "golden"):
        (root / side / "dump_tensor_data").mkdir(parents=True)
    data = {}
    for number in range(tensors):
        golden = torch.randn(ELEMENTS, ELEMENTS)
        name = f"Functional.linear.{number}.forward"
        file = f"{name}.output.0.pt"
        torch.save(golden, root / "golden" / "dump_tensor_data" / file)
        torch.save(golden * (1 + 1e-3 * torch.randn(ELEMENTS, ELEMENTS)), root / "target" / "dump_tensor_data" / file)
        entry = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [ELEMENTS, ELEMENTS], "Max": 4.5, "Min": -4.5, "Mean": 0.0}
        entry |= {"Norm": 1000.0, "requires_grad": False, "data_name": file}
        data[name] = {"input_args": [], "input_kwargs": {}, "output": [entry]}
    for side in ("target", "golden"):
        header = {"task": "tensor", "level": "L1", "framework": "pytorch", "dump_data_dir": str(root / side / "dump_tensor_data")}
        (root / side / "dump.json").write_text(json.dumps({**header, "data": data}))


def tree_memory(pid: int) -> float:
    """MiB of a process and all below it."""
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1])
            for task in os.listdir(f"/proc/{one}/task"):
                todo += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except (OSError, IndexError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(command: list[str]) -> Cost:
    """Run a command that begins with its interpreter, to the end. It finds differences (1), or what cannot be compared (3), or neither."""
    environment = environment_of(command[0])
    before = os.times()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    peak = [0.0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], tree_memory(process.pid))

    thread = threading.Thread(target=watch)
    thread.start()
    _, errors = process.communicate()
    over.set()
    thread.join()
    wall = time.perf_counter() - begin
    after = os.times()
    if process.returncode not in (0, 1, 3):
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()[-2000:]}")
    return Cost(wall, after.children_user + after.children_system - before.children_user - before.children_system, peak[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--existing", type=Path, required=True, help="virtual environment of mindstudio-probe 26.2.0")
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="where the dumps are made (8 MB per pair)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        root = Path(scratch)
        make(root, arguments.tensors)
        sides = ["compare", "-tp", str(root / "target" / "dump.json"), "-gp", str(root / "golden" / "dump.json"), "-o"]
        ours = [sys.executable, "-m", "msprobe_engine.cli", *sides, str(root / "ours")]
        programs = arguments.existing / "bin"
        commands = {
            "26.2.0": [str(programs / "python"), str(programs / "msprobe"), *sides, str(root / "theirs")],
            "this tool": ours,
            "this tool, --compat": [*ours, "--compat"],
        }
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        for number in range(arguments.rounds + 1):
            for name, command in commands.items():
                cost = run(command)
                if number:
                    costs[name].append(cost)
    print("| | wall s | CPU s | memory MiB | CPU of 26.2.0 over it |\n|---|---|---|---|---|")
    for name, found in costs.items():
        middle = [statistics.median(column) for column in zip(*found)]
        ratios = [theirs.cpu / ours.cpu for theirs, ours in zip(costs["26.2.0"], found)]
        spread = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        print(f"| {name} | {middle[0]:.1f} | {middle[1]:.1f} | {middle[2]:.0f} | {spread} |")


if __name__ == "__main__":
    main()
