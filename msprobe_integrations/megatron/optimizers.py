"""Megatron's optimizers: which of them holds a parameter, its fp32 copy (or shard), its gradient and moments.

Holds for FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer and ChainedOptimizer of megatron-core 0.8 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from msprobe_integrations.common.parameters.algorithms import algorithm_of
from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.megatron.layout import is_empty_shard, make_empty_part
from msprobe_integrations.requirements import MissingNameError, need, optional
from msprobe_integrations.torch.parameters.optimizer_states import numbers_of
from msprobe_integrations.torch.tensors import dtensors

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.gradients import Piece


def is_megatron(optimizer: Any) -> bool:
    """True for an optimizer with Megatron's prepare / step protocol, or what a version has left of it."""
    return hasattr(optimizer, "prepare_grads") or hasattr(optimizer, "step_with_ready_grads")


def leaves(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", None)
    return [leaf for part in chained for leaf in leaves(part)] if chained is not None else [optimizer]


class _Copy(NamedTuple):
    """What an inner optimizer updates for a parameter of the model: its own parameter, in which of its groups."""

    inner: Any
    tensor: torch.Tensor
    group: Mapping[str, Any]


class MainParameters:
    """The optimizer's own view of the model's parameters: fp32 copies, shards of them, or the parameters themselves.

    Args:
        pieces: the parameters that are asked for. Of one that this rank holds nothing of, empty tensors are given, with the states and
            settings of a parameter that it holds something of, so that all ranks that share it have the same to say.
    """

    def __init__(self, optimizer: Any, pieces: Sequence[Piece]) -> None:
        self._leaves = [leaf for leaf in leaves(optimizer) if not getattr(leaf, "is_stub_optimizer", False)]
        owner: dict[int, _Copy] = {}
        for leaf in self._leaves:
            inner = getattr(leaf, "optimizer", leaf)
            for group in getattr(inner, "param_groups", ()):
                owner.update((id(parameter), _Copy(inner, parameter, group)) for parameter in group["params"])
        self._wide = {id(model): main for leaf in self._leaves for model, main in _wide(leaf)}
        copies = {piece: self._find(piece.parameter, owner) for piece in pieces}
        held = {piece: copy for piece, copy in copies.items() if copy is not None and _fits(piece, copy.tensor)}
        self._copies = {piece: copy for piece, copy in held.items() if not is_empty_shard(piece)}
        self._examples = {bool(piece.facts.get("expert")): copy for piece, copy in self._copies.items()}

    def main(self, piece: Piece) -> torch.Tensor | None:
        """The fp32 copy (of this rank's part); None when the optimizer does not update it."""
        copy = self._copies.get(piece)
        if copy is not None:
            return _restore_shape(piece, copy.tensor)
        example = self._example(piece)
        return make_empty_part(example.tensor) if example is not None else None

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """The gradient the optimizer is about to use: after `prepare_grads` it exists and is unscaled, after clipping it is clipped."""
        copy = self._copies.get(piece)
        if copy is None:
            return self.main(piece)  # empty, or None
        gradient = getattr(copy.tensor, "decoupled_grad", None)
        gradient = copy.tensor.grad if gradient is None else gradient
        return _restore_shape(piece, gradient) if gradient is not None else None

    def states(self, piece: Piece) -> dict[str, torch.Tensor]:
        """State tensors such as ``exp_avg`` with as many elements as `main`."""
        copy = self._copies.get(piece)
        if copy is not None:
            return {key: _restore_shape(piece, value) for key, value in _tensors(copy).items()}
        example = self._example(piece)
        return {key: make_empty_part(value) for key, value in _tensors(example).items()} if example is not None else {}

    def hyper(self, piece: Piece) -> dict[str, Any]:
        """Settings of the parameter group, ``step`` and ``algorithm``."""
        copy = self._copies.get(piece) or self._example(piece)
        if copy is None:
            return {"algorithm": ""}
        numbers = {key: value for key, value in copy.group.items() if key != "params"}
        step = copy.inner.state.get(copy.tensor, {}).get("step")
        if step is not None:
            numbers["step"] = step
        numbers["algorithm"] = algorithm_of(copy.inner, numbers)
        return numbers

    def _find(self, parameter: torch.Tensor, owner: Mapping[int, _Copy]) -> _Copy | None:
        for leaf in self._leaves:
            index = getattr(leaf, "model_param_group_index_map", None)
            if index is not None and parameter in index:
                number, order = index[parameter]
                group = leaf.optimizer.param_groups[number]
                return _Copy(leaf.optimizer, group["params"][order], group)
        for candidate in (getattr(parameter, "main_param", None), self._wide.get(id(parameter)), parameter):
            if isinstance(candidate, torch.Tensor) and id(candidate) in owner:
                return owner[id(candidate)]
        return None

    def _example(self, piece: Piece) -> _Copy | None:
        return self._examples.get(bool(piece.facts.get("expert"))) if piece.sharded and piece.lo == piece.hi else None


def _wide(leaf: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter of the model, its fp32 copy) of mixed precision without shards; before 0.11 nothing else leads from one to the other."""
    for models, mains in zip(getattr(leaf, "float16_groups", ()), getattr(leaf, "fp32_from_float16_groups", ())):
        yield from zip(models, mains)


def _fits(piece: Piece, tensor: torch.Tensor) -> bool:
    """As many elements as this rank holds of the parameter; anything else would be reported as what it is not."""
    local = dtensors.local_of(tensor, piece.parameter)
    return local is not None and local.numel() == piece.hi - piece.lo


def _tensors(copy: _Copy) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in numbers_of(copy.inner, copy.tensor).items() if tensor.numel() == copy.tensor.numel()}


def _restore_shape(piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    """The distributed optimizer of one rank alone keeps whole parameters, flat. Of a DTensor, this rank's part."""
    if dtensors.is_dtensor(tensor):
        return dtensors.local(tensor).detach()
    return tensor if piece.sharded or tensor.dim() != 1 or piece.parameter.dim() == 1 else tensor.detach().view(piece.shape)


def numbers_of_update(optimizer: Any) -> dict[str, Any]:
    """Learning rate, weight decay and the like, from the first parameter group that has a learning rate on; empty where none has."""
    groups = list(getattr(optimizer, "param_groups", ()))
    first = next((number for number, group in enumerate(groups) if isinstance(group.get("lr"), (int, float))), len(groups))
    return update_numbers(groups[first:])


def loss_scale(optimizer: Any) -> torch.Tensor | None:
    """The loss scale, as the tensor it is kept in; None when losses are not scaled."""
    for leaf in leaves(optimizer):
        scaler = getattr(leaf, "grad_scaler", None)
        if scaler is not None:
            scale = scaler.scale
            return scale if isinstance(scale, torch.Tensor) else torch.tensor(float(scale))
    return None


def gathers_late(chunks: Sequence[Any], optimizer: Any) -> bool | None:
    """Do parameters get their new values in the next forward pass? Settings of the chunks say so, until 0.8 those of the optimizer. None
    where neither knows such a setting: then no ranks may be held against each other."""
    ask = "replica check of Megatron's parameters"
    try:
        of_chunks = [need(need(c, "ddp_config", for_=ask), "overlap_param_gather", for_=ask) for c in chunks if hasattr(c, "bucket_groups")]
    except MissingNameError:  # said
        return None
    older = [optional(leaf, "config", because="only Megatron's own have one") for leaf in leaves(optimizer)]
    older += [optional(chunk, "ddp_config", because="only Megatron's wrapper has one") for chunk in chunks]
    return any(of_chunks) or any(
        optional(config, "overlap_param_gather", False, because="since 0.9 in that of the chunks") for config in older
    )


def clips(optimizer: Any) -> bool:
    """True when some part of the optimizer clips gradients."""
    return any(float(getattr(getattr(leaf, "config", None), "clip_grad", 0.0) or 0.0) > 0 for leaf in leaves(optimizer))
