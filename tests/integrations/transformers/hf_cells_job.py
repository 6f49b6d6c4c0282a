"""A Trainer in each layout of docs/integrations.md, looked at by an eye of the test's own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hf_job
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from restored import snapshot
from trainer_cells import Drift, Eye, Spy, place_of, rank, spoiled, watched
from trainer_checks import asked, digest
from transformers import TrainerCallback

from msprobe_integrations.transformers.callback import MsprobeCallback

STEPS = 3
KIND, FUNCTION = "LayerNorm", "layer_norm"
DRIFTING, FAILING = "transformer.h.1.ln_1.weight", "transformer.h.0.ln_2"
FSDP2 = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}


def zero(stage: int) -> dict[str, Any]:
    """A configuration of DeepSpeed. Buckets are small: an operator-level dump looks at all of them."""
    return {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 8192, "allgather_bucket_size": 8192},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "DDP, 2 ranks": {},
    "FSDP2, 2 ranks": FSDP2,
    "DeepSpeed ZeRO 2, 2 ranks": {"deepspeed": zero(2)},
    "DeepSpeed ZeRO 3, 2 ranks": {"deepspeed": zero(3)},
}


class Telling(TrainerCallback):
    """Tells an eye of updates."""

    def __init__(self, eye: Eye) -> None:
        self.eye = eye

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.eye.updated()


def trained(layout: str, file: Path | None, eye: Eye) -> Any:
    """Bits of a training: parameters, random state, what was logged."""
    asked(file, "deepspeed", "torch", "accelerate", "transformers")
    with tempfile.TemporaryDirectory() as place:
        trainer = hf_job.make_trainer(Path(place), [Telling(eye)], logging_steps=1, **LAYOUTS[layout])
        eye.begins(trainer.model)
        trainer.train()
    log = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return digest([*trainer.model.parameters(), torch.get_rng_state()]), log


def job(layout: str, given: dict[str, Path]) -> dict[str, Any]:
    """In a rank: everything watched, then something spoiled."""
    train = lambda file, eye: trained(layout, file, eye)  # noqa: E731
    found = watched(train, given, Spy(KIND, FUNCTION))
    drift = Drift(DRIFTING, DeepSpeedZeroOptimizer if "ZeRO" in layout else None) if layout in COPIES else None
    return {**found, "rank": rank(), "said": spoiled(train, given, drift, FAILING)}


COPIES = ("DDP, 2 ranks", "DeepSpeed ZeRO 2, 2 ranks")
"""Layouts in which ranks hold the same."""


def left_behind(layout: str, file: Path) -> list[str]:
    """What differs after a training with a callback that has been closed, and does not after one without."""

    def differs(callbacks: list[Any], look: bool = True) -> list[str]:
        with tempfile.TemporaryDirectory() as place:
            trainer = hf_job.make_trainer(Path(place), **LAYOUTS[layout])
            before = snapshot(trainer.model) if look else None
            for each in callbacks:
                trainer.add_callback(each(file))
            trainer.train()
            for each in [one for one in trainer.callback_handler.callbacks if isinstance(one, MsprobeCallback)]:
                assert each.observer is not None
                assert each.observer.step == STEPS
                each.close()
            return before.changed() if before is not None else []

    differs([], look=False)  # what is made at the first use
    plain = {place_of(line) for line in differs([])}
    return [line for line in differs([MsprobeCallback]) if place_of(line) not in plain]
