"""A tiny GPT-2 on numbered samples under Hugging Face's Trainer, in order, so that the training can be written by hand.

Parallelism: ``dp`` (DDP), ``fsdp2``, ``dp`` with ``zero``. Features: ``evaluation``, ``checkpoint``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from harness.case import CLIP, Training, TrainingCase
from harness.frameworks import accelerate_loop, deepspeed_engine
from harness.memory import seen
from harness.models import make_gpt, tokens
from harness.run import ask, digest

ARM = (*accelerate_loop.ARM, "transformers")
SCALARS = ("loss", "grad_norm", "learning_rate", "skipped")


class Samples(torch.utils.data.Dataset[Any]):
    """Sample i is always the same."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens(i), "labels": tokens(i).clone()}


class InOrder(Trainer):
    """A subclass, as people have them, with a sampler of its own."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Telling(TrainerCallback):
    """Tells of updates."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.training.updated()


def make_trainer(folder: Path, callbacks: Any = None, made: type[InOrder] = InOrder, model: Any = None, **arguments: Any) -> InOrder:
    """With arguments of its own in place of those of two micro batches a step, three steps, in fp32 on the CPU."""
    known = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "adamw_torch",
        "max_grad_norm": CLIP,
    }
    args = TrainingArguments(output_dir=str(folder), **{**known, **arguments})
    return made(model=model or make_gpt(), args=args, train_dataset=Samples(), eval_dataset=Samples(), callbacks=callbacks)


def train_with(folder: Path, file: Path | None, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Train, followed when `file` is given; the bits of this rank's parameters and what was seen."""
    ask(file, "transformers")
    trainer = make_trainer(folder, **arguments)
    trainer.train()
    return digest(trainer.model.parameters()), seen()


def make_arguments(case: TrainingCase) -> dict[str, Any]:
    found: dict[str, Any] = {"logging_steps": 1, "max_steps": case.steps, "gradient_accumulation_steps": case.micro_batches}
    found |= {"max_grad_norm": case.clip or 0.0, case.precision: True} if case.precision != "fp32" else {"max_grad_norm": case.clip or 0.0}
    if "zero" in case.parallelism:
        config = deepspeed_engine.make_config(case, optimizer=None)
        found["deepspeed"] = {**config, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": case.clip or 0.0}
    if "fsdp2" in case.parallelism:
        found["fsdp"] = "full_shard auto_wrap"
        found["fsdp_config"] = {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    if "evaluation" in case.features:
        found |= {"eval_strategy": "steps", "eval_steps": 1}
    if "checkpoint" in case.features:
        found |= {"save_strategy": "steps", "save_steps": 1}
    return found


def train(training: Training) -> Any:
    """Bits of this rank's parameters, and what the Trainer logs."""
    arguments = training.launch(make_arguments(training.case))
    trainer = make_trainer(training.folder / "hf", [Telling(training)], model=training.model(make_gpt()), **arguments)
    trainer.train_dataset = training.data(trainer.train_dataset)
    training.start(trainer.model)
    trainer.train()
    log = [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]
    return digest(trainer.model.parameters()), log
