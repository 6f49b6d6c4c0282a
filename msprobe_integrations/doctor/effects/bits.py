"""B1: losses, weights and random states of a training have the same bits with the probe as without, in every mode."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from msprobe_engine.workflow.doctor import Line
from msprobe_integrations.doctor.device import Device
from msprobe_integrations.doctor.model import Job
from msprobe_integrations.doctor.modes import DUMP, MONITOR, attach_probe

_STEPS = 8
_DUMPED = [1, 2, 5]
"""Steps that are dumped: the first ones, and one after a pause."""


def run(device: Device) -> Iterator[Line]:
    """A line per kind of mode, with deterministic algorithms and without."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products; read when the library is loaded
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        how = "deterministic algorithms" if deterministic else "default algorithms"
        try:
            plain, again = _train(device, "off"), _train(device, "off")
            different = _difference(plain, again)
            if different:
                why = f"two runs without the probe differ in {different}: bits cannot be compared"
                yield Line(f"bits, {how}", "skipped", why=why)
                continue
            for kind, modes in (("monitor", MONITOR), ("dumps", DUMP)):
                yield _line(device, f"bits with {kind}, {how}", list(modes), plain)
        finally:
            torch.use_deterministic_algorithms(False)


def _line(device: Device, name: str, modes: list[str], plain: dict[str, torch.Tensor]) -> Line:
    wrong = []
    for mode in modes:
        try:
            different = _difference(plain, _train(device, mode))
        except Exception as error:
            different = f"nothing: it ended with {type(error).__name__}: {str(error)[:200]}"
        if different:
            wrong.append(f"{mode} differs in {different}")
    return Line(name, "WRONG" if wrong else "ok", f"{len(modes)} modes, {_STEPS} steps", "the same bits", "; ".join(wrong))


def _train(device: Device, mode: str) -> dict[str, torch.Tensor]:
    """What a training leaves: losses, weights, states of the optimizer and of random numbers."""
    job = Job("small", str(device.device), torch.bfloat16) if device.full else Job("tiny")
    more: dict[str, Any] = {"step": _DUMPED} if mode in DUMP and mode != "idle" else {}
    with tempfile.TemporaryDirectory() as directory:
        with attach_probe(job, mode, Path(directory), **more) as step:
            losses = torch.stack([step() + torch.rand((), device=device.device) for _ in range(_STEPS)])
        states = [value for state in job.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
        state_of = {"losses": losses, "random state of the CPU": torch.get_rng_state()}
        state_of |= {name: parameter.detach() for name, parameter in job.model.named_parameters()}
        state_of |= {f"optimizer state {number}": state for number, state in enumerate(states)}
        if device.full:
            state_of["random state of the device"] = device.module.get_rng_state()
    return {name: tensor.detach().clone() for name, tensor in state_of.items()}


def _difference(plain: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    """Names of what has other bits, at most three."""
    differ = [name for name, tensor in plain.items() if name not in other or not torch.equal(tensor, other[name])]
    return ", ".join(differ[:3]) + (f" and {len(differ) - 3} more" if len(differ) > 3 else "")
