"""Tensors whose values are not there, or not known to be there, when a record is made; their statistics are put in later.

Results of functional collectives that nobody has waited for (`AsyncCollectiveTensor`, tensor parallelism): waiting in a hook would take
away the overlap, so their statistics are put in when the first operation that uses them has waited. Memory of the host that a device
still fills (`host_copies`): they are put in at the first operation after the bytes have arrived. Arguments of memory without values
(`raw`): whether the operation has read them is known when it has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from msprobe_engine.core.records import TensorRef
from msprobe_integrations.torch.tensors.unversioned_mutations import version_of

Reduce = Callable[[torch.Tensor], TensorRef]
Place = tuple[Any, Any, weakref.ref[torch.Tensor], Reduce]
"""List or dict, key in it, the tensor, its reduction."""
PENDING = ("pending", True)
UNINITIALISED = ("uninitialised", True)


def find_places(structure: Any, mark: tuple[str, bool], seen: Iterator[torch.Tensor], reduce: Reduce) -> Iterator[Place]:
    """Places in `structure` whose reference has no row and bears `mark`, with the tensors `seen` there in the same order."""
    if not isinstance(structure, (list, dict)) and type(structure) is not tuple:
        return
    for key, member in structure.items() if isinstance(structure, dict) else enumerate(structure):
        if not isinstance(member, TensorRef):
            yield from find_places(member, mark, seen, reduce)
        elif member.row < 0 and mark in member.description.extra:
            tensor = next(seen, None)
            if tensor is not None:
                yield structure, key, weakref.ref(tensor), reduce


class DeferredStatistics:
    """Places in records that wait for a tensor.

    Args:
        is_there: can the values of a tensor be read by now?

    Attributes:
        seen: tensors met since the last `await_in`, in order; empty nearly always.
        waiting: the places, and the version whose values they are to have.
    """

    def __init__(self, is_there: Callable[[torch.Tensor], bool]) -> None:
        self._is_there = is_there
        self.seen: list[torch.Tensor] = []
        self.waiting: list[tuple[Place, int | None]] = []

    def met(self, tensor: torch.Tensor, ref: TensorRef) -> None:
        """The reduction of `tensor` has given a reference without a row."""
        if PENDING in ref.description.extra:
            self.seen.append(tensor)

    def await_in(self, structure: Any, reduce: Reduce) -> None:
        """The references of what was seen are in this structure, in the same order."""
        seen, self.seen = self.seen, []
        for place in find_places(structure, PENDING, iter(seen), reduce):
            tensor = place[2]()
            self.waiting.append((place, None if tensor is None else version_of(tensor)))

    def settle(self) -> None:
        """The values of some tensors may have arrived. What has been written to meanwhile has lost those that it was to show."""
        waiting, self.waiting = self.waiting, []
        for place, version in waiting:
            structure, key, reference, reduce = place
            tensor = reference()
            if tensor is None or version_of(tensor) != version:
                continue
            if self._is_there(tensor):
                structure[key] = reduce(tensor)
            else:
                self.waiting.append((place, version))

    def end_step(self) -> None:
        """What is still on its way stays without statistics."""
        self.settle()
        self.waiting.clear()
        self.seen.clear()
