"""Cost of a dump next to the existing tool and next to no tool: step time, tensor files, checksums, file sizes, import time.

    python benchmarks/dump.py                                          # ours against no tool
    python benchmarks/dump.py --existing /path/to/venv/bin/python       # and the existing tool from its own environment
    python benchmarks/dump.py --parts statistics --workload host-bound --ranks 1 --modes statistics-L1-statistics

Every tool runs in processes of its own (one per rank); the tools take turns, a few steps each. A ratio is taken per round (median step
of the tool / median step of no tool in the same round); tables give the median over the rounds and the 10 % and 90 % quantiles.
``gain`` is the time the existing tool adds over the time ours adds. Tensor files: bytes of all files over the time from the first step
until the last byte was handed to the system, minus the training's own time, as a share of what ``dd`` reaches on the same disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "frameworks"))

from existing_environment import environment_of

HERE = Path(__file__).resolve().parent
STATISTICS = [f"statistics-{level}-{mode}" for mode in ("statistics", "md5", "digest") for level in ("L0", "L1", "mix")]
TENSORS = ["tensor-L0-files", "tensor-L0-packed", "tensor-mix-files", "tensor-mix-packed"]
PARTS = ["statistics", "tensors", "sizes", "import"]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Worker:
    """All ranks of one tool in one mode, stopped until asked to run."""

    def __init__(self, python: str, tool: str, mode: str, workload: str, ranks: int, out: Path, risk_level: str) -> None:
        out.mkdir(parents=True)
        self.out = out
        self.log = open(f"{out}.log", "w")  # noqa: SIM115 - lives as long as the processes
        command = [python, str(HERE / "dump_worker.py"), "--tool", tool, "--mode", mode, "--workload", workload, "--out", str(out)]
        environment = environment_of(python) | {"MSPROBE_LOG_LEVEL": "3"}
        if ranks > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        self.processes = [
            subprocess.Popen(
                [*command, "--risk-level", risk_level],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                env={**environment, "RANK": str(r), "LOCAL_RANK": str(r)} if ranks > 1 else environment,
                cwd=out.parent,
            )
            for r in range(ranks)
        ]

    def run(self, steps: int) -> dict[str, Any]:
        """What rank 0 measured in so many steps."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"run {steps}\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        if not all(lines):
            raise SystemExit(f"{self.processes[0].args} ended; its messages are in {self.log.name}")
        reply: dict[str, Any] = json.loads(lines[0])
        return reply

    def clean(self) -> None:
        """Remove what was dumped."""
        for child in self.out.glob("step*"):
            shutil.rmtree(child, ignore_errors=True)

    def quit(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("quit\n")
            process.stdin.close()
        for process in self.processes:
            process.wait(120)


def quantiles(values: list[float], form: str = ".3f") -> str:
    """Median and the 10 % and 90 % quantiles."""
    values = sorted(values)
    low, high = values[len(values) // 10], values[-1 - len(values) // 10]
    return f"{statistics.median(values):{form}} ({low:{form}} - {high:{form}})"


def workers_of(mode: str, workload: str, ranks: int, a: argparse.Namespace, root: Path) -> dict[str, Worker]:
    """No tool, ours and, where it has the mode, the existing tool."""
    made = {"none": Worker(sys.executable, "none", mode, workload, ranks, root / "none", a.risk_level)}
    made["ours"] = Worker(sys.executable, "ours", mode, workload, ranks, root / "ours", a.risk_level)
    if a.existing and not mode.endswith(("digest", "packed")):
        made["existing"] = Worker(a.existing, "existing", mode, workload, ranks, root / "existing", a.risk_level)
    return made


def statistics_part(a: argparse.Namespace) -> None:
    """Step-time ratios of statistics and checksums."""
    for workload in a.workload:
        for ranks in a.ranks:
            print(f"\n{workload}, {ranks} rank(s), risk_level {a.risk_level} in both tools: step time over no tool\n")
            print("| mode | ours | existing tool | gain | step without a tool, ms |\n|---|---|---|---|---|", flush=True)
            for mode in a.modes or STATISTICS:
                with tempfile.TemporaryDirectory(dir=a.disk) as root:
                    print(statistics_row(mode, workload, ranks, a, Path(root)), flush=True)


def statistics_row(mode: str, workload: str, ranks: int, a: argparse.Namespace, root: Path) -> str:
    """One line of the table."""
    workers = workers_of(mode, workload, ranks, a, root)
    times: dict[str, list[float]] = {name: [] for name in workers}
    try:
        for worker in workers.values():
            worker.run(3)
            worker.clean()
        for _ in range(a.rounds):
            for name, worker in workers.items():
                times[name].append(statistics.median(worker.run(a.steps)["times"]))
                worker.clean()
    finally:
        for worker in workers.values():
            worker.quit()
    ratio = {n: [t / b for t, b in zip(times[n], times["none"])] for n in workers if n != "none"}
    gain = "-"
    if "existing" in ratio:
        gain = quantiles([(e - 1) / max(o - 1, 1e-3) for e, o in zip(ratio["existing"], ratio["ours"])], ".1f")
    shown = {n: quantiles(r) for n, r in ratio.items()}
    return f"| {mode} | {shown['ours']} | {shown.get('existing', '-')} | {gain} | {statistics.median(times['none']) * 1e3:.1f} |"


def disk_speed(directory: Path, size: int, sync: bool) -> float:
    """Bytes per second of dd writing `size` bytes of zeros."""
    target = directory / "dd.bin"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={max(1, size >> 20)}", *(["conv=fsync"] if sync else [])]
    begin = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - begin
    target.unlink()
    return (max(1, size >> 20) << 20) / seconds


def file_bytes(directory: Path) -> tuple[int, int, int]:
    """Bytes on disk (a linked file once), names, and bytes that the names stand for."""
    seen: dict[int, int] = {}
    names = named = 0
    for path in directory.rglob("*"):
        if path.is_file() and path.parent.name == "dump_tensor_data":
            status = path.stat()
            seen[status.st_ino] = status.st_size
            names += 1
            named += status.st_size
    return sum(seen.values()), names, named


def tensors_part(a: argparse.Namespace) -> None:
    """Bytes per second of tensor files."""
    for workload in a.workload:
        for ranks in a.ranks:
            print(f"\n{workload}, {ranks} rank(s): tensor files, {a.tensor_steps} steps a round\n")
            print("| mode | tool | bytes a step, MB | files a step | step time ratio | MB/s | share of dd | share of dd with fsync |")
            print("|---|---|---|---|---|---|---|---|", flush=True)
            for mode in a.modes or TENSORS:
                with tempfile.TemporaryDirectory(dir=a.disk) as root:
                    for line in tensor_rows(mode, workload, ranks, a, Path(root)):
                        print(line, flush=True)


def tensor_rows(mode: str, workload: str, ranks: int, a: argparse.Namespace, root: Path) -> list[str]:
    """The lines of one mode, a tool each."""
    workers = workers_of(mode, workload, ranks, a, root)
    ratio: dict[str, list[float]] = {n: [] for n in workers}
    speed: dict[str, list[float]] = {n: [] for n in workers}
    plain: dict[str, list[float]] = {n: [] for n in workers}
    synced: dict[str, list[float]] = {n: [] for n in workers}
    sizes: dict[str, tuple[int, int]] = {}
    try:
        for worker in workers.values():
            worker.run(1)
            worker.clean()
        for _ in range(a.rounds):
            base = workers["none"].run(a.tensor_steps)
            for name, worker in workers.items():
                if name == "none":
                    continue
                reply = worker.run(a.tensor_steps)
                stored, names, _ = file_bytes(worker.out)
                sizes[name] = stored // a.tensor_steps, names // a.tensor_steps
                worker.clean()
                seconds = max(reply["total"] - base["total"], 1e-6)
                ratio[name].append(statistics.median(reply["times"]) / statistics.median(base["times"]))
                speed[name].append(stored / seconds)
                plain[name].append(stored / seconds / disk_speed(root, stored, False))
                synced[name].append(stored / seconds / disk_speed(root, stored, True))
    finally:
        for worker in workers.values():
            worker.quit()
    return [
        f"| {mode} | {name} | {sizes[name][0] / 1e6:.1f} | {sizes[name][1]} | {quantiles(ratio[name], '.2f')} | "
        f"{quantiles([v / 1e6 for v in speed[name]], '.0f')} | {quantiles(plain[name], '.2f')} | {quantiles(synced[name], '.2f')} |"
        for name in workers
        if name != "none"
    ]


def sizes_part(a: argparse.Namespace) -> None:
    """Bytes of the files of one step."""
    print("\n| workload | mode | tool | dump.json, KB | stack.json, KB | construct.json, KB | tensor files, MB |")
    print("|---|---|---|---|---|---|---|")
    for workload in a.workload:
        for mode in a.modes or [*STATISTICS[:3], "tensor-mix-files"]:
            with tempfile.TemporaryDirectory(dir=a.disk) as root:
                workers = workers_of(mode, workload, 1, a, Path(root))
                for name, worker in workers.items():
                    worker.run(2)
                    worker.quit()
                    if name == "none":
                        continue
                    step = worker.out / "step1"
                    kb = [sum(p.stat().st_size for p in step.rglob(f"{n}.json")) / 1e3 for n in ("dump", "stack", "construct")]
                    print(f"| {workload} | {mode} | {name} | {kb[0]:.0f} | {kb[1]:.0f} | {kb[2]:.0f} | {file_bytes(step)[0] / 1e6:.1f} |")


def import_part(a: argparse.Namespace) -> None:
    """Seconds that the import of the debugger takes beyond torch, both compiled to bytecode."""
    code = "import time, torch; t = time.perf_counter(); from msprobe.pytorch import PrecisionDebugger; print(time.perf_counter() - t)"
    print("\n| tool | import beyond torch, s |\n|---|---|")
    for name, python in (("ours", sys.executable), ("existing", a.existing)):
        if python:
            environment = environment_of(python)
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            runs = [
                subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
                for _ in range(a.rounds + 1)
            ]
            print(f"| {name} | {quantiles([float(r.split()[-1]) for r in runs[1:]])} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--existing", help="interpreter of an environment that holds the existing tool")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--workload", nargs="*", default=["host-bound", "compute-bound"])
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--modes", nargs="*", help="like statistics-L1-md5 or tensor-mix-packed; default: all of the part")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tensor-steps", type=int, default=3)
    parser.add_argument(
        "--risk-level", default="ALL", help="of both tools; the existing one hides casts and shape calls by default (FOCUS)"
    )
    parser.add_argument("--disk", type=Path, help="directory on the disk to write to; default: the system's temporary directory")
    a = parser.parse_args()
    parts = {"statistics": statistics_part, "tensors": tensors_part, "sizes": sizes_part, "import": import_part}
    for part in a.parts:
        parts[part](a)


if __name__ == "__main__":
    main()
