"""The parameter side of the monitor: where a framework keeps gradients, parameters and states, and when they are what they are.

A `ParameterSource` knows one framework: which part of which parameter this rank holds and which moments a step has. `ParameterWatch`
knows the families and takes them at these moments; it is the same for all frameworks. Sources are found from the objects that are
passed, never from what is importable.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from msprobe_integrations.torch.gradients import Piece
    from msprobe_integrations.torch.parameter_watch import ParameterWatch
    from msprobe_integrations.torch.probe import TorchProbe

OURS = {"deepspeed": "msprobe_integrations.deepspeed.source", "megatron": "msprobe_integrations.megatron.source"}
"""Modules with a function `find`, as entry points have it, by root module. Not entry points themselves: with metadata of an older
installation a ZeRO optimizer would pass for an ordinary one, and its shards for parameters."""
GROUP = "msprobe.parameter_sources"
"""Entry points of other packages: name is the root module of the class of an optimizer or model, value a function
``(probe, models, optimizer)`` that gives a `ParameterSource`, or None when the objects are not its framework's after all."""


class Replicas(NamedTuple):
    """Ranks that have to hold the same bits.

    Attributes:
        label: what shares them: ``dp``, ``expert_dp``, ``tp``, ``embedding``.
        group: process group of more than one rank.
        part: of the part that `ParameterSource.value` gives; False: of the whole model parameter, `Piece.parameter`, also where only a
            part of it is this rank's to update.
        late: the whole is there only when the next forward pass has gathered it; after the update it is not.
    """

    label: str
    group: Any
    part: bool = False
    late: bool = False


class ParameterSource(Protocol):
    """One framework's view of the parameters of one optimizer on this rank.

    What `gradient`, `value`, `main` and `states` give is what this rank holds: of a sharded piece its part, else the whole tensor. None
    is "there is none, on no rank", and makes no row; a rank that holds nothing of a piece gives an empty tensor, so that it takes part
    in the merge. They are called only while a step is monitored and may be called often: look up, do not search.
    """

    @property
    def pieces(self) -> Sequence[Piece]:
        """Parameters in an order that is the same on all ranks that share them."""
        ...

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """The gradient of `piece` as it is now, in the phase that the watch was told of last."""
        ...

    def value(self, piece: Piece) -> torch.Tensor | None:
        """The parameter as the model uses it."""
        ...

    def main(self, piece: Piece) -> torch.Tensor | None:
        """What the optimizer updates: an fp32 copy, a shard of it, or the parameter itself."""
        ...

    def states(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """State tensors of the optimizer (``exp_avg``, ...), each with as many elements as `main`; empty before the first update."""
        ...

    def hyper(self, piece: Piece) -> Mapping[str, Any]:
        """The piece's own parameter group without ``params``, and ``algorithm`` (``adam``, ``adamw``, ``sgd``, ``lion``, ``muon``, ...,
        ``""``: unknown) and ``step`` (updates so far, this one included once it is done; a number or a tensor on the host)."""
        ...

    def replicated(self, piece: Piece) -> Sequence[Replicas]:
        """Groups of ranks that hold the same parameter as this rank does."""
        ...

    def connect(self, watch: ParameterWatch) -> None:
        """Put on what is needed as long as the watch lives: the borders of an update. Calls `watch.before_step`, `watch.ready`,
        `watch.after_step`."""
        ...

    def open(self) -> None:
        """A monitored step begins: put on what only such steps need (hooks on single parameters). Called again in the next one."""
        ...

    def shut(self) -> None:
        """The next step is not monitored: take off what `open` put on."""
        ...

    def close(self) -> None:
        """Take everything off."""
        ...


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


def find_source(probe: TorchProbe, models: Sequence[nn.Module], optimizer: Any) -> ParameterSource | None:
    """The source for these objects: that of the framework whose classes they are, else plain torch (DDP and FSDP2 included).

    Args:
        probe: owner; its monitor settings say what is watched.
        models: model chunks.
        optimizer: a `torch.optim.Optimizer`, a wrapper of one, or a framework's own. None: only a model that holds its optimizer (a
            DeepSpeed engine) or reduces its gradients itself (Megatron's DDP) has a source, others give None.
    """
    roots = dict.fromkeys(cls.__module__.partition(".")[0] for thing in (optimizer, *models) for cls in type(thing).__mro__)
    for root in roots:
        finders = [importlib.import_module(OURS[root]).find] if root in OURS else []
        for find in [*finders, *(entry.load() for entry in entry_points(group=GROUP, name=root))]:
            found: ParameterSource | None = find(probe, models, optimizer)
            if found is not None:
                return found
    if optimizer is None:
        return None
    if any(type(module).__name__ == "FullyShardedDataParallel" for model in models for module in model.modules()):
        from msprobe_integrations.torch.parameters_fsdp1 import FlatSource, is_flat

        if is_flat(models):
            return FlatSource(probe, models, optimizer)
    from msprobe_integrations.torch.parameters_plain import PlainSource

    return PlainSource(probe, models, optimizer)
