"""The existing tool in one mode, for the table of overheads. Run as a file, with a directory on PYTHONPATH into which that tool was
installed, because its package has the name of ours: nothing of ours is imported but the models, by the directory they lie in.

    python peer.py DEVICE SIZE DTYPE MODE DIRECTORY

Reads numbers of steps from its input and answers each with the seconds per step.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DUMPS = {"L0": ("L0", "statistics"), "mix": ("mix", "statistics"), "md5": ("mix", "md5")}
_FOUR = ["norm", "min", "max", "mean"]
MONITORS: dict[str, dict[str, Any]] = {
    "gradients": {"wg_distribution": True, "ops": _FOUR},
    "activations": {"xy_distribution": True, "all_xy": True, "ops": _FOUR},
}
MODES = (*DUMPS, *MONITORS)


def _dump(job: Any, mode: str, directory: Path) -> Callable[[], Any]:
    level, summary = DUMPS[mode]
    statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": summary}
    config = {"task": "statistics", "dump_path": str(directory), "rank": [], "step": [], "level": level, "statistics": statistics}
    (directory / "config.json").write_text(json.dumps(config))
    debugger = importlib.import_module("msprobe.pytorch").PrecisionDebugger(config_path=str(directory / "config.json"))

    def step() -> None:
        debugger.start(model=job.model)
        loss = job.forward()
        loss.backward()
        debugger.stop()
        job.update()
        debugger.step()

    return step


def _monitor(job: Any, mode: str, directory: Path) -> Callable[[], Any]:
    os.environ["MONITOR_OUTPUT_DIR"] = str(directory)
    path = directory / "monitor_config.json"
    path.write_text(json.dumps({"targets": {}, "ndigits": 12, "step_count_per_record": 100, **MONITORS[mode]}))
    monitor = importlib.import_module("msprobe.pytorch").TrainerMon(str(path), params_have_main_grad=False)
    monitor.set_monitor(model=job.model, optimizer=job.optimizer, grad_acc_steps=1)
    step: Callable[[], Any] = job.step
    return step


def main() -> None:
    """Train on request."""
    device, size, dtype, mode, folder = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the tool prints is no answer
    import torch

    sys.path.append(str(Path(__file__).parents[1]))

    directory = Path(folder)
    job = importlib.import_module("model").Job(size, device, getattr(torch, dtype))
    step = (_dump if mode in DUMPS else _monitor)(job, mode, directory)
    kind = torch.device(device).type
    wait = (lambda: None) if kind == "cpu" else getattr(torch, kind).synchronize
    for _ in range(2):
        step()
    for line in sys.stdin:
        wait()
        begin = time.perf_counter()
        for _ in range(int(line)):
            step()
        wait()
        answers.write(json.dumps((time.perf_counter() - begin) / int(line)) + "\n")
        answers.flush()
        for written in directory.glob("step*"):
            shutil.rmtree(written, ignore_errors=True)


if __name__ == "__main__":
    main()
