"""Tensors whose values are still on their way when a record is made: results of functional collectives that nobody has waited for
(`AsyncCollectiveTensor`, tensor parallelism). Waiting in a hook would take away the overlap, so their statistics are put in when the
first operation that uses them has waited."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from msprobe_engine.records import TensorRef

Reduce = Callable[[torch.Tensor], TensorRef]
_PENDING = ("pending", True)


class Unsettled:
    """Places in records that wait for a tensor.

    Attributes:
        seen: tensors met since the last `await_in`, in order; empty nearly always.
        waiting: (list or dict, key, the tensor, its reduction).
    """

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.waiting: list[tuple[Any, Any, weakref.ref[torch.Tensor], Reduce]] = []

    def met(self, tensor: torch.Tensor, ref: TensorRef) -> None:
        """The reduction of `tensor` has given a reference without a row."""
        if _PENDING in ref.description.extra:
            self.seen.append(tensor)

    def await_in(self, structure: Any, reduce: Reduce) -> None:
        """The references of what was seen are in this structure, in the same order."""
        seen, self.seen = iter(self.seen), []
        self._find(structure, seen, reduce)

    def _find(self, structure: Any, seen: Any, reduce: Reduce) -> None:
        if not isinstance(structure, (list, dict)) and type(structure) is not tuple:
            return
        for key, member in structure.items() if isinstance(structure, dict) else enumerate(structure):
            if not isinstance(member, TensorRef):
                self._find(member, seen, reduce)
            elif member.row < 0 and _PENDING in member.description.extra:
                tensor = next(seen, None)
                if tensor is not None:
                    self.waiting.append((structure, key, weakref.ref(tensor), reduce))

    def settle(self) -> None:
        """An operation has ended: it may have waited."""
        waiting, self.waiting = self.waiting, []
        for place in waiting:
            structure, key, reference, reduce = place
            tensor = reference()
            if tensor is None:
                continue
            if getattr(tensor, "completed", False):
                structure[key] = reduce(tensor)
            else:
                self.waiting.append(place)

    def end_step(self) -> None:
        """What is still on its way stays without statistics."""
        self.waiting.clear()
        self.seen.clear()
