"""Finds the `ParameterSource` of an optimizer, and the optimizer of an engine, from the objects that are passed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from torch import nn

from msprobe_integrations.common.monitor.probe import Probe
from msprobe_integrations.common.parameters.parameter_sampler import ParameterSource
from msprobe_integrations.requirements import MissingNameError

OURS = {"deepspeed": "msprobe_integrations.deepspeed.source", "megatron": "msprobe_integrations.megatron.source"}
"""Modules with a function `find`, as entry points have it, by root module. Not entry points themselves: with metadata of an older
installation a ZeRO optimizer would pass for an ordinary one, and its shards for parameters."""
GROUP = "msprobe.parameter_sources"
"""Entry points of other packages: name is the root module of the class of an optimizer or model, value a function
``(probe, models, optimizer)`` that gives a `ParameterSource`, or None when the objects are not its framework's after all."""


class Engine(NamedTuple):
    """A model that holds its optimizer and drives it.

    Attributes:
        module: the model inside.
        optimizer: what its parameters are updated by; None: an engine for inference.
        find: what finds its `ParameterSource`, for `TorchProbe.attach`.
        place: where this rank is in the engine's groups (``dp``, ``pp``, ``tp``, ``ep``).
    """

    module: nn.Module
    optimizer: Any
    find: Any
    place: Mapping[str, int]


def engine_of(model: Any) -> Engine | None:
    """What a framework's engine is made of; None: `model` is an ordinary module. Told by its class, as in `find_source`."""
    for root in dict.fromkeys(cls.__module__.partition(".")[0] for cls in type(model).__mro__):
        if root in OURS and (parts := getattr(importlib.import_module(OURS[root]), "engine_parts", None)) is not None:
            found: Engine | None = parts(model)
            if found is not None:
                return found
    return None


@functools.cache
def _load_entry_points() -> tuple[EntryPoint, ...]:
    """Of other packages. Read once: it takes the metadata of every installed package."""
    return tuple(entry_points(group=GROUP))


def find_source(probe: Probe, models: Sequence[nn.Module], optimizer: Any) -> ParameterSource | None:
    """The source for these objects: that of the framework whose classes they are, else plain torch (DDP and FSDP2 included).

    Args:
        probe: owner; its monitor settings say what is watched.
        optimizer: a `torch.optim.Optimizer`, a wrapper of one, or a framework's own. None: only a model that holds its optimizer (a
            DeepSpeed engine) or reduces its gradients itself (Megatron's DDP) has a source, others give None.
    """
    roots = dict.fromkeys(cls.__module__.partition(".")[0] for thing in (optimizer, *models) for cls in type(thing).__mro__)
    for root in roots:
        finders = [importlib.import_module(OURS[root]).find] if root in OURS else []
        for find in [*finders, *(entry.load() for entry in _load_entry_points() if entry.name == root)]:
            source: ParameterSource | None = find(probe, models, optimizer)
            if source is not None:
                return source
    if optimizer is None:
        return None
    if any(type(module).__name__ == "FullyShardedDataParallel" for model in models for module in model.modules()):
        from msprobe_integrations.torch.parameters.fsdp1 import FlatSource, is_flat

        try:
            if is_flat(models):
                return FlatSource(probe, models, optimizer)
        except MissingNameError:  # has been said; as plain parameters they would be other numbers
            return None
    from msprobe_integrations.torch.parameters.plain import PlainSource

    return PlainSource(probe, models, optimizer)
