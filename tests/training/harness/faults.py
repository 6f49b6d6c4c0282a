"""Mistakes to plant in a training: each is a small function of model, optimizer, data or launch settings."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from harness.case import Fault, Training, is_last_rank

sys.path.append(str(Path(__file__).parents[3] / "examples" / "megatron"))
from fault import damaged

STEP = 1
"""Of the faults that begin at a step."""


def drift(name: str) -> Fault:
    """One element of a parameter is another one in step `STEP`, on the last rank alone: from the update before it on. An optimizer of ZeRO
    1 or 2 gathers parameters again in every update: there from the end of this step's own."""

    def change(parameter: torch.Tensor) -> None:
        if is_last_rank():
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).view(-1)[0] += 1  # type: ignore[operator]

    def apply(model: torch.nn.Module, training: Training) -> torch.nn.Module:
        def updated() -> None:
            if training.step == STEP:
                change(dict(model.named_parameters())[name].data)

        if training.case.parallelism.get("zero") not in (1, 2) and training.case.model != "moe":
            training.after_update.append(updated)
            return model
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        update, calls = DeepSpeedZeroOptimizer.step, [0]

        @functools.wraps(update)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            if calls[0] == STEP:
                change(dict(model.named_parameters())[name].data)
            calls[0] += 1
            return result

        DeepSpeedZeroOptimizer.step = step
        training.at_end.append(functools.partial(setattr, DeepSpeedZeroOptimizer, "step", update))
        return model

    return Fault(f"drift of {name}", "model", apply)


def nan_output(name: str) -> Fault:
    """In step `STEP` a module of the last rank gives NaN, by a real operation."""

    def apply(model: torch.nn.Module, training: Training) -> torch.nn.Module:
        if not is_last_rank():
            return model  # a stage of a pipeline has not all modules
        module = model.get_submodule(name)
        forward = module.forward

        @functools.wraps(forward)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            return spoil(output) if training.step == STEP and torch.is_grad_enabled() else output

        module.forward = faulty  # type: ignore[method-assign]
        return model

    return Fault(f"nan of {name}", "model", apply)


def spoil(output: Any) -> Any:
    """One element is NaN; of a tensor that is divided over ranks, of this rank's part, without the others; of several the first's."""
    if isinstance(output, tuple):
        return spoil(output[0]), *output[1:]
    if not hasattr(output, "to_local"):
        return damaged(output, "log_of_negative", 3)
    mine = damaged(output.to_local(), "log_of_negative", 3)
    facts = {"shape": output.shape, "stride": output.stride()}
    return type(output).from_local(mine, output.device_mesh, output.placements, run_check=False, **facts)  # type: ignore[attr-defined]
