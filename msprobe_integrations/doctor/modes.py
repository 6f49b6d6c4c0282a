"""What the probe is asked for in the checks that train: one table, and the training step under each of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.core.records import Frame
from msprobe_engine.core.settings.load import load_settings
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.torch.dump.run import TorchDumpRun
from msprobe_integrations.torch.monitor.probe import TorchProbe

_ALL: dict[str, Any] = {
    "activations": True, "activation_gradients": True, "parameters": True, "optimizer_states": True, "updates": True,
    "momentum_agreement": True, "unreduced_gradients": True, "histograms": ["grad_reduced"],
}  # fmt: skip
MONITOR: dict[str, dict[str, Any]] = {
    "gradients": {},
    "parameters": {"parameters": True, "updates": True},
    "activations": {"gradients": False, "activations": True, "activation_gradients": True},
    "monitor": _ALL,
}
DUMP: dict[str, dict[str, Any]] = {
    "idle": {"level": "mix", "step": [999_999]},
    "L0": {"level": "L0"},
    "L1": {"level": "L1"},
    "mix": {"level": "mix"},
    "digest": {"level": "mix", "summary_mode": "digest"},
    "md5": {"level": "mix", "summary_mode": "md5"},
    "tensor": {"level": "mix", "task": "tensor"},
}
MODES = (*MONITOR, *DUMP)
"""Everything that `attach_probe` knows."""


class Step:
    """A training step; returns the loss.

    Attributes:
        frames: what the monitor has seen, one per finished step.
    """

    def __init__(self, step: Callable[[], torch.Tensor], frames: Callable[[], list[Frame]] = list) -> None:
        self._step, self._frames = step, frames

    def __call__(self) -> torch.Tensor:
        return self._step()

    @property
    def frames(self) -> list[Frame]:
        return self._frames()


@contextmanager
def attach_probe(job: Job, mode: str, directory: Path, **more: Any) -> Iterator[Step]:
    """The training step of a job with the probe on it, as users write it; at the end everything is written and nothing is left on the
    model. ``off``: the step without the probe. `more`: further settings of the monitor or of the dump."""
    # a fault inside the probe is raised: the check ends with it
    common: dict[str, Any] = {"output_dir": str(directory), "log_level": "error", "strict": True}
    if mode == "off":
        yield Step(job.step)
    elif mode in MONITOR:
        with _attach_monitor(job, {**common, "monitor": {**MONITOR[mode], **more}, "sinks": {"memory": True}}) as step:
            yield step
    else:
        quiet = {"log_level": "silent", "strict": False} if mode == "idle" else {}  # else it says that nothing was dumped
        with _attach_dump(job, {**common, **quiet, "dump": {**DUMP[mode], "dump_path": str(directory), **more}}) as step:
            yield step


@contextmanager
def _attach_monitor(job: Job, settings: Mapping[str, Any]) -> Iterator[Step]:
    probe = TorchProbe(load_settings(settings))
    probe.attach(job.model, job.optimizer)
    number = 0

    def step() -> torch.Tensor:
        nonlocal number
        probe.begin_step(number)
        loss = job.forward()
        job.backward(loss)
        job.update()
        probe.end_step({"loss": loss})
        number += 1
        return loss.detach()

    try:
        yield Step(step, lambda: probe.frames)
    finally:
        probe.close()


@contextmanager
def _attach_dump(job: Job, settings: Mapping[str, Any]) -> Iterator[Step]:
    run = TorchDumpRun(load_settings(settings))

    def step() -> torch.Tensor:
        run.start(job.model, None, None, None)
        loss = job.forward()
        job.backward(loss)
        run.stop()
        job.update()
        run.step()
        return loss.detach()

    try:
        yield Step(step)
    finally:
        run.at_exit()


def dump_files(directory: Path) -> dict[int, Path]:
    """The dump.json of each step of a dump of this process."""
    files = (file for name in ("rank", "rank0", f"proc{os.getpid()}") for file in directory.glob(f"step*/{name}/dump.json"))
    return dict(sorted((int(file.parent.parent.name.removeprefix("step")), file) for file in files))


def records(directory: Path) -> dict[int, dict[str, Any]]:
    """What a dump of this process has written: step to the records of its dump.json."""
    return {step: json.loads(file.read_text())["data"] for step, file in dump_files(directory).items()}
