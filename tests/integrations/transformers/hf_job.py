"""A tiny GPT-2 on numbered samples under Hugging Face's Trainer, in order, so that the training can be written by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from trainer_checks import asked, by_hand, deepspeed_on_gloo, digest, fsdp_on_cpu, seen
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

deepspeed_on_gloo()
fsdp_on_cpu()


class Samples(torch.utils.data.Dataset):
    """Sample i is always the same."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x.clone()}


class InOrder(Trainer):
    """A subclass, as people have them, with a sampler of its own."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def make_trainer(folder: Path, callbacks: Any = None, made: type[InOrder] = InOrder, **arguments: Any) -> InOrder:
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
    }
    args = TrainingArguments(output_dir=str(folder), **{**known, **arguments})
    return made(model=make_model(), args=args, train_dataset=Samples(), eval_dataset=Samples(), callbacks=callbacks)


def train(folder: Path, file: Path | None, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Train, followed when `file` is given; the bits of this rank's parameters and what was seen."""
    asked(file, "transformers")
    trainer = make_trainer(folder, **arguments)
    trainer.train()
    return digest(trainer.model.parameters()), seen()


def reference(ranks: int = 1, steps: int = 3, per_step: int = 2) -> dict[Any, float]:
    """The same by hand in float64; `per_step` micro batches of 2 samples on every rank."""

    def loss(model: Any, numbers: Any) -> torch.Tensor:
        x = torch.stack([Samples()[i]["input_ids"] for i in numbers])
        logits = model(input_ids=x).logits[:, :-1]
        total = torch.nn.functional.cross_entropy(logits.reshape(-1, 32), x[:, 1:].reshape(-1), reduction="sum")
        return total / x.numel()  # the Trainer counts the first label, too, which has no prediction

    each = 2 * ranks
    batches = [[range(each * i, each * (i + 1)) for i in range(s * per_step, (s + 1) * per_step)] for s in range(steps)]
    return by_hand(make_model(), loss, batches, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0), clip=1.0)
