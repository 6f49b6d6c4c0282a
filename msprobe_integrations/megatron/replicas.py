"""Which parameters Megatron keeps equal on which ranks, from its groups and the marks on the parameters.

=====================  ============================================================================================================
label                  parameters
=====================  ============================================================================================================
``dp``, ``expert_dp``  all: over the group that their gradients are reduced over (data and context parallel, experts their own)
``tp``                 without the mark ``tensor_model_parallel``: layer norms, routers, biases of row-parallel layers; also those of
                       sequence parallelism, whose gradients are added up over the group
``embedding``          marked ``shared_embedding``: the tied embeddings of the first and the last pipeline stage
=====================  ============================================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from msprobe_integrations.common.parameters.source import Replicas
from msprobe_integrations.megatron.layout import marks_are_known
from msprobe_integrations.requirements import MissingNameError, need, optional

_MARK = "only some parameters have it"


def replicas(parameter: torch.Tensor, members: Any) -> list[Replicas]:
    """Groups of more than one rank that hold the same bits.

    Args:
        members: the group that reduces its gradient, as its bucket says; None: Megatron's parallel state is asked.
    """
    expert = optional(parameter, "allreduce", True, because=_MARK) is False
    groups = [Replicas("expert_dp" if expert else "dp", members if members is not None else _data_parallel(expert))]
    if not optional(parameter, "tensor_model_parallel", False, because=_MARK) and marks_are_known():
        group = _find_group("get_expert_tensor_parallel_group") if expert else _find_group("get_tensor_model_parallel_group")
        groups.append(Replicas("tp", group))
    if optional(parameter, "shared_embedding", False, because=_MARK):
        groups.append(Replicas("embedding", _find_group("get_embedding_group")))
    rank = dist.get_rank() if dist.is_initialized() else 0
    return [entry for entry in groups if entry.group is not None and _is_shared(entry.group, rank)]


def _is_shared(group: Any, rank: int) -> bool:
    """More than one rank, this one among them (Megatron hands out groups of others)."""
    ranks = dist.get_process_group_ranks(group)
    return len(ranks) > 1 and rank in ranks


def _data_parallel(expert: bool) -> Any:
    return _find_group("get_expert_data_parallel_group") if expert else _find_group("get_data_parallel_group", with_context_parallel=True)


def _find_group(name: str, **arguments: Any) -> Any:
    """A group of Megatron's parallel state; None when it was not made, or this version has no such group, which is said."""
    from megatron.core import parallel_state

    try:
        ask = need(parallel_state, name, for_=f"replica check over the group of {name}")
    except MissingNameError:
        return None
    for how in ({"check_initialized": False}, {}):  # not all of them take it, in all versions
        try:
            return ask(**how, **arguments)
        except AssertionError:
            return None
        except TypeError:
            continue
    return None
