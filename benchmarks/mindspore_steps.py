"""Cost on MindSpore (PyNative, CPU): step-time ratios to no tool, ours and the existing tool alternating in one run.

    python benchmarks/mindspore_steps.py                                        # ours against no tool, in an environment with mindspore
    python benchmarks/mindspore_steps.py --existing 26.2.0=<venv>/bin/python     # and the existing tool from its own environments
    python benchmarks/mindspore_steps.py --workload host-bound --modes idle L0 mix --rounds 9

Every tool runs in a process of its own; the processes take turns, a few steps each, and only one runs at a time. A ratio is taken per
round (median step of the tool / median step of no tool in the same round); shown are the median over the rounds and the 10 % and 90 %
quantiles, of the time on the clock and of the CPU time of the process. ``fails``: the tool ended the training; the last line that it
printed stands below the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks"))

from existing_environment import environment_of

HERE = Path(__file__).resolve().parent
MODES = ["idle", "L0", "L1", "mix", "tensor-L0", "tensor-mix", "gradients", "moments", "activations", "everything"]
Times = dict[str, list[float]]


class Worker:
    """One tool in one mode, stopped until asked to run; `failed` says with which words it ended before it was told to."""

    def __init__(self, python: str, tool: str, mode: str, workload: str, out: Path) -> None:
        environment = environment_of(python) | {"GLOG_v": "3", "MSPROBE_LOG_LEVEL": "3"}
        command = [python, str(HERE / "mindspore_worker.py"), "--tool", tool, "--mode", mode, "--workload", workload, "--out", str(out)]
        self.out = out
        self.failed = ""
        self.log = open(out.parent / f"{out.name}.log", "w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, cwd=out.parent
        )

    def run(self, steps: int) -> dict[str, float]:
        """Median step in seconds, by clock and by CPU; nothing when the process has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        if not self.failed:
            try:
                self.process.stdin.write(f"run {steps}\n")
                self.process.stdin.flush()
                line = self.process.stdout.readline()
            except BrokenPipeError:
                pass
            if not line:
                self.log.seek(0)
                said = [text.strip() for text in self.log if "Error" in text]
                self.failed = said[-1] if said else f"ended with {self.process.wait(60)}"
        for child in self.out.glob("step*"):
            shutil.rmtree(child, ignore_errors=True)
        return {key: statistics.median(values) for key, values in json.loads(line).items()} if line else {}

    def quit(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write("quit\n")
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(60)


def quantiles(ratios: list[float]) -> str:
    """Median and the 10 % and 90 % quantiles."""
    ratios = sorted(ratios)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):.3f} ({low:.3f} - {high:.3f})"


def measure(workers: dict[str, Worker], rounds: int, steps: int) -> dict[str, dict[str, Times]]:
    """Clock and CPU times per round of every worker, letting them take turns."""
    times: dict[str, Times] = {name: {"wall": [], "cpu": []} for name in workers}
    try:
        for worker in workers.values():
            worker.run(2)
        for _ in range(rounds):
            for name, worker in workers.items():
                for key, value in worker.run(steps).items():
                    times[name][key].append(value)
    finally:
        for worker in workers.values():
            worker.quit()
    return times  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter with mindspore and this project")
    parser.add_argument("--existing", action="append", default=[], metavar="NAME=PYTHON", help="an environment of the existing tool")
    parser.add_argument("--workload", nargs="*", default=["host-bound", "compute-bound"])
    parser.add_argument("--modes", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    a = parser.parse_args()
    existing = dict(item.split("=", 1) for item in a.existing)
    for workload in a.workload:
        print(f"\n{workload}; step time over no tool, median (10 % - 90 %), {a.rounds} rounds of {a.steps} steps\n")
        names = ["ours", *existing]
        print("| mode | " + " | ".join(names) + " | " + " | ".join(f"{n}, CPU" for n in names) + " | step without a tool, ms |")
        print("|---|" + "---|" * (2 * len(names) + 1), flush=True)
        notes = []
        for mode in a.modes:
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                workers = {"none": Worker(a.python, "none", mode, workload, root / "none")}
                workers["ours"] = Worker(a.python, "ours", mode, workload, root / "ours")
                for name, python in existing.items():
                    workers[name] = Worker(python, "existing", mode, workload, root / name)
                times = measure(workers, a.rounds, a.steps)
            shown = []
            if workers["none"].failed:
                raise SystemExit(f"no tool: {workers['none'].failed}")
            for key in ("wall", "cpu"):
                base = times["none"][key]
                for name in names:
                    own = times[name][key]
                    shown.append("fails" if workers[name].failed else quantiles([t / b for t, b in zip(own, base)]))
            notes += [f"{mode}, {name}: {worker.failed}" for name, worker in workers.items() if worker.failed]
            print(f"| {mode} | {' | '.join(shown)} | {statistics.median(times['none']['wall']) * 1e3:.1f} |", flush=True)
        print("\n" + "\n".join(notes), flush=True)


if __name__ == "__main__":
    main()
