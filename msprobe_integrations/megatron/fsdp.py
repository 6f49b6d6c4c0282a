"""Megatron-FSDP (`megatron.core.distributed.fsdp`, 0.14 to 0.19): the parts of parameters that the optimizer updates.

A module has a parameter as a whole tensor while it computes and as a DTensor otherwise. The DTensors that the optimizer has stay the
same objects: each is a flat range of the whole (in mixed precision of its fp32 copy), which may be empty, and has a gradient from
`finish_grad_sync` on, unless it is empty.
"""

from __future__ import annotations

from typing import Any

import torch

from msprobe_integrations.torch.tensors import dtensors


def shards(chunk: Any) -> dict[int, torch.Tensor]:
    """What the optimizer updates of each parameter, by the `id` of whatever the module has at present. Empty for other models.

    Args:
        chunk: a model chunk as the loop has it.
    """
    found: dict[int, torch.Tensor] = {}
    for _, shard in getattr(getattr(chunk, "param_and_grad_buffer", None), "optimizer_named_parameters", ()):
        if is_shard(shard):
            found[id(shard)] = found[id(shard.orig_param)] = shard
    return found


def is_shard(parameter: Any) -> bool:
    """Is it such a part?"""
    return hasattr(parameter, "orig_param") and dtensors.is_dtensor(parameter)


def range_of(shard: Any) -> tuple[int, int] | None:
    """First element of the whole that this rank has, and the one after the last; None when this version does not say."""
    size = dtensors.local(shard).numel()
    place = getattr(shard, "megatron_fsdp_slice", None)
    if not size:
        return 0, 0
    return (place.start, place.stop) if isinstance(place, slice) and place.stop - place.start == size else None
