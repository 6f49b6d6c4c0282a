"""Where a rank is in DeepSpeed's groups."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msprobe_engine.core.guard import raise_of_training
from msprobe_integrations.deepspeed.replicas import expert_group, is_expert
from msprobe_integrations.requirements import MissingNameError, optional

_ASKED = (
    ("dp", ("get_data_parallel_rank",)),
    ("tp", ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")),
    ("pp", ("get_pipe_parallel_rank", "get_pipeline_model_parallel_rank")),
)


def rank_info(engine: Any) -> dict[str, int]:
    """This rank's place: ``dp``, ``pp``, ``tp`` and ``ep`` as far as the engine's groups tell. Never raises."""
    ranks: dict[str, int] = {}
    stage = optional(engine, "stage_id", because="only pipeline engines have one")
    if isinstance(stage, int):
        ranks["pp"] = stage
    unit = optional(engine, "mpu", because="the replica check says it")
    for key, names in _ASKED:
        for name in names:
            ask = optional(unit, name, because="a unit of the user's own has what it has")
            if ask is not None and key not in ranks:
                rank = _read_rank(ask)
                if rank is not None:
                    ranks[key] = rank
    if "dp" not in ranks:
        rank = _group_rank(optional(engine, "seq_data_parallel_group", because="reliance has said what is left out"))
        if rank is not None:
            ranks["dp"] = rank
    with suppress(MissingNameError):
        experts = [p for p in engine.module.parameters() if is_expert(p)]
        rank = _expert_rank(expert_group(experts[0])) if experts else None
        if rank is not None:
            ranks["ep"] = rank
    return ranks


def _read_rank(ask: Any) -> int | None:
    try:
        return int(ask())
    except Exception as error:  # a unit of the user's own, half made
        raise_of_training(error)
        return None


def _group_rank(group: Any) -> int | None:
    import torch.distributed as dist

    if group is None:
        return None
    return _read_rank(lambda: dist.get_rank(group))


def _expert_rank(name: str) -> int | None:
    def read_expert_rank() -> int:
        from deepspeed.utils import groups

        return int(groups._get_expert_parallel_rank(name))

    return _read_rank(read_expert_rank)
