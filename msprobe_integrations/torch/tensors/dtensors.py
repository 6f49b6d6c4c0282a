"""DTensor parameters: what this rank holds of them, and whose rows make the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from msprobe_integrations.common.parameters.gradients import Piece
from msprobe_integrations.requirements import need

if TYPE_CHECKING:
    from msprobe_integrations.common.ranks.exchanges import Exchanges


def is_dtensor(tensor: Any) -> bool:
    """True for a `torch.distributed.tensor.DTensor`, also of the time when that module was private."""
    return type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.distributed")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, whatever its layout; any other tensor itself.

    Raises:
        MissingNameError: a DTensor of this version does not show it. Itself it is no stand-in: to reduce it would have ranks communicate.
    """
    if not is_dtensor(tensor):
        return tensor
    found: torch.Tensor = need(tensor, "_local_tensor", for_="what a rank holds of a DTensor")
    return found


def local_of(tensor: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """What this rank holds of a gradient or state of `parameter`, without communication: of one that all ranks have whole (the gradient of
    an embedding under tensor parallel) the part that is this rank's of the parameter.

    None when it is laid out in yet another way (a gradient that is still to be added over ranks, say): rows of such parts are not rows of
    a whole.
    """
    if tensor is None or type(tensor) is torch.Tensor:
        return tensor if not is_dtensor(parameter) else None
    if not is_dtensor(tensor):
        return tensor
    if not is_dtensor(parameter):
        return None
    inner = local(tensor)
    if tensor.placements == parameter.placements:  # type: ignore[attr-defined]
        return inner
    return _part(inner, parameter) if all(placement.is_replicate() for placement in tensor.placements) else None  # type: ignore[attr-defined]


def _part(whole: torch.Tensor, parameter: Any) -> torch.Tensor | None:
    """Of a whole tensor what this rank holds of `parameter`, as `torch.chunk` divides: a view. None where it is divided otherwise."""
    place = parameter.device_mesh.get_coordinate()
    for i, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            continue
        if place is None or type(placement).__name__ != "Shard":
            return None
        rows = whole.shape[placement.dim]
        chunk = -(-rows // parameter.device_mesh.size(i))
        first, last = (min(rows, chunk * (place[i] + step)) for step in (0, 1))
        whole = whole.narrow(placement.dim, first, last - first)
    return whole if whole.shape == local(parameter).shape else None


def dividing_dims(tensor: Any) -> list[int]:
    """Dimensions of the mesh along which the tensor is in parts."""
    return [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate() and tensor.device_mesh.size(i) > 1]


def sharers(tensor: Any) -> tuple[int, ...]:
    """Global ranks, ascending, that together hold one copy of the tensor; empty when this rank has all of it."""
    divided = dividing_dims(tensor)
    place = tensor.device_mesh.get_coordinate()
    if not divided or place is None:
        return ()
    line = tensor.device_mesh.mesh[tuple(slice(None) if i in divided else at for i, at in enumerate(place))]
    return tuple(sorted(line.flatten().tolist()))


def replicating_groups(tensor: Any) -> list[tuple[str, Any]]:
    """Name and process group of each mesh dimension along which ranks hold the same."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    dims = [i for i, placement in enumerate(tensor.placements) if placement.is_replicate() and mesh.size(i) > 1]
    return [(names[i], mesh.get_group(i)) for i in dims]


def make_piece(name: str, tensor: Any, chunk: int, facts: Mapping[str, Any], exchanges: Exchanges | None) -> Piece:
    """What this rank holds of a DTensor parameter."""
    shared = {**facts, "placements": [str(placement) for placement in tensor.placements]}
    divided = dividing_dims(tensor)
    whole = tensor.numel()
    if not divided:
        return Piece(name, tensor, chunk, 0, whole, shared)
    shared["of"] = whole
    ranks = sharers(tensor)
    summed = any(tensor.placements[i].is_partial() for i in divided)  # parts of a sum: no row of theirs is one of the whole
    exchange = exchanges.of(ranks) if exchanges is not None and ranks and not summed else None
    numel = local(tensor).numel()
    lo = _flat_start(tensor, divided)
    if lo is None:
        return Piece(name, tensor, chunk, 0, numel, shared, exchange, positions=False)
    return Piece(name, tensor, chunk, lo, lo + numel, shared, exchange)


def _flat_start(tensor: Any, divided: Sequence[int]) -> int | None:
    """First element of this rank's part if the part is a flat range of the whole: rows of one plain division of the first dimension,
    as `torch.chunk` makes it. None otherwise."""
    placement = tensor.placements[divided[0]]
    if len(divided) > 1 or type(placement).__name__ != "Shard" or placement.dim != 0:
        return None
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return None
    rows, ranks, width = tensor.shape[0], tensor.device_mesh.size(divided[0]), math.prod(tensor.shape[1:])
    chunk = -(-rows // ranks)
    first, last = (min(rows, chunk * (place[divided[0]] + i)) for i in (0, 1))
    return first * width if local(tensor).numel() == (last - first) * width else None
