"""What the probe is asked for in the checks that train: one table, and the training step under each of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.settings.load import load_settings
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.torch.dump_run import TorchDumpRun
from msprobe_integrations.torch.probe import TorchProbe

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
"""Everything that `probing` knows."""


@contextmanager
def probing(job: Job, mode: str, directory: Path, **monitor: Any) -> Iterator[Callable[[], torch.Tensor]]:
    """The training step of a job with the probe on it, as users write it; at the end everything is written and nothing is left on the
    model. ``off``: the step without the probe. `monitor`: further settings of a mode of the monitor."""
    if mode == "off":
        yield job.step
    elif mode in MONITOR:
        with _monitored(job, {**_common(directory), "monitor": {**MONITOR[mode], **monitor}}) as step:
            yield step
    else:
        quiet = {"log_level": "silent", "strict": False} if mode == "idle" else {}  # else it says that nothing was dumped
        with _dumped(job, {**_common(directory), **quiet, "dump": {**DUMP[mode], "dump_path": str(directory)}}) as step:
            yield step


def _common(directory: Path) -> dict[str, Any]:
    """A fault inside the probe is raised: the check ends with it."""
    return {"output_dir": str(directory), "log_level": "error", "strict": True}


@contextmanager
def _monitored(job: Job, settings: Mapping[str, Any]) -> Iterator[Callable[[], torch.Tensor]]:
    probe = TorchProbe(load_settings(settings))
    probe.attach(job.model, job.optimizer)
    number = 0

    def step() -> torch.Tensor:
        nonlocal number
        probe.begin_step(number)
        loss = job.forward()
        loss.backward()
        job.update()
        probe.end_step({"loss": loss})
        number += 1
        return loss.detach()

    try:
        yield step
    finally:
        probe.close()


@contextmanager
def _dumped(job: Job, settings: Mapping[str, Any]) -> Iterator[Callable[[], torch.Tensor]]:
    run = TorchDumpRun(load_settings(settings))

    def step() -> torch.Tensor:
        run.start(job.model, None, None, None)
        loss = job.forward()
        loss.backward()
        run.stop()
        job.update()
        run.step()
        return loss.detach()

    try:
        yield step
    finally:
        run.at_exit()
