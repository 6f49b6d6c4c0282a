"""A loop of one's own around an `Accelerator`.

Parallelism: ``dp`` (DDP), ``fsdp2`` (its plugin), ``dp`` with ``zero`` (DeepSpeed's plugin). Features: ``evaluation`` (with a gathered
metric), ``checkpoint``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, state

from harness.case import Training, TrainingCase
from harness.frameworks import deepspeed_engine as deepspeed
from harness.models import MODELS as SHARED
from harness.models import OPTIMIZER
from harness.run import digest

ARM = ("deepspeed", "torch", "accelerate")
SCALARS = ("loss", "learning_rate", "skipped")


def use_fsdp_on_cpu() -> None:
    """Accelerate uses FSDP on accelerators only, and DDP in its place on a CPU, without a word. In its state FSDP is what was asked for."""
    init = state.AcceleratorState.__init__

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, plugin

    state.AcceleratorState.__init__ = made  # type: ignore[method-assign]


use_fsdp_on_cpu()


def make_plugins(case: TrainingCase) -> dict[str, Any]:
    if "zero" in case.parallelism:
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=deepspeed.make_config(case, optimizer=None))}
    if "fsdp2" in case.parallelism:
        return {
            "fsdp_plugin": FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=True,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Linear", "LayerNorm"],
                cpu_offload=False,
            )
        }
    return {}


def train(training: Training) -> Any:
    """Bits of this rank's parameters, and the losses."""
    case, kind = training.case, SHARED[training.case.model]
    zero = "zero" in case.parallelism
    state.AcceleratorState._reset_state()  # it takes a plugin once
    arguments: dict[str, Any] = {"cpu": not zero, "gradient_accumulation_steps": case.micro_batches, **make_plugins(case)}
    arguments |= {"mixed_precision": case.precision} if case.precision != "fp32" else {}
    accelerator = Accelerator(**training.launch(arguments))
    wanted = "DEEPSPEED" if zero else "FSDP" if "fsdp2" in case.parallelism else "MULTI_CPU" if case.ranks > 1 else "NO"
    assert accelerator.distributed_type.name == wanted  # with cpu=True DeepSpeed and FSDP give way to DDP
    net = training.model(kind.make())
    micros, own = case.micro_batches, [training.data_rank()] if zero else range(case.data_ranks)
    if zero:  # without cpu=True Accelerate knows of one process on a CPU, and would give every rank all batches
        assert accelerator.num_processes == 1
    samples = [kind.batch(step, micro, r) for step in range(case.steps) for micro in range(micros) for r in own]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(samples)), batch_size=4)
    optimizer = training.optimizer(torch.optim.AdamW(net.parameters(), **OPTIMIZER))
    model, optimizer, data = accelerator.prepare(net, optimizer, data)
    training.start(net, optimizer.optimizer)
    losses = []
    for number, (x,) in enumerate(training.data(data)):
        with accelerator.accumulate(model):
            loss = kind.loss(model, x)
            accelerator.backward(loss)
            if accelerator.sync_gradients and case.clip:
                accelerator.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if "evaluation" in case.features:
            accelerator.gather(loss.detach())
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
        if number % micros == micros - 1:
            training.updated()
            if "checkpoint" in case.features:
                accelerator.save_state(str(training.folder / "state"))
    assert training.step == case.steps
    if dist.is_initialized():
        dist.barrier()
    return digest(net.parameters()), losses
