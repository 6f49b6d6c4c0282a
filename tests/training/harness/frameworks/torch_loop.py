"""Loops of plain PyTorch that make no call.

Parallelism: ``dp`` (DDP), ``fsdp1``, ``fsdp2``, ``dp`` with ``fsdp2`` (HSDP), ``tp``, ``fsdp2`` with ``tp``, ``pp`` (GPipe; of two stages).
Features: ``scaler``, ``compile``, ``flat`` (FSDP1 without original parameters), ``whole`` (FSDP1, NO_SHARD), ``1f1b``, ``interleaved``.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it: once here instead of in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from harness.case import Training, TrainingCase
from harness.models import MODELS as SHARED
from harness.models import OPTIMIZER
from harness.run import digest

try:  # public since torch 2.6
    from torch.distributed.fsdp import fully_shard
except ImportError:
    from torch.distributed._composable.fsdp import fully_shard

ARM = ("torch",)
SCALARS = ("loss", "learning_rate", "skipped")
MONITOR = {"unreduced_gradients": True, "updates": True}
"""What is watched here, too; `checks.check_unreduced`."""
CUT = 4
"""First layer of the second stage."""
MISSING = {
    "fsdp2": (2, 7, "FSDP2 of torch below 2.7 wants the streams of an accelerator, also on a CPU"),
    "pp": (2, 6, "pipelines before torch 2.6 want examples of their inputs"),
}


def missing(case: TrainingCase) -> str:
    """Why this torch cannot train the case; ""."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return next((why for name, (*since, why) in MISSING.items() if name in case.parallelism and version < tuple(since)), "")


def wrap_model(model: nn.Module, case: TrainingCase) -> nn.Module:
    sizes = {name: size for name, size in case.parallelism.items() if size > 1}
    if "fsdp1" in sizes:
        return _fsdp1(model, case)
    if sizes.keys() == {"dp"}:
        return DistributedDataParallel(model)
    if "compile" in case.features:
        return torch.compile(model, backend="eager")  # type: ignore[no-any-return]
    if not sizes:
        return model
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if "fsdp2" in sizes:
        over = mesh if "dp" in sizes else mesh["fsdp2"]
        for part in model.children():
            if list(part.parameters()):
                fully_shard(part, mesh=over)
        fully_shard(model, mesh=over)
    return model


def _fsdp1(model: Any, case: TrainingCase) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    strategy = ShardingStrategy.NO_SHARD if "whole" in case.features else ShardingStrategy.FULL_SHARD
    keys: dict[str, Any] = {"use_orig_params": "flat" not in case.features, "sharding_strategy": strategy, "device_id": torch.device("cpu")}
    for number in (0, 4):
        model[number] = FullyShardedDataParallel(model[number], **keys)
    return FullyShardedDataParallel(model, **keys)


def train(training: Training) -> Any:
    """Bits of this rank's parameters, and the losses."""
    return _train_stages(training) if "pp" in training.case.parallelism else _train(training)


def _train(training: Training) -> Any:
    case, kind = training.case, SHARED[training.case.model]
    model = training.model(kind.make())
    wrapped = wrap_model(model, case)
    optimizer = training.optimizer(torch.optim.AdamW(wrapped.parameters(), **OPTIMIZER, foreach=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled="scaler" in case.features)
    micros = range(case.micro_batches)
    batches = training.data([[kind.batch(step, micro, training.data_rank()) for micro in micros] for step in range(case.steps)])
    training.start(model, optimizer)
    losses = []
    for samples in batches:
        for number, x in enumerate(samples):
            with _synchronized(wrapped, number == len(samples) - 1), torch.autocast("cpu", torch.bfloat16, case.precision == "bf16"):
                loss = kind.loss(wrapped, x) / len(samples)
                scaler.scale(loss).backward()
            losses.append(loss.item())
        training.clipping(model)
        if case.clip:
            scaler.unscale_(optimizer)
            own = getattr(wrapped, "clip_grad_norm_", None)
            own(case.clip) if own is not None else nn.utils.clip_grad_norm_(wrapped.parameters(), case.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        training.updated()
        with torch.no_grad():
            wrapped(samples[0])
    return digest(wrapped.parameters()), losses


@contextlib.contextmanager
def _synchronized(model: Any, last: bool) -> Any:
    """Gradients are reduced in the last micro batch only."""
    if isinstance(model, DistributedDataParallel) and not last:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    yield


def _train_stages(training: Training) -> Any:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    case, kind, rank = training.case, SHARED[training.case.model], dist.get_rank()
    layers: Any = kind.make()
    several = "interleaved" in case.features
    cuts = (0, 1, 3, 5, len(layers)) if several else (0, CUT, len(layers))
    numbers = (rank, rank + 2) if several else (rank,)
    parts = [nn.Sequential(OrderedDict((str(i), layers[i]) for i in range(cuts[n], cuts[n + 1]))) for n in numbers]
    whole = training.model(nn.Sequential(OrderedDict(child for part in parts for child in part.named_children())))
    stages = [PipelineStage(part, n, len(cuts) - 1, torch.device("cpu")) for part, n in zip(parts, numbers)]
    optimizer = training.optimizer(torch.optim.AdamW([p for part in parts for p in part.parameters()], **OPTIMIZER, foreach=False))

    def loss(output: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    micros = case.micro_batches
    kinds: dict[bool, Any] = {False: ScheduleGPipe, True: Schedule1F1B}
    schedule: Any = (
        ScheduleInterleaved1F1B(stages, micros, loss_fn=loss)
        if several
        else kinds["1f1b" in case.features](stages[0], micros, loss_fn=loss)
    )
    batches = training.data([torch.cat([kind.batch(step, micro, 0) for micro in range(micros)]) for step in range(case.steps)])
    training.start(whole, optimizer)
    for x in batches:
        schedule.step(*([x] if rank == 0 else []), **({"target": x} if numbers[-1] == len(cuts) - 2 else {}))
        training.clipping(whole)
        optimizer.step()
        optimizer.zero_grad()
        training.updated()
    return digest(p for part in parts for p in part.parameters())
