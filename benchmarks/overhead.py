"""Step-time ratio of the probe to no tool, side by side and alternating with the existing tool.

    python benchmarks/overhead.py                                     # ours against no tool
    python benchmarks/overhead.py --existing /path/to/venv/bin/python  # and the existing tool from its own environment
    python benchmarks/overhead.py --workload host-bound --modes L0 mix --rounds 15 --threads 1

Every tool runs in a process of its own; the processes take turns, a few steps each, and only one runs at a time. A ratio is taken per
round (median step of the tool / median step of no tool in the same round); the table gives the median of the rounds and the
10 % and 90 % quantiles, for the time of the step and for the CPU time of the training's thread.
"""

from __future__ import annotations

import argparse
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
MODES = ["idle", "L0", "L1", "mix", "digest-L0", "digest-L1", "md5-L0", "md5-L1", "gradients"]
ONLY_OURS = {"digest-L0", "digest-L1"}
ONLY_EXISTING = {"md5-L0", "md5-L1"}


class Worker:
    """One tool in one mode, stopped until asked to run."""

    def __init__(self, python: str, tool: str, mode: str, a: argparse.Namespace, out: Path) -> None:
        environment = environment_of(python) | {"OMP_NUM_THREADS": str(a.threads), "MSPROBE_LOG_LEVEL": "3"}
        command = [python, str(HERE / "overhead_worker.py"), "--tool", tool, "--mode", mode, "--workload", a.one_workload]
        command += ["--threads", str(a.threads), "--device", a.device, "--out", str(out)]
        self.out = out
        self.log = open(out.parent / f"{out.name}.log", "w")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment, cwd=out.parent
        )

    def run(self, steps: int) -> tuple[float, float]:
        """Medians of the time of a step and of the CPU time of its thread, in seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"run {steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} ended; its messages are in {self.log.name}")
        for child in self.out.glob("step*"):
            shutil.rmtree(child, ignore_errors=True)
        times, used = zip(*json.loads(line))
        return statistics.median(times), statistics.median(used)

    def quit(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait(60)


def quantiles(ratios: list[float]) -> str:
    """Median and the 10 % and 90 % quantiles."""
    ratios = sorted(ratios)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):.3f} ({low:.3f} - {high:.3f})"


def measure(mode: str, a: argparse.Namespace, root: Path) -> tuple[tuple[str, str], tuple[str, str], float]:
    """Ratios of ours and of the existing tool in one mode, and the step without a tool in milliseconds."""
    workers = {"none": Worker(sys.executable, "none", mode, a, root / "none")}
    if mode not in ONLY_EXISTING:
        workers["ours"] = Worker(sys.executable, "ours", mode, a, root / "ours")
    if a.existing and mode not in ONLY_OURS:
        workers["existing"] = Worker(a.existing, "existing", mode, a, root / "existing")
    ratios, base = alternate(workers, a.rounds, a.steps)
    return ratios.get("ours", ("-", "-")), ratios.get("existing", ("-", "-")), base * 1e3


def alternate(workers: dict[str, Worker], rounds: int, steps: int) -> tuple[dict[str, tuple[str, str]], float]:
    """Let the workers take turns and end.

    Returns:
        Ratios to the worker ``none`` with their quantiles, of the time of a step and of the CPU time of its thread; and the median step of
        that worker in seconds.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
    try:
        for worker in workers.values():
            worker.run(3)
        for _ in range(rounds):
            for name, worker in workers.items():
                times[name].append(worker.run(steps))
    finally:
        for worker in workers.values():
            worker.quit()
    ratios: dict[str, tuple[str, str]] = {}
    for name in [each for each in workers if each != "none"]:
        of_time, of_cpu = ([a[i] / b[i] for a, b in zip(times[name], times["none"])] for i in (0, 1))
        ratios[name] = quantiles(of_time), quantiles(of_cpu)
    return ratios, statistics.median(time for time, _ in times["none"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--existing", help="interpreter of an environment that holds the existing tool")
    parser.add_argument("--workload", nargs="*", default=["host-bound", "compute-bound"])
    parser.add_argument("--modes", nargs="*", default=MODES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()
    for workload in a.workload:
        a.one_workload = workload
        print(f"\n{a.one_workload}, {a.threads} thread(s), {a.device}; step time over no tool, median (10 % - 90 %), {a.rounds} rounds\n")
        print("| mode | ours | CPU time | existing tool | CPU time | step without a tool, ms |\n|---|---|---|---|---|---|", flush=True)
        for mode in a.modes:
            if mode in ONLY_EXISTING and not a.existing:
                continue
            with tempfile.TemporaryDirectory() as root:
                ours, existing, base = measure(mode, a, Path(root))
            print(f"| {mode} | {' | '.join((*ours, *existing))} | {base:.1f} |", flush=True)


if __name__ == "__main__":
    main()
