"""DeepSpeed's engine and optimizers as a source of the monitor's parameter side.

===========  ==============  ======================================================================================================
phase        family          when, and of what
===========  ==============  ======================================================================================================
local        grad_unreduced  one micro batch's gradient of this rank, as autograd made it: of the loss divided by the accumulation
                             steps and times the loss scale
accumulated  grad_unreduced  their sum on this rank just before the reduction: stage 0, ZeRO 1 and BF16_Optimizer. ZeRO 2 and 3 reduce
                             every micro batch, such a sum exists nowhere: what is taken is the last micro batch's (``local``)
reduced      grad_reduced    entry of the update: mean over the data-parallel ranks, summed over micro batches, still loss-scaled
unscaled     grad_reduced    as the inner optimizer gets it, when DeepSpeed clips nothing
clipped      grad_reduced    as the inner optimizer gets it, when DeepSpeed clips (it unscales and clips in one multiplication)
===========  ==============  ======================================================================================================

A step is an update: `engine.step()` at the accumulation boundary, skipped ones included. Nothing is gathered, nothing waits, and no
hook sees more of a ZeRO 3 parameter than DeepSpeed has there by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from msprobe_integrations.common.monitor.targets import matches
from msprobe_integrations.common.parameters.algorithms import algorithm_of
from msprobe_integrations.common.parameters.gradients import ACCUMULATED, CLIPPED, LOCAL, UNSCALED, Piece, layer_numbers, layer_of
from msprobe_integrations.common.parameters.optimizer_numbers import update_numbers
from msprobe_integrations.common.parameters.source import Replicas
from msprobe_integrations.deepspeed import reliance
from msprobe_integrations.deepspeed.parallel_layout import rank_info
from msprobe_integrations.deepspeed.replicas import is_cut, is_expert, replicas
from msprobe_integrations.deepspeed.shards import Shards, Zero3Shards, ZeroShards, kind_of
from msprobe_integrations.requirements import MissingNameError, need
from msprobe_integrations.torch.hooks.methods import MethodHooks
from msprobe_integrations.torch.parameters.find import Engine

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler
    from msprobe_integrations.torch.monitor.probe import TorchProbe

PART = "parameter monitor"
"""What a fault in one of the hooks switches off."""


def find(probe: TorchProbe, models: Sequence[nn.Module], optimizer: Any) -> DeepSpeedSource | None:
    """A source for a DeepSpeed engine among the models, or for an optimizer that `deepspeed.initialize` returned; None when neither is
    there (`DeepSpeedCPUAdam` used on its own is an ordinary torch optimizer).

    Building it is a collective call where parameters are sharded.
    """
    engine: Any = next((m for m in models if is_engine(m)), None)
    inner = optimizer if engine is None else getattr(engine, "optimizer", None)
    while engine is None and inner is not None and kind_of(inner) is Shards:
        inner = getattr(inner, "optimizer", None)  # wrappers of launchers
    if inner is None or not hasattr(inner, "param_groups"):
        return None  # not DeepSpeed's, or an engine without an optimizer (inference)
    kind = kind_of(inner)
    if reliance.unknown(inner) if kind is Shards else not reliance.usable(kind.kind, inner):
        return None
    try:
        return DeepSpeedSource(probe, engine, inner, models[0] if engine is None else engine.module)
    except MissingNameError:  # has been said
        return None


def is_engine(model: Any) -> bool:
    """Is this a DeepSpeed engine, of whatever class and version?"""
    return hasattr(model, "_take_model_step") or any(c.__name__ == "DeepSpeedEngine" for c in type(model).__mro__)


def engine_parts(model: Any) -> Engine | None:
    """A DeepSpeed engine as a model with its optimizer; None when `model` is none."""
    return parts_of(model) if is_engine(model) else None


def parts_of(engine: Any) -> Engine:
    """As `engine_parts`, of what is known to be an engine. Modules have their names in the user's model."""
    optimizer = getattr(engine, "optimizer", None)
    return Engine(engine.module, optimizer, lambda probe, _, optimizer: find(probe, [engine], optimizer), rank_info(engine))


class DeepSpeedSource:
    """Implements `ParameterSource`.

    Args:
        probe: owner; its monitor settings say what is watched.
        engine: the engine; None when only its optimizer is known (then stage 0 and BF16_Optimizer have no ``accumulated`` gradients).
        optimizer: `engine.optimizer`.
        model: names come from its `named_parameters`.
    """

    def __init__(self, probe: TorchProbe, engine: Any, optimizer: Any, model: nn.Module) -> None:
        assert probe.monitor is not None
        self._monitor = probe.monitor
        self._probe = probe
        self._engine = engine
        self._optimizer = optimizer
        self._shards = kind_of(optimizer)(optimizer)
        self._stepping = False
        self._stepped = False
        self._knows_clipping = True
        self._passes: dict[Piece, int] = {}
        self._watch: ParameterSampler | None = None
        self._lasting = MethodHooks(probe.faults, PART)
        self._open = MethodHooks(probe.faults, PART)
        numbers = layer_numbers(list(model.named_modules()))
        chosen = [(n, p) for n, p in model.named_parameters() if p in self._shards.fragments and matches(n, self._monitor.targets)]
        ranks = {p: self._ranks(p) for _, p in chosen}
        exchanges = {key: probe.parameters.exchanges.of(key) for key in sorted({r for r in ranks.values() if r})}
        self.pieces: list[Piece] = [self._piece(n, p, layer_of(n, numbers), exchanges.get(ranks[p])) for n, p in chosen]
        self._of = {piece.parameter: piece for piece in self.pieces}
        self._by_buffer: dict[int, list[Piece]] = {}

    # what a piece holds

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """Inside of the inner optimizer's step what that optimizer uses, else the reduced gradient."""
        return self._shards.read_stepping(piece.parameter) if self._stepping else self._shards.read_reduced(piece.parameter)

    def value(self, piece: Piece) -> torch.Tensor | None:
        """The parameter in the model's dtype; under ZeRO 3 this rank's partition of it."""
        return self._shards.value(piece.parameter)

    def main(self, piece: Piece) -> torch.Tensor | None:
        """The master copy, or the part of it that this rank updates."""
        return self._shards.main(piece.parameter)

    def states(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """Optimizer states of that part."""
        return self._shards.states(piece.parameter)

    def hyper(self, piece: Piece) -> Mapping[str, Any]:
        """Settings of the piece's parameter group, ``step`` and ``algorithm``."""
        numbers = self._shards.hyper(piece.parameter)
        return {**numbers, "algorithm": algorithm_of(self._shards.inner, numbers)}

    def find_replicas(self, piece: Piece) -> Sequence[Replicas]:
        """Ranks that hold the same parameter."""
        shards = self._shards
        return replicas(piece.parameter, self._engine, shards.members(piece.parameter), isinstance(shards, Zero3Shards))

    # moments

    def connect(self, watch: ParameterSampler) -> None:
        """Follow the updates."""
        self._watch = watch
        try:
            self._clips()
        except MissingNameError:  # then those of the inner optimizer are left out: clipped ones would be called unscaled
            self._knows_clipping, watch.entry_only = False, True
        whole = hasattr(self._engine, "_take_model_step")  # with DeepSpeed's own clipping in stage 0
        owner, name = (self._engine, "_take_model_step") if whole else (self._optimizer, "step")
        self._lasting.before(owner, name, lambda *_, **__: self._enter(watch))
        self._lasting.after(owner, name, lambda _: self._leave(watch))
        ready = self._lasting.guard_hook(lambda inner, *_: self._around(inner, watch.ready))
        updated = self._lasting.guard_hook(lambda inner, *_: self._around(inner, watch.sample_updates))
        for inner in self._shards.inners():
            if hasattr(inner, "register_step_pre_hook"):
                self._lasting.on_undo(inner.register_step_pre_hook(ready).remove)
                self._lasting.on_undo(inner.register_step_post_hook(updated).remove)

    def open(self) -> None:
        """Hooks for gradients before the reduction."""
        self._passes.clear()
        watch = self._watch
        if self._open or watch is None or not (self._monitor.micro_batch_gradients or self._monitor.unreduced_gradients):
            return
        every_pass, knows_sums = isinstance(self._shards, Zero3Shards), True
        if isinstance(self._shards, ZeroShards):
            try:
                every_pass = bool(need(self._optimizer, "partition_gradients", for_="gradients before the reduction under ZeRO 1 and 2"))
            except MissingNameError:
                knows_sums = False  # a gradient before a reduction is a sum, or that of one micro batch
        if self._monitor.micro_batch_gradients or every_pass:
            for piece in self.pieces:
                self._open.on_undo(piece.parameter.register_hook(self._open.guard_hook(self._local(piece, watch, every_pass))).remove)
        if every_pass or not knows_sums or not self._monitor.unreduced_gradients:
            return
        if isinstance(self._shards, ZeroShards):
            if hasattr(self._optimizer, "reduce_ready_partitions_and_remove_grads"):
                self._open.before(self._optimizer, "reduce_ready_partitions_and_remove_grads", lambda p, *_: self._whole(p, watch))
        elif hasattr(self._engine, "buffered_allreduce_fallback"):
            self._open.before(self._engine, "buffered_allreduce_fallback", lambda *_, **__: self._all_whole(watch))

    def shut(self) -> None:
        self._open.undo()

    def close(self) -> None:
        self._open.undo()
        self._lasting.undo()
        self._watch = None

    # in them

    def _enter(self, watch: ParameterSampler) -> None:
        self._stepped = False
        scale = getattr(self._optimizer, "loss_scale", None)
        if isinstance(scale, (int, float)):
            watch.scalar("loss_scale", float(scale))
        for name, value in update_numbers(self._optimizer.param_groups).items():
            watch.scalar(name, value)
        watch.before_step()
        if self._knows_clipping:
            watch.change_to(CLIPPED if self._clips() else UNSCALED)

    def _leave(self, watch: ParameterSampler) -> None:
        norm = getattr(self._engine if self._engine is not None else self._optimizer, "_global_grad_norm", None)
        if norm is not None:
            watch.scalar("grad_norm", norm)
        overflow = getattr(self._optimizer, "overflow", None)
        watch.after_step(skipped=bool(overflow) if overflow is not None else not self._stepped)

    def _around(self, inner: Any, take: Callable[[Sequence[Piece]], None]) -> None:
        """Before or after the inner optimizer steps on some of the buffers (ZeRO gives it one at a time)."""
        self._stepped = True
        self._stepping = True
        try:
            take(self._pieces_in([p for group in inner.param_groups for p in group["params"]]))
        finally:
            self._stepping = False

    def _pieces_in(self, buffers: Sequence[torch.Tensor]) -> list[Piece]:
        if not self._by_buffer:
            for piece in self.pieces:
                buffer = self._shards.buffer(piece.parameter)
                if buffer is not None:
                    self._by_buffer.setdefault(id(buffer), []).append(piece)
        return [piece for buffer in buffers for piece in self._by_buffer.get(id(buffer), ())]

    def _local(self, piece: Piece, watch: ParameterSampler, every_pass: bool) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            number = self._passes[piece] = self._passes.get(piece, -1) + 1
            watch.micro_gradient(piece, gradient, phase=LOCAL, micro_step=number)
            if every_pass and not self._monitor.micro_batch_gradients:  # else it is there already
                watch.sample_unreduced(piece, gradient, phase=LOCAL, micro_step=number)

        return hook

    def _whole(self, parameter: torch.Tensor, watch: ParameterSampler) -> None:
        piece = self._of.get(parameter)
        last = getattr(self._optimizer, "is_gradient_accumulation_boundary", None)
        gradient = self._shards.read_unreduced(parameter) if piece is not None and last is not None and last() else None
        if piece is not None and gradient is not None:
            watch.sample_unreduced(piece, gradient, phase=ACCUMULATED)

    def _all_whole(self, watch: ParameterSampler) -> None:
        for piece in self.pieces:
            gradient = self._shards.read_unreduced(piece.parameter)
            if gradient is not None:
                watch.sample_unreduced(piece, gradient, phase=ACCUMULATED)

    # building

    def _ranks(self, parameter: torch.Tensor) -> tuple[int, ...]:
        members = self._shards.members(parameter)
        ranks = () if members is None else tuple(dist.get_process_group_ranks(members))
        return ranks if len(ranks) > 1 else ()

    def _piece(self, name: str, parameter: torch.Tensor, layer: int | None, exchange: Any) -> Piece:
        facts: dict[str, Any] = {}
        if layer is not None:
            facts["layer"] = layer
        if is_cut(parameter):
            facts["tensor_parallel"] = "shard"
        if is_expert(parameter):
            facts["expert"] = True
        fragment, numel = self._shards.fragments[parameter], self._shards.numel(parameter)
        shape = tuple(parameter.ds_shape if isinstance(self._shards, Zero3Shards) else parameter.shape)  # type: ignore[attr-defined]
        if not self._ranks(parameter):
            return Piece(name, parameter, 0, 0, numel, facts, None, shape)
        facts["of"] = numel
        return Piece(name, parameter, 0, fragment.lo, fragment.hi, facts, exchange, shape)

    def _clips(self) -> bool:
        for_ = "difference made between clipped and unclipped gradients"
        clipping = (
            need(self._optimizer, "clip_grad", for_=for_) if self._engine is None else need(self._engine, "gradient_clipping", for_=for_)
        )
        return float((clipping() if callable(clipping) else clipping) or 0.0) > 0
