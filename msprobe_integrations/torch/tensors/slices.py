"""Cuts of tensors (settings key ``slice``): statistics, checksums and saved files are of the part that is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from msprobe_engine.core.records import TensorRef
from msprobe_engine.core.settings.schema import SliceSettings
from msprobe_integrations.torch.backend import Part, TorchBackend
from msprobe_integrations.torch.statistics.pending import quiet

_function_modes = torch._C._len_torch_function_stack
_NoFunction = torch._C.DisableTorchFunction
_LIMIT = 4096


class Slices:
    """The cuts of one dump. A tensor is cut along every dimension that an element applies to: the tensor has the dimension and, where
    the element has a ``size``, that length along it. Of two elements for one dimension the later one counts, as in 26.2.0.

    Args:
        settings: the elements.
    """

    def __init__(self, backend: TorchBackend, settings: Sequence[SliceSettings]) -> None:
        self._backend = backend
        self._settings = tuple(settings)
        self._extra: SliceSettings | None = None
        self._items = self._settings
        self._known: dict[tuple[int, ...], Part | None] = {}

    @property
    def extra(self) -> SliceSettings | None:
        """One more element behind the others, for the steps until it is changed: the part of a request in a batch."""
        return self._extra

    @extra.setter
    def extra(self, item: SliceSettings | None) -> None:
        if item == self._extra:
            return
        self._extra = item
        self._items = self._settings if item is None else (*self._settings, item)
        self._known = {}
        self._backend.forget()

    def reduce(self, tensor: torch.Tensor) -> TensorRef:
        """Statistics of what is left of a tensor, like `TorchBackend.reduce`: the same version of the same tensor has one row. The
        description has the shape of the part, and the whole one as ``full_shape`` when they differ."""
        if not self._items:
            return self._backend.reduce(tensor)
        if _function_modes():
            with _NoFunction():
                return self._backend.reduce_part_of(tensor, self.part)
        return self._backend.reduce_part_of(tensor, self.part)

    def part(self, shape: Sequence[int]) -> Part | None:
        """What is left of a tensor of this shape; None when it stays whole."""
        key = tuple(shape)
        if key not in self._known:
            if len(self._known) >= _LIMIT:
                self._known.clear()
            self._known[key] = _part(self._items, key)
        return self._known[key]

    def cut_tensor(self, data: torch.Tensor) -> torch.Tensor:
        """The part of `data` (a plain tensor, as `describe.resolve` gives it) that was reduced, as a view; the same object when it stays
        whole."""
        part = self.part(data.shape) if self._items else None
        if part is None:
            return data
        with quiet():
            return data[part.cut]


def _part(items: Sequence[SliceSettings], shape: tuple[int, ...]) -> Part | None:
    found: dict[int, slice] = {}
    for item in items:
        if item.dim < len(shape) and item.size in (None, shape[item.dim]):
            found[item.dim] = slice(item.begin, item.end)
    left = [range(*found.get(dim, slice(None)).indices(max(n, 0))) for dim, n in enumerate(shape)]
    cut = tuple(len(indices) if n >= 0 else n for n, indices in zip(shape, left))
    if cut == shape:
        return None
    return Part(tuple(found.get(dim, slice(None)) for dim in range(len(shape))), tuple(indices.start for indices in left), cut)
