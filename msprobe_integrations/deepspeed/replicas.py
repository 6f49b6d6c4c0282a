"""Which parameters DeepSpeed keeps equal on which ranks, from its own groups and marks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from msprobe_integrations.common.parameters.source import Replicas


def replicas(parameter: torch.Tensor, engine: Any, members: Any, partitioned: bool) -> list[Replicas]:
    """Groups of more than one rank that hold the same bits.

    Args:
        parameter: of the model.
        engine: the engine, or None.
        members: the group that shares the parameter's master copy; None without ZeRO.
        partitioned: the parameter itself is cut over `members` (ZeRO 3), not only its master copy.
    """
    found: list[Replicas] = []
    expert = getattr(parameter, "allreduce", True) is False
    if not partitioned:
        group = members if members is not None else _data_parallel(engine, getattr(parameter, "group_name", None) if expert else None)
        found.append(Replicas("expert_dp" if expert else "dp", group, part=False))
    if not (getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)):
        found.append(Replicas("tp", _tensor_parallel(getattr(engine, "mpu", None)), part=partitioned))
    tied = getattr(getattr(engine, "module", None), "get_tied_weights_and_groups", None)
    if tied is not None:
        found.extend(Replicas("embedding", group, part=partitioned) for weight, group in tied() if weight is parameter)
    return [entry for entry in found if entry.group is not None and dist.get_world_size(entry.group) > 1]


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
    return getattr(engine, "seq_data_parallel_group", None)
