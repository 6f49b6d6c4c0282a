"""Gradients of FSDP2 before the reduction: they belong to the unsharded parameters and are gone with the reduce-scatter.

FSDP2 keeps them out of sight of hooks on parameters, so two functions of it are looked through, in monitored steps only: what hands a
group's gradients to the reduction, and what ends a group's backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from msprobe_integrations.common.parameters.gradients import ACCUMULATED, LOCAL, Piece
from msprobe_integrations.patching import FunctionPatches
from msprobe_integrations.requirements import MissingNameError, need
from msprobe_integrations.torch.tensors.dtensors import is_dtensor, local

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler

_PART = "unreduced gradients and those of micro batches under FSDP2"


class UnshardedGradients:
    """Of the FSDP2 modules among `models`; does nothing when there are none.

    Args:
        pieces: parameter (a DTensor) to piece.

    Attributes:
        covered: parameters whose gradients are found here, if they are; those that a hook on the parameter sees are reduced ones.
    """

    def __init__(self, models: Sequence[nn.Module], pieces: Mapping[torch.Tensor, Piece]) -> None:
        self._pieces = pieces
        try:
            groups = [group for model in models for module in model.modules() for group in _groups(module)]
            parameters = [need(fp, "sharded_param", for_=_PART) for group in groups for fp in need(group, "fsdp_params", for_=_PART)]
        except MissingNameError:
            groups, parameters = [], [p for p in pieces if is_dtensor(p)]
        self._classes = {type(group) for group in groups}
        self.covered = {parameter for parameter in parameters if parameter in pieces}
        self._watch: ParameterSampler | None = None
        self._patches = FunctionPatches()
        self._reductions: dict[Piece, int] = {}
        self._kept: set[Piece] = set()
        self._micro = False

    def open(self, watch: ParameterSampler, *, unreduced: bool, micro: bool) -> None:
        """A monitored step begins."""
        self._reductions.clear()
        self._kept.clear()
        if self._patches:
            return
        self._watch, self._micro = watch, micro
        for cls in self._classes:
            if unreduced:
                self._look_through(sys.modules[cls.__module__], "foreach_reduce", self._reduce)
            if micro:
                self._look_through(cls, "post_backward", self._post_backward)

    def _look_through(self, owner: Any, name: str, handler: Any) -> None:
        with suppress(MissingNameError):
            need(owner, name, for_=_PART)
            self._patches.add(owner, name, handler)

    def close(self) -> None:
        self._patches.close()

    def _reduce(
        self, following: Any, fsdp_params: Sequence[Any], unsharded_grads: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        if (watch := self._watch) is not None and watch.active:
            with watch.guard("monitor.unreduced_gradients"):
                for fsdp_param, gradient in zip(fsdp_params, unsharded_grads):
                    piece = self._pieces.get(fsdp_param.sharded_param)
                    if piece is not None:
                        before = self._reductions.get(piece, 0)
                        self._reductions[piece] = before + 1
                        # reduced once a step: the sum of all micro batches; every micro batch: the last one's own
                        if before and self._micro:  # which is there already
                            watch.no_sum(piece)
                        else:
                            watch.sample_unreduced(piece, gradient, LOCAL if before else ACCUMULATED, before or -1)
        return following(fsdp_params, unsharded_grads, *args, **kwargs)

    def _post_backward(self, following: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        sharded: list[tuple[Any, Piece]] = []
        if (watch := self._watch) is not None and watch.active:
            with watch.guard("monitor.micro_batch_gradients"):
                for fsdp_param in group.fsdp_params:
                    piece = self._pieces.get(fsdp_param.sharded_param)
                    gradient = _gradient(fsdp_param)
                    if piece is None or gradient is None:
                        continue
                    sharded.append((fsdp_param, piece))
                    # without a reduction, and with one dtype, autograd adds to what is there: no gradient of this micro batch exists
                    watch.micro_gradient(piece, gradient, ACCUMULATED if piece in self._kept else LOCAL)
        result = following(group, *args, **kwargs)
        for fsdp_param, piece in sharded:
            if _gradient(fsdp_param) is None:
                self._kept.discard(piece)
            else:
                self._kept.add(piece)
        return result


def _gradient(fsdp_param: Any) -> torch.Tensor | None:
    """What autograd has left on the unsharded parameter."""
    gradient = need(fsdp_param, "_unsharded_param", for_=_PART).grad
    return None if gradient is None else local(gradient)


def _groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups of a module: one until torch 2.10, then a list."""
    if not any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
        return []
    groups = need(need(module, "_get_fsdp_state", for_=_PART)(), "_fsdp_param_groups", "_fsdp_param_group", for_=_PART)
    return [group for group in (groups if isinstance(groups, (list, tuple)) else [groups]) if group is not None]
