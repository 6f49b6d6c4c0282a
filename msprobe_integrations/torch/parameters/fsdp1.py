"""Parameters under FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`): each of the model's own, out of the flat parameters.

A flat parameter is many parameters behind each other, cut into equal parts over the ranks; a cut may go through any of them. With
``use_orig_params=True`` the optimizer holds the original parameters, which are views of this rank's part (empty on ranks that have
nothing of them); else it holds the flat parameter. Both give the same pieces: flat ranges of the original parameters.

A parameter that got no gradient has one of zeros here: FSDP1 reduces its part of the flat gradient with all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from msprobe_engine.core.log import warn_once
from msprobe_integrations.common.monitor.probe import Probe
from msprobe_integrations.common.monitor.targets import matches, plain
from msprobe_integrations.common.parameters.gradients import ACCUMULATED, CLIPPED, LOCAL, Piece, layer_numbers, layer_of
from msprobe_integrations.common.parameters.source import Replicas
from msprobe_integrations.patching import FunctionPatches
from msprobe_integrations.requirements import MissingNameError, need, optional
from msprobe_integrations.torch.monitor.targets import unwrap_model
from msprobe_integrations.torch.parameters.optimizer_states import numbers_of
from msprobe_integrations.torch.parameters.plain import PlainSource

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler

_FSDP = "FullyShardedDataParallel"
_PART = "parameters and gradients of FSDP1 by name"


class Place(NamedTuple):
    """Where one original parameter is.

    Attributes:
        handle: of its flat parameter.
        number: which of its parameters.
        offset, elements: where it is in this rank's part; no elements: nowhere.
        start: its first element in the flat parameter of all ranks.
        state: FSDP1's module.
    """

    handle: Any
    number: int
    offset: int
    elements: int
    start: int
    state: Any

    def own(self, flat: torch.Tensor | None) -> torch.Tensor | None:
        """This rank's elements, out of its part of something as long as the flat parameter."""
        return None if flat is None else flat.detach()[self.offset : self.offset + self.elements]


def flat_handles(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """(path without wrappers, FSDP1's module, handle of its flat parameter); nothing where there is no FSDP1.

    Raises:
        MissingNameError: the handle is called otherwise.
    """
    for path, module in unwrap_model(model).named_modules():
        if type(module).__name__ == _FSDP and (handle := need(module, "_handle", for_=_PART)) is not None:
            yield plain(path), module, handle


def is_flat(models: Sequence[nn.Module]) -> bool:
    """Is there a flat parameter?

    Raises:
        MissingNameError: one without the table that is needed here: pieces would be taken for whole parameters.
    """
    handles = [handle for model in models for _, _, handle in flat_handles(model)]
    return bool([need(need(handle, "flat_param", for_=_PART), "_shard_param_infos", for_=_PART) for handle in handles])


class FlatSource(PlainSource):
    """Implements `ParameterSource`. Parameters that FSDP1 leaves alone are as in `PlainSource`.

    Gradients of single micro batches are not seen: what FSDP1 reduces is the sum since the last reduction.
    """

    def __init__(self, probe: Probe, models: Sequence[nn.Module], optimizer: Any) -> None:
        super().__init__(probe, models, optimizer)
        self._flat_patches, self._clip_patches = FunctionPatches(), FunctionPatches()
        self._reductions: dict[int, int] = {}
        self._at: dict[Piece, Place] = {}
        self._of: dict[int, list[Piece]] = {}
        flat = {id(h.flat_param): None for model in models for _, _, h in flat_handles(model)}
        original = {id(p) for model in models for _, _, h in flat_handles(model) for p in h.flat_param._params or ()}
        self.pieces = [piece for piece in self.pieces if id(piece.parameter) not in flat and id(piece.parameter) not in original]
        own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        for chunk, model in enumerate(models):
            numbers = layer_numbers(list(unwrap_model(model).named_modules()))
            for path, module, handle in flat_handles(model):
                self._add(chunk, path, module, handle, own, numbers)

    def _add(self, chunk: int, path: str, module: Any, handle: Any, own: set[int], numbers: Mapping[str, int]) -> None:
        flat = handle.flat_param
        group = handle.process_group
        ranks = tuple(sorted(dist.get_process_group_ranks(group))) if handle.uses_sharded_strategy else ()
        exchange = self._probe.parameters.exchanges.of(ranks) if len(ranks) > 1 else None
        starts = _starts(flat)
        for index, (fqn, shape, numel) in enumerate(zip(flat._fqns, flat._shapes, flat._numels)):
            parameter = flat if flat._params is None else flat._params[index]
            name = plain(f"{path}.{fqn}" if path else fqn)
            if id(parameter) not in own or not parameter.requires_grad or not matches(name, self._monitor.targets, chunk):
                continue
            layer = layer_of(name, numbers)
            facts: dict[str, Any] = {} if layer is None else {"layer": layer}
            info = flat._shard_param_infos[index]
            lo, count = (info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0)
            if len(ranks) > 1:
                facts["of"] = numel
            piece = Piece(name, parameter, chunk, lo, lo + count, facts, exchange, tuple(shape))
            self.pieces.append(piece)
            self._at[piece] = Place(handle, index, info.offset_in_shard or 0, count, starts[index], module)
            self._of.setdefault(id(flat), []).append(piece)

    # what a piece holds

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """This rank's part of the reduced gradient."""
        place = self._at.get(piece)
        if place is None:
            return super().gradient(piece)
        flat = place.handle.flat_param
        if flat._params is not None and piece.parameter.grad is not None:
            return self._reshape_piece(piece, piece.parameter.grad.detach())
        gradient = place.handle.sharded_grad
        return None if gradient is None else self._reshape_piece(piece, place.own(gradient.view(-1)))

    def value(self, piece: Piece) -> torch.Tensor | None:
        """This rank's part of the parameter."""
        place = self._at.get(piece)
        if place is None:
            return super().value(piece)
        if place.handle.flat_param._params is not None:
            return self._reshape_piece(piece, piece.parameter.detach())
        return self._reshape_piece(piece, place.own(place.handle.flat_param))

    main = value

    def states(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """This rank's part of the states; empty tensors where it has nothing of the parameter."""
        place = self._at.get(piece)
        if place is None:
            return super().states(piece)
        flat = place.handle.flat_param
        state = {name: tensor for name, tensor in numbers_of(self._optimizer, piece.parameter).items() if tensor.dim()}
        if not state and not place.elements:  # the other ranks have these
            other = next((parameter for parameter, held in self._optimizer.state.items() if held), piece.parameter)
            return {name: tensor.detach().reshape(-1)[:0] for name, tensor in numbers_of(self._optimizer, other).items() if tensor.dim()}
        states: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if tensor.shape == piece.parameter.shape:
                part = self._reshape_piece(piece, tensor.detach() if flat._params is not None else place.own(tensor))
                if part is not None:
                    states[name] = part
        return states

    def hyper(self, piece: Piece) -> Mapping[str, Any]:
        """As in `PlainSource`; where this rank has nothing of the parameter its updates are those of the others."""
        place = self._at.get(piece)
        found = super().hyper(piece)
        if place is None or place.elements or piece.parameter in self._optimizer.state:
            return found
        return {**found, "step": self._any_state().get("step", found["step"])}

    def _any_state(self) -> Mapping[str, Any]:
        return next((state for state in self._optimizer.state.values() if state), {})

    def find_replicas(self, piece: Piece) -> Sequence[Replicas]:
        """Ranks of NO_SHARD, and of HYBRID_SHARD across the nodes."""
        place = self._at.get(piece)
        if place is None:
            return super().find_replicas(piece)
        between = optional(place.state, "_inter_node_pg", because="only HYBRID_SHARD has one")
        group = between if piece.sharded and between is not None else None if piece.sharded else place.handle.process_group
        return [] if group is None or dist.get_world_size(group) < 2 else [Replicas("dp", group, True)]

    @staticmethod
    def _reshape_piece(piece: Piece, tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None or piece.sharded else tensor.view(piece.shape)

    # moments

    def connect(self, watch: ParameterSampler) -> None:
        super().connect(watch)
        classes = {type(place.state) for place in self._at.values()}
        for cls in classes:
            self._clip_patches.add(cls, "clip_grad_norm_", self._clip)

    def open(self) -> None:
        """Look at flat gradients before they are reduced."""
        known, self.pieces = self.pieces, [piece for piece in self.pieces if piece not in self._at]
        try:
            super().open()
        finally:
            self.pieces = known
        self._reductions.clear()
        if self._monitor.micro_batch_gradients:
            warn_once("FSDP1 micro batches", "monitor.micro_batch_gradients: not seen under FSDP1, only before each reduction")
        if self._flat_patches or self._watch is None or not self._monitor.unreduced_gradients:
            return
        from torch.distributed.fsdp import _runtime_utils

        for name in ("_reduce_grad", "_reduce_grad_no_shard"):
            with suppress(MissingNameError):
                need(_runtime_utils, name, for_="unreduced gradients of FSDP1")
                self._flat_patches.add(_runtime_utils, name, self._reduce)

    def shut(self) -> None:
        super().shut()
        self._flat_patches.close()

    def close(self) -> None:
        super().close()
        self._clip_patches.close()

    def _reduce(self, following: Callable[..., Any], state: Any, handle: Any, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        if watch is not None and watch.active:
            with watch.guard("monitor.unreduced_gradients"):
                gradient = handle.flat_param.grad
                before = self._reductions.get(id(handle), 0)
                self._reductions[id(handle)] = before + 1
                for piece in self._of.get(id(handle.flat_param), ()) if gradient is not None else ():
                    start, size = self._at[piece].start, _numel(piece)
                    part = gradient.detach().view(-1)[start : start + size].view(piece.shape)
                    # reduced once a step: the sum of all micro batches; every micro batch: the last one's own
                    watch.sample_unreduced(piece, part, LOCAL if before else ACCUMULATED, before or -1)
        return following(state, handle, *args, **kwargs)

    def _clip(self, following: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        is_own = watch is not None and any(place.state is module for place in self._at.values())
        if watch is not None and is_own and watch.active:
            with watch.guard("gradient phases"):
                watch.change_to(CLIPPED)
        result = following(module, *args, **kwargs)
        if watch is not None and is_own:
            with watch.guard("gradient phases"):
                watch.scalar("grad_norm", result)
        return result


def _numel(piece: Piece) -> int:
    size = 1
    for length in piece.shape:
        size *= length
    return size


def _starts(flat: Any) -> list[int]:
    """First element of each original parameter in the flat one; padding may lie between them."""
    starts: list[int] = []
    at = 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask):
        if not padding:
            starts.append(at)
        at += numel
    return starts
