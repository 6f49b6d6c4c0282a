"""Operators that write into their arguments and leave the version counters as they are: what was taken of a tensor before such a call
is not its present value.

torch raises the version of what an in-place operator returns or of lists that it generates code for; not of the lists of fused
optimizers and of `GradScaler`, not of running statistics, and not for operators that others have registered without autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_FUSED = ("_fused_", "_amp_")
_STATISTICS = frozenset(("batch_norm", "instance_norm", "native_batch_norm", "sync_batch_norm", "SyncBatchNorm"))
_STATISTICS_AT = slice(1, 5)
"""``torch.nn.functional`` has them behind the input, ``torch`` behind weight and bias."""
_ALL = frozenset(
    ("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats", "fused_moving_avg_obs_fake_quant")
)
OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
NAMES = (*_FUSED, *_STATISTICS, *_ALL)
"""Only calls of these, or with names that begin like this, can have written silently; for a first look."""


def version_of(tensor: torch.Tensor) -> int | None:
    """How often it was written to; None of one made in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def written_silently(func: Any, api: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor | None]:
    """Tensors that a call of `func`, named `api`, may have written to without a new version. None stands for any tensor there is:
    of gradients and parameters others may hold views."""
    if api in _STATISTICS:
        return [value for value in (*args[_STATISTICS_AT], *kwargs.values()) if isinstance(value, torch.Tensor)]
    if api in _ALL or (api.startswith(_FUSED) and api.endswith("_")):
        return [None]
    if isinstance(func, OPERATORS[0]):
        return [None] if func._schema.is_mutable else []
    if isinstance(func, OPERATORS[1]):
        return [None] if any(getattr(func, each)._schema.is_mutable for each in func.overloads()) else []
    return []


def written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that the schema of an operator marks as written, lists of tensors as they are; all, where several overloads may have been
    meant."""
    overloads = [func] if isinstance(func, OPERATORS[0]) else [getattr(func, each) for each in func.overloads()]
    if len(overloads) != 1:
        return [*args, *kwargs.values()] if any(each._schema.is_mutable for each in overloads) else []
    declared = overloads[0]._schema.arguments
    given = [*zip(declared, args), *((each, kwargs[each.name]) for each in declared if each.name in kwargs)]
    return [value for argument, value in given if argument.is_write]
