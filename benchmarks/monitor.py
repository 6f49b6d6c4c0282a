"""What the monitor costs: step-time ratios to no tool, ours and the existing tool in any number of versions, alternating in one run.

    python benchmarks/monitor.py --existing 8.1.1=<venv>/bin/python --existing 26.2.0=<venv>/bin/python
    python benchmarks/monitor.py --modes gradients everything --rounds 9

Every tool runs under `TrainerMon` with the same ``monitor_config.json`` in a process of its own; the processes take turns. A ratio is
taken per round (median step with the tool / median step without in that round); shown are the median and the 10 % and 90 % quantiles.
The goal is 1 + (1.5 memory passes over the bytes monitored + 10 us per tensor) / step, where a memory pass is one read of the bytes at
the speed of `torch.linalg.vector_norm` over the parameters, measured in the same run; nothing-due has 1.002.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpt
from overhead import Worker, alternate
from overhead_worker import MONITOR_MODES


def seen(workload: gpt.Workload) -> tuple[dict[str, tuple[int, int]], float]:
    """Tensors and bytes that one step shows per mode, counted on the job itself, and the bytes per second of a memory pass."""
    job = gpt.Job(workload)
    tensors: dict[int, int] = {}
    calls = []

    def hook(_module: torch.nn.Module, args: tuple[object, ...], output: object) -> None:
        for tensor in (*args, output):
            if isinstance(tensor, torch.Tensor):
                tensors[id(tensor)] = tensor.numel() * tensor.element_size()
                calls.append(tensor)  # kept, so that no id is given twice

    handles = [m.register_forward_hook(hook) for m in job.model.modules()]
    job.forward().backward()
    for handle in handles:
        handle.remove()
    parameters = [p for p in job.model.parameters() if p.grad is not None]
    size = sum(p.numel() * p.element_size() for p in parameters)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for p in parameters:
            torch.linalg.vector_norm(p)
        times.append(time.perf_counter() - begin)
    one = len(parameters), size
    floating = {id(t) for t in calls if t.dtype.is_floating_point}
    activations = 2 * len(calls), sum(tensors.values()) + sum(n for i, n in tensors.items() if i in floating)
    # unreduced and reduced gradients; parameters before and after; two moments; agreement reads a gradient and a moment
    parts = {"gradients": 2, "parameter-side": 6, "everything": 8}
    found = {mode: (k * one[0], k * one[1]) for mode, k in parts.items()}
    found["activations"] = activations
    found["everything"] = (found["everything"][0] + activations[0], found["everything"][1] + activations[1])
    found["nothing-due"] = (0, 0)
    return found, size / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--existing", action="append", default=[], metavar="NAME=PYTHON", help="an environment of the existing tool")
    parser.add_argument("--workload", choices=list(gpt.WORKLOADS), default="monitored")
    parser.add_argument("--modes", nargs="*", default=list(MONITOR_MODES), choices=list(MONITOR_MODES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()
    a.one_workload = a.workload
    torch.set_num_threads(a.threads)
    existing = dict(item.split("=", 1) for item in a.existing)
    amounts, speed = seen(gpt.WORKLOADS[a.workload])
    print(f"{a.workload}, {a.threads} thread(s), {a.device}, {a.rounds} rounds of {a.steps} steps; memory pass {speed / 1e9:.1f} GB/s\n")
    theirs = "".join(f"{name} | CPU time | " for name in existing)
    print(f"| mode | ours | CPU time | {theirs}goal | tensors | MB | step without a tool, ms |")
    print("|---|---|" + "---|" * (2 * len(existing) + 5), flush=True)
    for mode in a.modes:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            workers = {"none": Worker(sys.executable, "none", mode, a, root / "none")}
            workers["ours"] = Worker(sys.executable, "ours", mode, a, root / "ours")
            for name, python in existing.items():
                workers[name] = Worker(python, "existing", mode, a, root / name)
            ratio, base = alternate(workers, a.rounds, a.steps)
        tensors, size = amounts[mode]
        goal = 1 + (1.5 * size / speed + 10e-6 * tensors) / base if tensors else 1.002
        shown = " | ".join(each for both in ratio.values() for each in both)
        print(f"| {mode} | {shown} | {goal:.3f} | {tensors} | {size / 1e6:.0f} | {base * 1e3:.0f} |", flush=True)


if __name__ == "__main__":
    main()
