"""What `msprobe compare` costs next to the existing tool 26.2.0, in one run: dumps of statistics with many records on several ranks.

    python benchmarks/compare_statistics.py --ranks 8 --records 20000 --existing VENV/bin/msprobe

Every record has an input, a weight or two and an output, with a noise of 1e-3 on one side, so every row differs: the slowest case, in
which the search for where the difference begins has the most to do; ``--equal`` makes both sides the same instead. CPU seconds count all
processes, memory is the largest sum of the resident sets of a process tree (sampled). ``--grow`` measures one rank with 1, 2, 4, ... times
the records instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks"))

from existing_environment import environment_of

_CALLS = (
    ("Functional.linear.{n}.forward", ([2, 8, 64], [64, 64], [64]), [2, 8, 64], ""),
    ("Torch.softmax.{n}.forward", ([2, 8, 8],), [2, 8, 8], '"dim": {"type": "int", "value": -1}'),
    ("Tensor.__add__.{n}.forward", ([2, 8, 64], [2, 8, 64]), [2, 8, 64], ""),
    ("Functional.linear.{n}.backward", ([2, 8, 64],), None, ""),
)


def make(directory: Path, seed: int, noise: bool, records: int) -> None:
    """One rank: linear, softmax, add and a backward call in turn. The text is what ``json.dump(indent=1)`` writes, but for the arguments
    that are no tensors; it is written as it is made, because a million records as objects would take gigabytes."""
    values, moved = random.Random(seed), random.Random(seed + 100)

    def tensor(shape: list[int]) -> str:
        a, b, c, d = (values.gauss(0, 1) * (1 + (1e-3 * moved.gauss(0, 1) if noise else 0)) for _ in range(4))
        sizes = ",".join(f"\n     {n}" for n in shape)
        return (
            f'\n    {{\n     "type": "torch.Tensor",\n     "dtype": "torch.float32",\n     "shape": [{sizes}\n     ],\n     "Max": {a!r},'
            f'\n     "Min": {b!r},\n     "Mean": {c!r},\n     "Norm": {abs(d)!r},\n     "requires_grad": true\n    }}'
        )

    directory.mkdir(parents=True)
    names = [_CALLS[i % 4][0].format(n=i // 4) for i in range(records)]
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    with open(directory / "dump.json", "w") as file:
        file.write(json.dumps(header, indent=1)[:-2] + ',\n "data": {')
        for i, name in enumerate(names):
            _, inputs, output, kwargs = _CALLS[i % 4]
            into = ",".join(map(tensor, inputs))
            out = "[]" if output is None else f"[{tensor(output)}\n   ]"
            words = ("input", "") if output is None else ("input_args", f'\n   "input_kwargs": {{{kwargs}}},')
            file.write(f'{"," if i else ""}\n  "{name}": {{\n   "{words[0]}": [{into}\n   ],{words[1]}\n   "output": {out}\n  }}')
        file.write("\n }\n}")
    (directory / "stack.json").write_text(json.dumps({"0": [names, ["File train.py, line 1, in f, \n x"]]}))
    (directory / "construct.json").write_text(json.dumps(dict.fromkeys(names)))


def tree_memory(pid: int) -> int:
    """Bytes of the resident sets of a process and all below it; pages they share count more than once."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * resource.getpagesize()
            for task in os.listdir(f"/proc/{one}/task"):
                waiting += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return total


def measure(command: list[str]) -> dict[str, float]:
    """Run a command that begins with its interpreter; wall and CPU seconds, MiB."""
    environment = environment_of(command[0])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], tree_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    error = process.communicate()[1]
    done.set()
    watcher.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{error[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(time.perf_counter() - began, 2), "cpu_s": round(cpu, 2), "peak_mib": peak[0] >> 20}


def main() -> None:
    """Print the figures as json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--existing", metavar="PATH", help="msprobe of version 26.2.0, in an environment of its own")
    parser.add_argument("--equal", action="store_true", help="both sides have the same numbers")
    parser.add_argument("--grow", type=int, default=0, metavar="N", help="one rank, N times twice as many records")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ours = [sys.executable, "-m", "msprobe", "compare"]
        sizes = [args.records << n for n in range(args.grow)] or [args.records]
        for records in sizes:
            for name, noise in (("target", not args.equal), ("golden", False)):
                for rank in range(1 if args.grow else args.ranks):
                    make(root / str(records) / name / "step0" / f"rank{rank}", rank, noise, records)
            paths = ["-tp", str(root / str(records) / "target/step0"), "-gp", str(root / str(records) / "golden/step0")]
            found: dict[str, Any] = {"records": records, "ranks": 1 if args.grow else args.ranks}
            found["tables and finding"] = measure([*ours, *paths, "-o", str(root / "ours")])
            found["tables only"] = measure([*ours, *paths, "-o", str(root / "tables"), "--no_diagnose"])
            found["as 26.2.0"] = measure([*ours, *paths, "-o", str(root / "compat"), "--no_diagnose", "--compat"])
            if args.existing:
                theirs = [str(Path(args.existing).with_name("python")), args.existing, "compare"]
                found["existing 26.2.0"] = measure([*theirs, *paths, "-o", str(root / "existing")])
            print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
