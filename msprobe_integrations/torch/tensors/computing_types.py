"""Data types that a training computes in. What is written may be wider: gradients and losses in float32 come from products in bfloat16
where the training uses autocast, a policy of FSDP or main gradients, and two such runs are as far apart as bfloat16 puts them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.guard import suppress_faults
from msprobe_integrations.patching import FunctionPatches


class ComputingTypes:
    """Fills a mapping from data type to where it was seen first."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found
        self._patches = FunctionPatches()

    def look_at(self, models: Iterable[nn.Module]) -> None:
        """Parameters and policies of models, and the region of autocast that we may be in."""
        for model in models:
            for parameter in model.parameters():
                self._record_dtype(parameter.dtype, "parameters")
            for module in model.modules():
                self._record_dtype(_of_policy(module), "FSDP")
            for device in {parameter.device.type for parameter in model.parameters()} - {"meta"}:
                if torch.is_autocast_enabled(device):
                    self._record_dtype(torch.get_autocast_dtype(device), "autocast")
        if not self._patches:
            self._patches.add(torch.autocast, "__enter__", self._record_autocast)

    def close(self) -> None:
        """Watch no longer."""
        self._patches.close()

    def _record_autocast(self, following: Any, region: Any, *args: Any, **kwargs: Any) -> Any:
        with suppress_faults():
            if getattr(region, "_enabled", False):
                self._record_dtype(getattr(region, "fast_dtype", None), "autocast")
        return following(region, *args, **kwargs)

    def _record_dtype(self, dtype: Any, where: str) -> None:
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            self._found.setdefault(str(dtype).rpartition(".")[2], where)


def _of_policy(module: nn.Module) -> Any:
    """What FSDP2 casts the parameters of a module to."""
    get = getattr(module, "_get_fsdp_state", None)
    group = getattr(get(), "_fsdp_param_group", None) if callable(get) else None
    return getattr(getattr(group, "mp_policy", None), "param_dtype", None)
