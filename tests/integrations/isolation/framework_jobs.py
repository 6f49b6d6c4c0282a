"""Trainings under frameworks, for faults; each is made by the tests of its framework."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed_harness
import ds_jobs
import hf_job
import pl_job
import rank_loops
import torch
from isolation_jobs import asked
from isolation_run import Bits, Job
from plants import unarmed

from msprobe_engine.settings.load import load_settings
from msprobe_integrations.deepspeed.callback import DeepSpeedCallback

BRIEF = {"dump": {"step": [1], "level": "L0"}, "incident": {"level": "L0", "capture_level": "L0", "max_incidents": 1}}
"""DeepSpeed calls so much of torch that a dump of it takes most of the time."""
DEEPSPEED = ("msprobe_integrations.deepspeed",)


def random_state() -> bytes:
    """Of torch's generator."""
    return torch.get_rng_state().numpy().tobytes()


def bits_of(parameters: Any) -> Bits:
    """Of parameters, of DTensors this rank's part, and the random state."""
    parts = [getattr(p, "_local_tensor", p).detach().contiguous().view(torch.uint8) for p in parameters]
    return (*(part.numpy().tobytes() for part in parts), random_state())


def ddp(place: Path, seen: bool) -> Bits:
    """A script with DDP that makes no call."""
    if seen:
        asked(place, "torch")
    return (*rank_loops.train("ddp", 2, 0.5), random_state())


def fsdp2(place: Path, seen: bool) -> Bits:
    """The same with FSDP2."""
    if seen:
        asked(place, "torch")
    return (*rank_loops.train("fsdp2", 2, 0.5), random_state())


def engine(place: Path, seen: bool, stage: int, way: str) -> Bits:
    """A DeepSpeed engine: followed as the environment asks, as its own configuration asks, or by a callback."""
    file = place / "probe.json"
    conf = deepspeed_harness.config(stage, "bf16", 2, 0.05)
    if seen:
        asked(place, *(("torch", "deepspeed") if way != "callback" else ()), **BRIEF)
        if way != "environment":
            del os.environ["MSPROBE_CONFIG"]
        if way == "key":
            conf["msprobe"] = str(file)
    made = deepspeed_harness.engine_of(conf)
    callback = None
    if seen and way == "callback":
        with unarmed():
            callback = DeepSpeedCallback(load_settings(file))
        callback.on_setup(made)
    losses = ds_jobs.loop(made, deepspeed_harness.batches("bf16", 4))
    if callback is not None:
        callback.close()
    weights = ds_jobs.weights_of(made)
    return (repr(losses).encode(), *weights.values(), random_state())


def trainer(place: Path, seen: bool) -> Bits:
    """Hugging Face's Trainer with evaluations and a checkpoint."""
    if seen:
        asked(place, "torch", "accelerate", "transformers")
    made = hf_job.make_trainer(place / "hf", eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    made.train()
    return bits_of(made.model.parameters())


def lightning(place: Path, seen: bool) -> Bits:
    """Lightning's Trainer with accumulation and validations."""
    if seen:
        asked(place, "torch", "lightning")
    model, data = pl_job.module(), pl_job.loader()
    pl_job.make_trainer(place, accumulate_grad_batches=2, val_check_interval=4, enable_checkpointing=True).fit(model, data, data)
    return bits_of(model.parameters())


JOBS: dict[str, Job] = {
    "DDP": Job(ddp, 2, packages=("msprobe_integrations.torch.plain_loop",)),
    "FSDP2": Job(fsdp2, 2, packages=("msprobe_integrations.torch.plain_loop",)),
    "ZeRO 1": Job(lambda place, seen: engine(place, seen, 1, "environment"), 2, packages=DEEPSPEED),
    "ZeRO 2": Job(lambda place, seen: engine(place, seen, 2, "callback"), 2, packages=DEEPSPEED),
    "ZeRO 3": Job(lambda place, seen: engine(place, seen, 3, "key"), 2, packages=DEEPSPEED),
    "Transformers": Job(trainer, packages=("msprobe_integrations.transformers", "msprobe_integrations.torch.trainer_loop")),
    "Lightning": Job(lightning, packages=("msprobe_integrations.lightning", "msprobe_integrations.torch.trainer_loop")),
}
