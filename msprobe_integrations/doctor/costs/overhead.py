"""D2: what the probe costs a training: step times with it over those without, taken in turns in one run, beside the existing tool."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.costs import peer
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import attach_probe

BOUND_BY_DEVICE = {
    "idle": 1.002, "gradients": 1.01, "parameters": 1.02, "activations": 1.05, "L0": 1.1, "mix": 1.5, "digest": 1.8, "md5": 0.0,
}  # fmt: skip
BOUND_BY_HOST = {
    "idle": 1.01, "gradients": 1.1, "parameters": 1.2, "activations": 1.5, "L0": 2.0, "mix": 4.0, "digest": 4.8, "md5": 0.0,
}  # fmt: skip
TINY = dict.fromkeys(("idle", "gradients", "L0", "mix"), 0.0)
"""Goals of the ratio; 0: none, the figure is for information."""
ROUNDS = 9
"""At most; at least three."""


def run(device: Device) -> Iterator[Line]:
    """One line per model and mode."""
    if device.full:
        few = {mode: BOUND_BY_HOST[mode] for mode in ("idle", "gradients", "parameters")}
        yield from measure(device, "large", torch.bfloat16, BOUND_BY_DEVICE, 2, 6.0)
        yield from measure(device, "small", torch.bfloat16, BOUND_BY_HOST, 5, 3.0)
        yield from measure(device, "many", torch.bfloat16, few, 5, 3.0)
        yield from measure(device, "small", torch.bfloat16, {"tensor": 0.0}, 1, 3.0)  # a gigabyte per step
    else:
        yield from measure(device, "tiny", torch.float32, TINY, 3, 0.5)
        yield from measure(device, "tiny-many", torch.float32, {mode: TINY[mode] for mode in ("idle", "gradients")}, 3, 0.5)


def measure(device: Device, size: str, dtype: torch.dtype, goals: dict[str, float], steps: int, seconds: float) -> Iterator[Line]:
    job = Job(size, str(device.device), dtype)
    for _ in range(3):
        job.step()
    for mode, goal in goals.items():
        other = Peer(device, size, dtype, mode) if device.peer and mode in peer.MODES else None
        ratios: dict[str, list[float]] = {"ours": [], "other": []}
        plain: list[float] = []
        until = time.perf_counter() + seconds
        while len(plain) < 3 or (len(plain) < ROUNDS and time.perf_counter() < until):
            plain.append(seconds_of(device, job.step, steps))
            with tempfile.TemporaryDirectory() as directory, attach_probe(job, mode, Path(directory)) as step:
                step()
                ratios["ours"].append(seconds_of(device, step, steps) / plain[-1])
            if other is not None and not other.failed:
                ratios["other"].append(other.run(steps) / plain[-1])
        text = [f"{_quantiles(ratios['ours'])} of {statistics.median(plain) * 1e3:.2f} ms"]
        if other is not None:
            text.append(f"mindstudio-probe {other.failed or _quantiles(ratios['other'])}")
            other.stop()
        good = not goal or statistics.median(ratios["ours"]) <= goal
        yield Line(f"step time, {size}, {mode}", "ok" if good else "slow", "; ".join(text), f"{goal:g}" if goal else "")


def seconds_of(device: Device, step: Callable[[], object], steps: int) -> float:
    """Seconds per step; the device has done its work at the end."""
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    device.synchronize()
    return (time.perf_counter() - begin) / steps


def _quantiles(ratios: list[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


class Peer:
    """The existing tool in one mode: a process of its own, because its package has the same name. It waits until it is asked to run."""

    failed = ""

    def __init__(self, device: Device, size: str, dtype: torch.dtype, mode: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name) / "log"
        words = [str(device.device), size, str(dtype).removeprefix("torch."), mode, self._folder.name]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MSPROBE_")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(peer.__file__)), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, "PYTHONPATH": device.peer},
                cwd=self._folder.name,
            )

    def run(self, steps: int) -> float:
        """Seconds per step. When the process has ended, `failed` is the last line that it has said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()
            if line := self._process.stdout.readline():
                return float(json.loads(line))
        except OSError:  # its input is closed
            pass
        said = self._log.read_text(errors="replace").strip().splitlines()
        self.failed = f"failed: {said[-1][:200]}" if said else "failed"
        return float("nan")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
