"""Monitor samples of tensors whose values are still on their way (`AsyncCollectiveTensor`: what a tensor-parallel layer gives before
anybody has used it). Waiting in a hook would take away the overlap, so their statistics are put in at the next hook after the first
operation that has waited. See `unsettled` for records of dumps."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from msprobe_engine.core.records import Sample, TensorRef

Reduce = Callable[[torch.Tensor], TensorRef]
_PENDING = ("pending", True)


class DeferredSamples:
    """Samples that wait for their tensor; empty nearly always."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._met: list[tuple[TensorRef, weakref.ref[torch.Tensor]]] = []
        self._waiting: list[tuple[list[Sample], int, weakref.ref[torch.Tensor]]] = []

    def __bool__(self) -> bool:
        return bool(self._met or self._waiting)

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        """The statistics; of a tensor that is still on its way a reference without a row, and the tensor is remembered, weakly."""
        ref = self._reduce(tensor)
        if ref[0] < 0 and _PENDING in ref.description.extra:
            self._met.append((ref, weakref.ref(tensor)))
        return ref

    def settle(self, samples: list[Sample]) -> None:
        """New samples were appended, and operations have ended that may have waited.

        Args:
            samples: those of the step so far.
        """
        if self._met:
            places = {id(sample.ref): index for index, sample in enumerate(samples) if sample.ref.row < 0}
            self._waiting += [(samples, places[id(ref)], tensor) for ref, tensor in self._met if id(ref) in places]
            self._met = [(ref, tensor) for ref, tensor in self._met if id(ref) not in places and tensor() is not None]
        waiting, self._waiting = self._waiting, []
        for place in waiting:
            own, index, reference = place
            tensor = reference()
            if tensor is None:
                continue
            if getattr(tensor, "completed", False):
                own[index] = own[index]._replace(ref=self._reduce(tensor))
            else:
                self._waiting.append(place)

    def end_step(self, samples: list[Sample]) -> None:
        """What is still on its way stays without numbers."""
        self.settle(samples)
        self._met.clear()
        self._waiting.clear()
