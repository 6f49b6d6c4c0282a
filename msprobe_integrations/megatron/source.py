"""Gradients, parameters and states of a Megatron step as a source of the monitor's parameter side.

===========  ====================  ===============================================================================
phase        family                when, and of what
===========  ====================  ===============================================================================
local        grad_unreduced        one micro batch's gradient, as autograd made it (before it goes into the buffer)
accumulated  grad_unreduced        sum over micro batches, before the reduction and before its 1 / DP scaling
reduced      grad_reduced          entry of `optimizer.step`: after `finalize_model_grads` (data parallel, sequence parallel,
                                   tied embeddings, tokens); still carries the loss scale
unscaled     grad_reduced          the optimizer's fp32 copies after `prepare_grads`
clipped      grad_reduced          the same just before the inner step
===========  ====================  ===============================================================================

With fused gradient accumulation (`gradient_accumulation_fusion`) no micro-batch gradient exists on its own: the buffer is sampled
instead, as ``accumulated`` with the number of the micro batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from msprobe_integrations.common.parameters.gradients import ACCUMULATED, CLIPPED, LOCAL, UNSCALED, Piece
from msprobe_integrations.common.parameters.source import Replicas
from msprobe_integrations.megatron.layout import REDUCED, Layout, as_list, bucket_groups, buckets_of
from msprobe_integrations.megatron.optimizers import MainParameters, clips, gathers_late, is_megatron, loss_scale, numbers_of_update
from msprobe_integrations.megatron.replicas import replicas
from msprobe_integrations.requirements import MissingNameError, need
from msprobe_integrations.torch.hooks.methods import MethodHooks
from msprobe_integrations.torch.tensors import dtensors

if TYPE_CHECKING:
    from msprobe_integrations.common.parameters.parameter_sampler import ParameterSampler
    from msprobe_integrations.torch.monitor.probe import TorchProbe

PART = "parameter monitor"
"""What a fault in one of the hooks switches off."""


def find(probe: TorchProbe, models: Sequence[Any], optimizer: Any) -> MegatronSource | None:
    """A source for a Megatron optimizer (or none) and its DDP-wrapped model chunks; None with an ordinary torch optimizer.

    Building it is a collective call where parameters are sharded.
    """
    return None if optimizer is not None and not is_megatron(optimizer) else MegatronSource(probe, as_list(models), optimizer)


class MegatronSource:
    """Implements `ParameterSource`. Hooks are put on buckets, parameters and optimizers of this rank; no class is patched.

    Args:
        probe: its monitor settings say what is watched.
        chunks: DDP-wrapped model chunks, one per virtual pipeline stage.
        optimizer: a Megatron optimizer, or None.
    """

    def __init__(self, probe: TorchProbe, chunks: Sequence[Any], optimizer: Any) -> None:
        assert probe.monitor is not None
        self._monitor = probe.monitor
        self.layout = Layout(chunks, probe.monitor, probe.parameters.exchanges)
        self.pieces: Sequence[Piece] = self.layout.pieces
        self._optimizer = optimizer
        self._main = MainParameters(optimizer, self.pieces) if optimizer is not None else None
        self._gathers_late = gathers_late(chunks, optimizer)
        self._prepared = False
        self._started: set[int] = set()
        self._passes: dict[Piece, int] = {}
        self._watch: ParameterSampler | None = None
        self._lasting = MethodHooks(probe.faults, PART)
        self._open = MethodHooks(probe.faults, PART)

    # what a piece holds

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """Until `prepare_grads` the reduced gradient in the bucket, then the optimizer's copy."""
        if not self._prepared or self._main is None:
            return self.layout.read_reduced(piece)
        return self._main.gradient(piece)

    def value(self, piece: Piece) -> torch.Tensor | None:
        """The parameter. With overlapped parameter gathering only this rank's part has its new value after a step, so of a piece whose
        optimizer is sharded the part is what is given."""
        local = dtensors.local_of(piece.parameter, piece.parameter)
        return local if dtensors.is_dtensor(piece.parameter) else piece.part(piece.parameter)

    def main(self, piece: Piece) -> torch.Tensor | None:
        """The fp32 copy, its shard, or the parameter itself."""
        return self._main.main(piece) if self._main is not None else None

    def states(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        """State tensors of what the optimizer updates."""
        return self._main.states(piece) if self._main is not None else {}

    def hyper(self, piece: Piece) -> Mapping[str, Any]:
        """Settings of the parameter group, ``step`` and ``algorithm``."""
        return self._main.hyper(piece) if self._main is not None else {"algorithm": ""}

    def find_replicas(self, piece: Piece) -> Sequence[Replicas]:
        """Ranks that hold the same parameter. With overlapped gathering the forward pass has to come first."""
        if self.layout.is_unknown(piece) or self._gathers_late is None:
            return ()
        groups = replicas(piece.parameter, self.layout.members(piece))
        if dtensors.is_dtensor(piece.parameter):  # data-parallel ranks hold the same along dimensions of its mesh only
            meshes = [Replicas(name, group, part=True) for name, group in dtensors.replicating_groups(piece.parameter)]
            return [*meshes, *(each._replace(part=True) for each in groups if each.label not in ("dp", "expert_dp"))]
        return [each._replace(late=True) for each in groups] if piece.sharded and self._gathers_late else groups

    # moments

    def connect(self, watch: ParameterSampler) -> None:
        """Follow the updates."""
        self._watch = watch
        optimizer = self._optimizer
        if optimizer is None:
            return
        limit = clips(optimizer)
        self._lasting.before(optimizer, "step", lambda *_, **__: self._enter(watch))
        self._lasting.after(optimizer, "step", lambda result: self._leave(watch, result))
        if hasattr(optimizer, "prepare_grads"):
            self._lasting.after(optimizer, "prepare_grads", lambda _: self._are_prepared(watch, limit))
        if hasattr(optimizer, "step_with_ready_grads"):
            self._lasting.before(optimizer, "step_with_ready_grads", lambda *_, **__: watch.ready())
            self._lasting.after(optimizer, "step_with_ready_grads", lambda _: watch.sample_updates())

    def open(self) -> None:
        """Hooks for gradients before the reduction; their counts begin anew."""
        self._started.clear()
        self._passes.clear()
        watch = self._watch
        if self._open or watch is None:
            return
        if self._monitor.unreduced_gradients:
            for group, pieces in self._groups():
                self._open.before(group, "start_grad_sync", functools.partial(self._sample_accumulated, watch, group, pieces))
        if self._monitor.micro_batch_gradients:
            for piece in self.pieces:
                hook = self._open.guard_hook(self._local(piece, watch))
                self._open.on_undo(piece.parameter.register_post_accumulate_grad_hook(hook).remove)

    def _groups(self) -> list[tuple[Any, list[Piece]]]:
        """What is reduced together, and its pieces; nothing where this version does not say, which is said."""
        groups: list[tuple[Any, list[Piece]]] = []
        try:
            for group in (group for chunk in self.layout.chunks for group in bucket_groups(chunk)):
                need(group, "start_grad_sync", for_="gradients of Megatron before the reduction")
                inside = {parameter for bucket in buckets_of(group) for parameter in need(bucket, "params", for_=REDUCED)}
                groups.append((group, [piece for piece in self.pieces if piece.parameter in inside]))
        except MissingNameError:
            return []
        return groups

    def shut(self) -> None:
        self._open.undo()

    def close(self) -> None:
        self._open.undo()
        self._lasting.undo()
        self._watch = None

    def exchange(self, counts: Any = None) -> Any:
        """A step runs again: count its passes anew. Given what this call returned, go on with that."""
        old = self._started, self._passes
        self._started, self._passes = counts or (set(), {})
        return old

    # in them

    def _enter(self, watch: ParameterSampler) -> None:
        self._prepared = False
        scale = loss_scale(self._optimizer)
        for name, value in {**({} if scale is None else {"loss_scale": scale}), **numbers_of_update(self._optimizer)}.items():
            watch.scalar(name, value)
        watch.before_step()
        if hasattr(self._optimizer, "prepare_grads"):
            watch.change_to(UNSCALED)

    def _are_prepared(self, watch: ParameterSampler, limit: bool) -> None:
        self._prepared = True
        watch.change_to(CLIPPED if limit else UNSCALED)

    def _leave(self, watch: ParameterSampler, result: Any) -> None:
        if isinstance(result, tuple) and len(result) > 1 and result[1] is not None and clips(self._optimizer):  # else 0, or nothing
            watch.scalar("grad_norm", result[1])
        watch.after_step(skipped=isinstance(result, tuple) and len(result) > 0 and not result[0])
        self._prepared = False

    def _sample_accumulated(self, watch: ParameterSampler, group: Any, pieces: Sequence[Piece], *_: Any, **__: Any) -> None:
        if id(group) in self._started:
            return
        self._started.add(id(group))  # a step may start a group's reduction again to drain it
        for piece in pieces:
            gradient = self.layout.local(piece)
            if gradient is not None:
                watch.sample_unreduced(piece, gradient, phase=ACCUMULATED)

    def _local(self, piece: Piece, watch: ParameterSampler) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            # counted here: under pipeline parallelism the backward pass of a micro batch runs while a later one is the present one
            number = self._passes[piece] = self._passes.get(piece, -1) + 1
            fused = getattr(parameter, "grad_added_to_main_grad", False)
            gradient = self.layout.local(piece) if fused else parameter.grad
            if fused and gradient is not None and getattr(parameter, "zero_out_wgrad", False) and parameter.grad is not None:
                gradient = gradient + parameter.grad  # tied embeddings: Megatron adds what is not fused right after this
            if gradient is not None:
                watch.micro_gradient(piece, gradient, phase=ACCUMULATED if fused else LOCAL, micro_step=number)

        return hook
