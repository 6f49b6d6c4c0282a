"""Megatron-FSDP on ranks without an accelerator, and its parts put together by other means than the probe's.

Its constructor asks for the device ``cuda:<number>``, in which `cpu_shim` sees the CPU as soon as there is a number; its fused division
wants PREMUL_SUM, which gloo does not have, so it is off. Nothing else of it is changed.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import train_gpt
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

from msprobe_engine.core.statistics.digest import digest_array
from msprobe_integrations.megatron.layout import unwrap_model

FLAG = "--megatron-fsdp"
STRATEGY = "optim_grads_params"
Settings = train_gpt.DistributedDataParallelConfig


class Sharded(FullyShardedDataParallel):
    """Takes device number 0 while it is built; needs no broadcast, as all ranks draw the same weights."""

    def __init__(self, config: Any, ddp_config: Any, module: Any, **kwargs: Any) -> None:
        own, torch.cuda.current_device = torch.cuda.current_device, lambda: 0
        try:
            super().__init__(config=config, ddp_config=ddp_config, module=module, **kwargs)
        finally:
            torch.cuda.current_device = own
        self.broadcast_params = lambda: None


def use_it() -> None:
    """The example GPT is sharded by Megatron-FSDP from now on: parameters, gradients and the optimizer's states."""
    fixed = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": STRATEGY, "gradient_reduce_div_fusion": False}
    train_gpt.DistributedDataParallelConfig = functools.wraps(Settings)(functools.partial(Settings, **fixed))  # type: ignore[misc]
    train_gpt.DistributedDataParallel = Sharded  # type: ignore[misc]


def is_it(chunks: list[Any]) -> bool:
    """Are they sharded so?"""
    return isinstance(chunks[0], FullyShardedDataParallel)


def parts(chunk: Any) -> list[tuple[str, Any]]:
    """Name of each parameter and what the optimizer of this rank has of it."""
    inner, shards = unwrap_model(chunk), chunk.param_and_grad_buffer.optimizer_named_parameters
    names = {id(p): name for name, p in inner.named_parameters()}
    return [(names.get(id(shard)) or names[id(shard.orig_param)], shard) for _, shard in shards]


def whole(part: torch.Tensor | None) -> torch.Tensor:
    """The parts of all ranks, one after the other."""
    mine = None if part is None else part.detach().reshape(-1).clone()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return torch.cat([one for one in every if one is not None])


def gathered(chunks: list[Any]) -> dict[str, tuple[float, ...]]:
    """norm, sum, min, max and digest of each whole reduced gradient, in float64; after `finish_grad_sync`."""
    found = {}
    for stage, chunk in enumerate(chunks):
        for name, shard in parts(chunk):
            data = whole(None if shard.grad is None else shard.grad._local_tensor).numpy()
            wide = data.astype(np.float64)
            norm = float(np.sqrt((wide**2).sum()))
            found[f"{stage} {name}"] = (norm, float(wide.sum()), float(wide.min()), float(wide.max()), digest_array(data))
    return found


def parameter_norms(chunks: list[Any]) -> dict[str, float]:
    """Norms of whole parameters."""
    return {f"{i} {n}": float(whole(s._local_tensor).double().norm()) for i, c in enumerate(chunks) for n, s in parts(c)}
