"""Trainings of the set under a DeepSpeed engine, with reported bugs in how it is used, and other ways to the same numbers."""

from __future__ import annotations

import logging
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from reported_bugs.case import Fault, Healthy, when_ready
from reported_bugs.faults.in_data import LOSS
from reported_bugs.faults.in_ranks import local_tokens, not_updated, same_data, second_rank
from reported_bugs.faults.in_updates import UPDATE
from reported_bugs.training import Program, Setting
from torch import Tensor


@cache
def library() -> Any:
    """DeepSpeed, ready for a machine without an accelerator."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # the first use would compile C++ for more than a minute
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


class DeepSpeedProgram(Program):
    """The engine takes gradients together, clips and updates."""

    engine: Any = None

    def launch(self) -> dict[str, Any]:
        s = self.setting
        stage = int(s.wrap[-1])
        zero: dict[str, Any] = {
            "stage": stage,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 0,
            "reduce_bucket_size": 40000,
            "allgather_bucket_size": 40000,
        }
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": s.rows // (s.micro * s.ranks),
            "gradient_accumulation_steps": s.micro,
            "gradient_clipping": s.clip,
            "steps_per_print": 10**9,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if s.dtype == "bf16":
            found["bf16"] = {"enabled": True}
        for key, value in dict(part.split("=") for part in s.form.split() if "=" in part).items():
            place = zero if key in ("overlap_comm", "reduce_bucket_size", "contiguous_gradients", "allgather_bucket_size") else found
            place[key] = {"true": True, "false": False}.get(value, int(value) if value.isdigit() else value)
        return found

    def wrap(self) -> None:
        deepspeed = library()
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed("gloo", verbose=False)
        self.optimizer = self.make_optimizer()
        self.engine, self.optimizer, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=self.launch())
        self.net = self.engine
        base = self.optimizer
        while hasattr(base, "optimizer"):
            base = base.optimizer
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(base, self.rate)

    def scale(self) -> int:
        """The engine takes the mean over ranks and micro batches; the loss is one over all tokens."""
        return self.setting.ranks * self.setting.micro

    def step(self, number: int) -> Tensor:
        micros = self.batches(number)
        tokens, total = self.tokens(micros), torch.zeros(())
        for batch in micros:
            loss = self.loss(batch, tokens)
            self.backward(loss)
            self.update()
            total = total + loss.detach().float() / self.setting.micro
        self.scheduler.step()
        self.losses.append(float(total))
        return total

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def update(self) -> None:
        self.engine.step()


ZERO1 = Setting(ranks=2, wrap="deepspeed1", changes=(("bias", False),))
ZERO2, ZERO3 = replace(ZERO1, wrap="deepspeed2"), replace(ZERO1, wrap="deepspeed3")
ZERO1_MICRO, ZERO2_MICRO, ZERO3_MICRO = (replace(setting, micro=2) for setting in (ZERO1, ZERO2, ZERO3))
DDP_FP32 = Setting(ranks=2, wrap="ddp", dtype="fp32", changes=(("bias", False),))
ZERO2_FP32, ZERO3_FP32 = replace(ZERO2, dtype="fp32"), replace(ZERO3, dtype="fp32")


def launched_with(**changes: Any) -> Any:
    def plant(p: Any) -> None:
        own = p.launch
        p.launch = lambda: {**own(), **changes}

    return plant


def divided_twice(p: Any) -> None:
    own = p.backward
    p.backward = lambda loss: own(loss / p.setting.micro)


def loaded_afterwards(p: Any) -> None:
    """Weights are loaded into the model behind `initialize`: the float32 copies keep those of the start."""
    generator = torch.Generator().manual_seed(3)
    for name, q in p.model.named_parameters():
        if "mlp" in name:
            q.data.copy_(torch.randn(q.shape, generator=generator) * 0.02)


def loaded_before(p: Any) -> None:
    p.change_model.append(lambda model: loaded_afterwards(type("Holder", (), {"model": model})))


def partition_lost(p: Any) -> None:
    """The second half of a weight stays as it was: the partition of one rank is not gathered."""
    weight, own = p.model.layers[0].mlp.down.weight, p.update

    def update() -> None:
        kept = weight.detach()[32:].clone()
        own()
        weight.data[32:] = kept

    p.update = update


def scheduled_each_micro_batch(p: Any) -> None:
    own = p.update
    p.update = lambda: (own(), p.scheduler.step())[0]


def gradients_scaled(p: Any) -> None:
    """A loss scale that the backward pass never applied is taken out before the update."""
    p.model.layers[0].attention.v.weight.register_hook(lambda grad: grad / 16)


def adam(p: Any) -> None:
    p.make_optimizer = lambda: torch.optim.Adam(p.groups(), lr=p.setting.lr, betas=(0.9, 0.95), eps=1e-8)


EVERY, WITH_L0 = ("mix", "L0", "monitor"), ("mix", "L0")
COARSE = r"(head|GPT).*backward|\bloss\b|grad"

CASES = (
    Fault(
        "zero 2: accumulation not told",
        ZERO2_MICRO,
        launched_with(gradient_accumulation_steps=1),
        UPDATE + "|reduce|grad|param|weight|embedding",
        "deepspeedai/DeepSpeed#1488",
        EVERY,
    ),
    Fault(
        "zero 1: loss divided twice",
        ZERO1_MICRO,
        when_ready(divided_twice),
        LOSS + "|mul",
        "division in the loop and in the engine",
        EVERY,
        coarse=COARSE,
    ),
    Fault(
        "zero 2: no clipping",
        replace(ZERO2, clip=0.05),
        launched_with(gradient_clipping=0.0),
        r"clip|norm|mul|param|weight|embedding|" + UPDATE,
        "gradient_clipping not in the config",
        EVERY,
    ),
    Fault("zero 2: Adam for AdamW", ZERO2, adam, UPDATE + "|param|weight|embedding", "adam_w_mode", EVERY),
    Fault(
        "zero 1: the same data on both ranks",
        ZERO1,
        when_ready(same_data),
        r"embedding|data|input|getitem|contiguous",
        "no DistributedSampler",
        EVERY,
    ),
    Fault(
        "zero 3: the same data on both ranks",
        ZERO3,
        when_ready(same_data),
        r"embedding|data|input|getitem|contiguous",
        "no DistributedSampler",
        EVERY,
    ),
    Fault(
        "zero 2: loss by local tokens",
        ZERO2,
        when_ready(local_tokens),
        LOSS + "|mul|sum|all_reduce",
        "tokens not summed over ranks",
        EVERY,
        coarse=COARSE,
    ),
    Fault(
        "zero 2: a partition not gathered",
        ZERO2,
        when_ready(partition_lost),
        r"layers\.0\.mlp\.down|copy_|setitem",
        "wrong partition",
        EVERY,
    ),
    Fault(
        "zero 1: a weight not updated on one rank",
        ZERO1,
        second_rank(not_updated),
        r"layers\.0\.mlp\.down|copy_",
        "parameter not broadcast",
        EVERY,
    ),
    Fault(
        "zero 1: schedule stepped per micro batch",
        replace(ZERO1_MICRO, warmup=6),
        when_ready(scheduled_each_micro_batch),
        UPDATE + "|param|weight|embedding",
        "schedule in the inner loop",
        EVERY,
    ),
    Fault(
        "zero 2: a gradient divided by its scale",
        ZERO2,
        when_ready(gradients_scaled),
        r"layers\.0\.attention\.v|truediv|\bdiv",
        "deepspeedai/DeepSpeed#7837",
        EVERY,
    ),
    Fault(
        "zero 3: no clipping",
        replace(ZERO3, clip=0.05),
        launched_with(gradient_clipping=0.0),
        r"clip|norm|mul|param|weight|embedding|" + UPDATE,
        "gradient_clipping not in the config",
        EVERY,
    ),
    Fault(
        "zero 1: weights loaded behind the engine",
        ZERO1,
        when_ready(loaded_afterwards),
        r"param|weight|between|" + UPDATE,
        "load_state_dict after initialize",
        EVERY,
        golden=loaded_before,
    ),
    Fault(
        "zero 2: gradients reduced in bf16",
        ZERO2_FP32,
        launched_with(communication_data_type="bf16"),
        r"flatten_dense|reduce|grad|bfloat16|Tensor\.to|" + UPDATE,
        "communication_data_type",
        EVERY,
    ),
)

HEALTHY = (
    Healthy("zero 1 for ddp, fp32", DDP_FP32, replace(DDP_FP32, wrap="deepspeed1"), levels=EVERY),
    Healthy("zero 2 for ddp, two micro batches, fp32", replace(DDP_FP32, micro=2), replace(ZERO2_FP32, micro=2), levels=EVERY),
    Healthy("zero 1: a repeat", ZERO1, ZERO1, levels=EVERY),
    Healthy("zero 2 for zero 1", ZERO1, ZERO2, levels=EVERY),
    Healthy("zero 3 for zero 2", ZERO2, ZERO3, levels=("L0", "monitor")),
    Healthy("zero 3 for zero 2, fp32", ZERO2_FP32, ZERO3_FP32, levels=("L0", "monitor")),
    Healthy("zero 2: other buckets", ZERO2, replace(ZERO2, form="reduce_bucket_size=4096 allgather_bucket_size=4096"), levels=EVERY),
    Healthy("zero 2: overlapped", ZERO2, replace(ZERO2, form="overlap_comm=true"), levels=EVERY),
    Healthy("zero 2: gradients not contiguous", ZERO2, replace(ZERO2, form="contiguous_gradients=false"), levels=EVERY),
    Healthy("zero 1: two micro batches", ZERO1, ZERO1_MICRO, levels=EVERY),
    Healthy("alone: zero 1", ZERO1, None, levels=EVERY),
    Healthy("alone: zero 3", ZERO3, None, levels=EVERY),
)
