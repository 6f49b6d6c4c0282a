"""What a pre-check costs next to the existing tool's, in one run: the same dump with tensors, 1,000 calls of APIs, two cores.

    python benchmarks/accuracy.py --calls 1000 --existing 8.1.1=VENV --existing 26.2.0=VENV

The dump is of a small transformer (`tests/fixtures/make_existing_precheck.py`), as many passes forward and backward as it takes; all of
its APIs are in the existing tool's list. That tool has no CPU mode: what it sends to ``cuda`` is moved to the CPU by a ``sitecustomize``,
as in that file. It runs as ``multi_run_ut -n 2`` (``multi_acc_check``), ours as ``acc_check -n 2``. The load of the machine before each
run is printed; times with others on the machine are upper bounds for all.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "fixtures"))

from make_existing_precheck import ON_CPU, transformer

COMMANDS = {"8.1.1": ("-f", "pytorch", "multi_run_ut"), "26.2.0": ("multi_acc_check",)}


def make(directory: Path, calls: int) -> Path:
    """The dump; its dump.json with exactly so many forward records."""
    import torch

    from msprobe.pytorch import PrecisionDebugger

    torch.manual_seed(0)
    debugger = PrecisionDebugger(dump_path=str(directory), task="tensor", level="L1", step=[0])
    transformer(debugger, torch.float32, passes=calls // 50 + 1)
    debugger.stop()
    debugger.step()
    (file,) = directory.glob("step0/*/dump.json")
    document = json.loads(file.read_text())
    forward = [name for name in document["data"] if name.endswith(".forward")][:calls]
    kept = {name.rpartition(".")[0] for name in forward}
    document["data"] = {name: record for name, record in document["data"].items() if name.rpartition(".")[0] in kept}
    file.write_text(json.dumps(document))
    return file


def measure(command: list[str], out: Path, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command; wall and CPU seconds, load before it, and statuses of its result file."""
    load = round(os.getloadavg()[0], 2)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})})
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    (file,) = out.glob("accuracy_checking_result_*.csv")
    with open(file, encoding="utf-8-sig", newline="") as text:
        rows = [row[1:3] for row in csv.reader(text)][1:]
    statuses = {" ".join(pair): rows.count(pair) for pair in sorted(rows)} if rows else {}
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "rows": len(rows), "load_before": load, "statuses": statuses}


def main() -> None:
    """Print the figures as json, one run after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--existing", action="append", default=[], metavar="VERSION=VENV", help="environment of that version and torch")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "on_cpu").mkdir()
        (root / "on_cpu" / "sitecustomize.py").write_text(ON_CPU)
        file = make(root / "dump", args.calls)
        common = ["-api_info", str(file), "-n", str(args.processes)]
        runs: list[tuple[str, list[str], dict[str, str]]] = [
            ("ours", [sys.executable, "-m", "msprobe", "acc_check", *common, "-d", "cpu"], {}),
            ("ours, --compat", [sys.executable, "-m", "msprobe", "acc_check", *common, "-d", "cpu", "--compat"], {}),
        ]
        for given in args.existing:
            version, _, venv = given.partition("=")
            environment = {"PYTHONPATH": str(root / "on_cpu")}
            runs.append((f"existing {version}", [f"{venv}/bin/msprobe", *COMMANDS[version], *common], environment))
        for number, (name, command, environment) in enumerate(runs):
            out = root / str(number)
            print(json.dumps({name: measure([*command, "-o", str(out)], out, environment)}), flush=True)


if __name__ == "__main__":
    main()
