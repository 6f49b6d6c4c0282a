"""Which modules an optimizer trains, found from the first call of one of them; and which of several optimizers count."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from msprobe_engine.core.log import current_rank, warn_once


def parameters_of(optimizers: Iterable[Any], models: Iterable[nn.Module] = ()) -> dict[int, int]:
    """``id`` of each parameter that the optimizers hold, with its position among them all; also of those of `models` that they hold float32
    copies of."""
    ids: list[int] = []
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        ids += [id(p) for p in held]
        ids += [id(p) for model in models for p in _find_copied_parameters(held, model)]
    return {key: at for at, key in enumerate(dict.fromkeys(ids))}


def _find_copied_parameters(held: Sequence[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """The parameters of a model in 16 bits, where an optimizer holds a float32 copy of each that is in no module: the program casts them
    back after every update."""
    short: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.element_size() == 2]
    copies = Counter(p.shape for p in held if p.dtype == torch.float32)
    alike = bool(short) and copies.total() == len(held) and copies == Counter(p.shape for p in short)
    ids = {id(p) for p in held} if alike else set()
    return short if alike and not _holders(ids, dict.fromkeys(ids, 0)) else []


def trains(module: nn.Module, held: Iterable[int] | dict[int, int]) -> bool:
    """Has the module one of these parameters?"""
    return any(id(p) in held for p in module.parameters())


def chosen_optimizers(optimizers: Sequence[Any], models: Sequence[nn.Module], preferred: Sequence[Any] = ()) -> list[Any]:
    """The optimizers that train `models`, each parameter by one of them, in the order they were made.

    Where several hold the same parameters: the one that updated last (`preferred`, the latest first), else the one with the most
    (a wrapper that has an optimizer inside), else the newest.
    """
    known = {id(p) for model in models for p in model.parameters()}
    held = {id(o): parameters_of([o], models).keys() & known for o in optimizers}
    order = {id(o): place for place, o in enumerate(preferred)}
    candidates = sorted(
        (place for place, o in enumerate(optimizers) if held[id(o)]),
        key=lambda place: (order.get(id(optimizers[place]), len(order)), -len(held[id(optimizers[place])]), -place),
    )
    taken: set[int] = set()
    chosen: list[int] = []
    for place in candidates:
        own = held[id(optimizers[place])]
        if taken.isdisjoint(own):
            taken |= own
            chosen.append(place)
    return [optimizers[place] for place in sorted(chosen)]


def chosen_models(entries: Sequence[nn.Module], held: dict[int, int]) -> list[nn.Module]:
    """The models that the parameters `held` (see `parameters_of`) belong to, in their order.

    Those that were called (`entries`) count; for parameters that are in none of them, the outermost module whose trainable parameters
    are all held: a model whose parts are called one by one, the other model of a GAN. Looks through the objects of the process once,
    and only where that is needed.
    """
    models = _outermost(list(entries))
    left = held.keys() - {id(p) for model in models for p in model.parameters()}
    if left:
        models = _outermost([*models, *_holders(left, held)])
    place = {id(model): min((held[id(p)] for p in model.parameters() if id(p) in held), default=len(held)) for model in models}
    return sorted(models, key=lambda model: place[id(model)])


def _holders(left: set[int], held: dict[int, int]) -> list[nn.Module]:
    """Modules with parameters of `left`, whole ones first."""
    own: dict[int, bool] = {}
    holders: list[nn.Module] = []
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module) or "_parameters" not in thing.__dict__:
            continue
        parameters = list(thing.parameters())
        if any(id(p) in left for p in parameters):
            own[id(thing)] = all(id(p) in held for p in parameters if p.requires_grad)
            holders.append(thing)
    whole = _outermost([module for module in holders if own[id(module)]])
    covered = {id(p) for module in whole for p in module.parameters()}
    direct = [m for m in holders if any(id(p) in left and id(p) not in covered for p in m._parameters.values() if p is not None)]
    return [*whole, *direct]


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Without those that are inside of another one; each once."""
    inside: set[int] = set()
    for module in modules:
        inside.update(id(child) for child in module.modules() if child is not module)
    return list({id(m): m for m in modules if id(m) not in inside}.values())


def say_not_watched(model: str) -> None:
    """An optimizer updates a model that has only been called in evaluation mode: while the training runs, not at its end alone."""
    if not current_rank():
        warn_once(
            "evaluation",
            f"an optimizer updates {model}, which was only called in evaluation mode so far (as from_pretrained and model.eval() leave a "
            "model): nothing is watched. Call model.train() before the loop; if it is to stay in this mode, name the steps with TorchProbe",
        )
