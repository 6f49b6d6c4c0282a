"""The modules of a model that the monitor can watch. What is inside of compiled or scripted code has no hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from msprobe_integrations.common.monitor.targets import INNER, OUTER, Named, plain
from msprobe_integrations.torch.hooks.compiled import ORIGINAL, has_call_boundary, is_wrapper

_FSDP1 = "FullyShardedDataParallel"


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside of wrappers that hold it as their only child ``module`` (DDP, mixed precision, engines)."""
    while list(model._modules.keys()) == [OUTER] and model._modules[OUTER] is not None:
        inner = model._modules[OUTER]
        assert inner is not None
        model = inner
    return model


def named_modules(models: Sequence[nn.Module]) -> Iterator[Named]:
    """Every module of the models once, the model itself first; wrappers are left out."""
    for chunk, model in enumerate(models):
        root = unwrap_model(model)
        seals: list[str] = []
        for path, module in root.named_modules():
            sealed = any(path.startswith(seal) for seal in seals)
            inner = module._modules[ORIGINAL] if is_wrapper(module) else module
            assert inner is not None
            if inner is not module or has_call_boundary(module):
                seals.append(f"{path}." if path else "")
            # what is inside of a wrapper is called through it and has its name; FSDP1's own class is nobody's module
            if path.rpartition(".")[2] in INNER or type(module).__name__ == _FSDP1:
                continue
            yield Named(chunk, plain(path), inner, module, root, sealed)
