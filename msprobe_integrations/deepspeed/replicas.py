"""Which parameters DeepSpeed keeps equal on which ranks, from its own groups and marks."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from msprobe_integrations.common.parameters.source import Replicas
from msprobe_integrations.requirements import MissingNameError, need, optional


def replicas(parameter: torch.Tensor, engine: Any, members: Any, partitioned: bool) -> list[Replicas]:
    """Groups of more than one rank that hold the same bits.

    Args:
        engine: the engine, or None.
        members: the group that shares the parameter's master copy; None without ZeRO.
        partitioned: the parameter itself is cut over `members` (ZeRO 3), not only its master copy.
    """
    groups: list[Replicas] = []
    expert = is_expert(parameter)
    if not partitioned:
        with suppress(MissingNameError):
            group = members if members is not None else _data_parallel(engine, expert_group(parameter) if expert else None)
            groups.append(Replicas("expert_dp" if expert else "dp", group, part=False))
    if not is_cut(parameter):
        with suppress(MissingNameError):
            mpu = None if engine is None else need(engine, "mpu", for_="the replica check over tensor-parallel ranks")
            groups.append(Replicas("tp", _tensor_parallel(mpu), part=partitioned))
    tied = optional(getattr(engine, "module", None), "get_tied_weights_and_groups", because="only pipeline modules tie weights over ranks")
    if tied is not None:
        groups.extend(Replicas("embedding", group, part=partitioned) for weight, group in tied() if weight is parameter)
    return [entry for entry in groups if entry.group is not None and dist.get_world_size(entry.group) > 1]


def is_expert(parameter: torch.Tensor) -> bool:
    """Is it a parameter of an expert? Those have both marks, `allreduce` and `group_name`.

    Raises:
        MissingNameError: it has no `allreduce` and is in a group: gradients of experts would be taken for equal where they are not.
    """
    if hasattr(parameter, "group_name"):
        return need(parameter, "allreduce", for_="parameters of experts told from others") is False
    return optional(parameter, "allreduce", True, because="only parameters of experts have the mark") is False


def expert_group(parameter: torch.Tensor) -> str:
    """Name of the group that holds the same expert."""
    return str(need(parameter, "group_name", for_="the replica check of experts"))


def is_cut(parameter: torch.Tensor) -> bool:
    """Is it a piece over tensor-parallel ranks, by the marks of DeepSpeed and Megatron?"""
    because = "only what is cut has the mark"
    return bool(optional(parameter, "model_parallel", because=because) or optional(parameter, "tensor_model_parallel", because=because))


def _tensor_parallel(mpu: Any) -> Any:
    """The tensor-parallel group of a model parallel unit, by the names that DeepSpeed itself tries, in its order: the last one means
    the pipeline as well where there is one, but then there is one of the others."""
    for name in ("get_tensor_model_parallel_group", "get_slice_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            return getattr(mpu, name)()
    return None


def _data_parallel(engine: Any, experts: str | None) -> Any:
    if experts is not None:
        from deepspeed.utils import groups

        return groups._get_expert_data_parallel_group(experts)
    return optional(engine, "seq_data_parallel_group", because="reliance has said what is left out")
