"""One process of the dump benchmark: trains a workload with one tool, alone or as a rank of a gloo job.

Speaks lines: ``run N`` is answered with a JSON object {"times": N step times in seconds, "total": seconds until everything was written};
``quit`` ends it. Started by dump.py, possibly with another interpreter, so it imports nothing of ours unless asked to.
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


def write_config(a: argparse.Namespace) -> Path:
    """config.json of a mode ``{task}-{level}-{summary mode or file format}``; both tools look at the same calls."""
    task, level, detail = a.mode.split("-")
    section: dict[str, Any] = {}
    if task == "tensor" and detail == "packed":
        section["tensor_format"] = detail
    elif task == "statistics":
        section["summary_mode"] = detail
    config = {"task": task, "dump_path": str(a.out), "rank": [], "step": [], "level": level, "risk_level": a.risk_level, task: section}
    path = Path(f"{a.out}.{os.environ.get('RANK', 0)}.json")
    path.write_text(json.dumps(config))
    return path


def written() -> None:
    """Wait until our writer has handed everything to the system; the existing tool writes in the training thread."""
    from msprobe.pytorch import PrecisionDebugger

    debugger = PrecisionDebugger._instance
    assert debugger is not None
    debugger.pipeline.advance(wait=True)
    debugger.writer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", choices=["none", "ours", "existing"], required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--workload", choices=list(gpt.WORKLOADS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--risk-level", default="ALL")
    a = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a tool prints must not look like a reply
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    job = gpt.Job(gpt.WORKLOADS[a.workload])
    model = job.model
    if ranks > 1:
        job.model = torch.nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    step: Callable[[], Any] = job.step
    if a.tool != "none":
        from msprobe.pytorch import PrecisionDebugger

        PrecisionDebugger(config_path=str(write_config(a)))

        def step() -> None:
            PrecisionDebugger.start(model=model)
            loss = job.forward()
            loss.backward()
            PrecisionDebugger.stop()
            job.update()
            PrecisionDebugger.step()

    for line in sys.stdin:
        if line.startswith("quit"):
            break
        times = []
        first = time.perf_counter()
        for _ in range(int(line.split()[1])):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        if a.tool == "ours":
            written()
        replies.write(json.dumps({"times": times, "total": time.perf_counter() - first}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
