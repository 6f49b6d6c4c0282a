"""One side of the overhead benchmark: trains a workload with one tool in one mode and reports step times on request.

Speaks lines: reads ``run N``, answers with a JSON list of N pairs in seconds, the time of a step and the CPU time of its thread; ends on
``quit``. Started by overhead.py, possibly
with another interpreter (the existing tool lives in an environment of its own), so it imports nothing of ours unless asked to.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gpt


def dump_config(mode: str, out: Path) -> Path:
    """config.json of a dump mode: idle, L0, L1, mix, or a checksum mode such as md5-L0, digest-L1."""
    summary, _, level = mode.rpartition("-")
    if mode == "idle":
        config: dict[str, Any] = {"level": "mix", "step": [999_999]}
    else:
        config = {"level": level, "step": []}
    config |= {"task": "statistics", "dump_path": str(out), "rank": [], "statistics": {"summary_mode": summary or "statistics"}}
    path = out / "config.json"
    path.write_text(json.dumps(config))
    return path


def dump_step(job: gpt.Job, config: Path) -> Callable[[], None]:
    """A training step inside start / stop / step, as users write it. Same names in both tools."""
    from msprobe.pytorch import PrecisionDebugger

    PrecisionDebugger(config_path=str(config))

    def step() -> None:
        PrecisionDebugger.start(model=job.model)
        loss = job.forward()
        loss.backward()
        PrecisionDebugger.stop()
        job.update()
        PrecisionDebugger.step()

    return step


FOUR, SIX = ["norm", "min", "max", "mean"], ["norm", "min", "max", "mean", "nans", "zeros"]
MONITOR_MODES: dict[str, dict[str, Any]] = {
    "gradients": {"wg_distribution": True, "ops": FOUR},
    "parameter-side": {"wg_distribution": True, "param_distribution": True, "mv_distribution": True, "ops": FOUR},
    "activations": {"xy_distribution": True, "all_xy": True, "ops": FOUR},
    "everything": {
        "wg_distribution": True, "param_distribution": True, "mv_distribution": True, "mg_direction": True,
        "xy_distribution": True, "all_xy": True, "ops": SIX,
    },
}  # fmt: skip
MONITOR_MODES["nothing-due"] = {**MONITOR_MODES["everything"], "start_step": 1_000_000}
"""``monitor_config.json`` of the monitor modes; the families and statistics are those of one row of the table in
docs/evidence/benchmarks.md."""


def monitor_step(job: gpt.Job, mode: str, out: Path) -> Callable[[], Any]:
    """A training step under `TrainerMon`, which both tools have under this name."""
    os.environ["MONITOR_OUTPUT_DIR"] = str(out)
    path = out / "monitor_config.json"
    path.write_text(json.dumps({"targets": {}, "ndigits": 12, "step_count_per_record": 100, **MONITOR_MODES[mode]}))
    from msprobe.pytorch import TrainerMon

    monitor = TrainerMon(str(path), params_have_main_grad=False)
    monitor.set_monitor(model=job.model, optimizer=job.optimizer, grad_acc_steps=1)
    return job.step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=["none", "ours", "existing"], required=True)
    parser.add_argument("--mode", default="none")
    parser.add_argument("--workload", choices=list(gpt.WORKLOADS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    logging.disable(logging.WARNING)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a tool prints must not look like a reply
    job = gpt.Job(gpt.WORKLOADS[a.workload], a.device)
    a.out.mkdir(parents=True, exist_ok=True)
    if a.tool == "none":
        step: Callable[[], Any] = job.step
    elif a.mode in MONITOR_MODES:
        step = monitor_step(job, a.mode, a.out)
    else:
        step = dump_step(job, dump_config(a.mode, a.out))
    kind = torch.device(a.device).type
    wait = (lambda: None) if kind == "cpu" else getattr(torch, kind).synchronize
    for line in sys.stdin:
        if line.startswith("quit"):
            break
        times = []
        for _ in range(int(line.split()[1])):
            begin, used = time.perf_counter(), time.thread_time()
            step()
            wait()
            times.append((time.perf_counter() - begin, time.thread_time() - used))
        replies.write(json.dumps(times) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
