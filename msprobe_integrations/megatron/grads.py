"""Samples of gradients, parameters and moments in a Megatron step, each with its phase.

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from msprobe_integrations.megatron.layout import Layout, bucket_groups
from msprobe_integrations.megatron.optimizers import MainParameters, clips
from msprobe_integrations.torch.gradients import ACCUMULATED, CLIPPED, LOCAL, REDUCED, UNSCALED, Piece, Pieces

if TYPE_CHECKING:
    from msprobe_integrations.torch.probe import TorchProbe

_UNREDUCED, _MICRO, _REDUCED = "monitor.unreduced_gradients", "monitor.micro_batch_gradients", "monitor.gradients"
_PARAMETERS, _STATES = "monitor.parameters", "monitor.optimizer_states"


class ParameterWatch:
    """Hooks on buckets, parameters and optimizers of this rank; nothing is patched on a class.

    Args:
        probe: its monitor settings say what is watched.
        layout: parameters of this rank.
        optimizer: a Megatron optimizer, or None.
    """

    def __init__(self, probe: TorchProbe, layout: Layout, optimizer: Any) -> None:
        self._probe = probe
        self._layout = layout
        self._pieces = Pieces(probe)
        self._main = MainParameters(optimizer) if optimizer is not None else None
        self._undo: list[Callable[[], None]] = []
        self._started: set[int] = set()
        self._passes: dict[torch.Tensor, int] = {}
        monitor = probe.monitor
        assert monitor is not None
        self._by_bucket = [(bucket, [p for p in layout.pieces if p.parameter in bucket.params]) for bucket in self._buckets()]
        if monitor.unreduced_gradients:
            self._watch_buckets()
        if monitor.micro_batch_gradients:
            for piece in layout.pieces:
                handle = piece.parameter.register_post_accumulate_grad_hook(self._local_hook(piece))
                self._undo.append(handle.remove)
        phases = set(monitor.gradient_phases)
        self._reduced = REDUCED in phases
        if optimizer is not None:
            if UNSCALED in phases:
                self._after(optimizer, "prepare_grads", lambda: self._optimizer_gradients(UNSCALED))
            if CLIPPED in phases and clips(optimizer):
                self._before(optimizer, "step_with_ready_grads", lambda: self._optimizer_gradients(CLIPPED))

    def before_step(self) -> None:
        """Entry of `optimizer.step`."""
        if self._reduced and self._probe.wanted(_REDUCED):
            with self._probe.guard(_REDUCED), torch.no_grad():
                for piece in self._layout.pieces:
                    self._pieces.take("grad_reduced", piece, self._layout.reduced(piece), phase=REDUCED, part=True)
        if self._probe.wanted(_PARAMETERS):
            with self._probe.guard(_PARAMETERS), torch.no_grad():
                for piece in self._layout.pieces:
                    self._pieces.take("param_origin", piece, piece.parameter)

    def after_step(self) -> None:
        """Exit of `optimizer.step`. With overlapped parameter gathering only this rank's part has its new value by now, so the
        part is what is taken."""
        if self._probe.wanted(_PARAMETERS):
            with self._probe.guard(_PARAMETERS), torch.no_grad():
                for piece in self._layout.pieces:
                    self._pieces.take("param_updated", piece, piece.part(piece.parameter), part=True)
        if self._main is not None and self._probe.wanted(_STATES):
            with self._probe.guard(_STATES), torch.no_grad():
                for family in ("exp_avg", "exp_avg_sq"):
                    for piece in self._layout.pieces:
                        self._pieces.take(family, piece, self._fitting(piece, self._main.state(piece.parameter, family)), part=True)

    def end_step(self) -> None:
        """The step is over."""
        self._started.clear()
        self._passes.clear()
        with self._probe.guard("merge over ranks"):
            if self._probe.faults.enabled("merge over ranks"):
                self._pieces.flush(self._probe.step)

    def exchange(self, counts: Any = None) -> Any:
        """A step runs again: count its passes anew. Given what this call returned, go on with that."""
        old = self._started, self._passes
        self._started, self._passes = counts or (set(), {})
        return old

    def remove(self) -> None:
        """Take everything off."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _buckets(self) -> list[Any]:
        return [bucket for chunk in self._layout.chunks for group in bucket_groups(chunk) for bucket in group.buckets]

    def _watch_buckets(self) -> None:
        for chunk in self._layout.chunks:
            for group in bucket_groups(chunk):
                pieces = [piece for bucket, found in self._by_bucket for piece in found if any(bucket is b for b in group.buckets)]
                self._before(group, "start_grad_sync", functools.partial(self._accumulated, group, pieces))

    def _accumulated(self, group: Any, pieces: list[Piece]) -> None:
        if id(group) in self._started or not self._probe.wanted(_UNREDUCED):
            return
        self._started.add(id(group))  # a step may start a group's reduction again to drain it
        with self._probe.guard(_UNREDUCED), torch.no_grad():
            for piece in pieces:
                self._pieces.take("grad_unreduced", piece, self._layout.local(piece), phase=ACCUMULATED)

    def _local_hook(self, piece: Piece) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if not self._probe.wanted(_MICRO):
                return
            with self._probe.guard(_MICRO), torch.no_grad():
                micro_step = self._passes.get(parameter, 0)
                self._passes[parameter] = micro_step + 1
                if getattr(parameter, "grad_added_to_main_grad", False):
                    self._pieces.take("grad_unreduced", piece, self._layout.local(piece), phase=ACCUMULATED, micro_step=micro_step)
                else:
                    self._pieces.take("grad_unreduced", piece, parameter.grad, phase=LOCAL, micro_step=micro_step)

        return hook

    def _optimizer_gradients(self, phase: str) -> None:
        if self._main is None or not self._probe.wanted(_REDUCED):
            return
        with self._probe.guard(_REDUCED), torch.no_grad():
            for piece in self._layout.pieces:
                gradient = self._fitting(piece, self._main.gradient(piece.parameter))
                self._pieces.take("grad_reduced", piece, gradient, phase=phase, part=True)

    @staticmethod
    def _fitting(piece: Piece, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor if it has as many elements as this rank holds of the parameter; anything else would be reported as what it is not."""
        return tensor if tensor is not None and tensor.numel() == piece.hi - piece.lo else None

    def _before(self, owner: Any, name: str, look: Callable[[], None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            look()
            return original(*args, **kwargs)

        self._put(owner, name, call)

    def _after(self, owner: Any, name: str, look: Callable[[], None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            look()
            return result

        self._put(owner, name, call)

    def _put(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        setattr(owner, name, call)
        self._undo.append(functools.partial(_restore, owner, name, call))


def _restore(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Take our instance attribute away if it is still the one there: the class's method shows again."""
    if owner.__dict__.get(name) is call:
        del owner.__dict__[name]
