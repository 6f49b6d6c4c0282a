"""Parts of a stored tensor that hold several parameters: q, k and v of a fused projection, halves of a gated layer, experts of a stack.

All of it is arithmetic on boxes; nothing is read. Dimension 0 of a weight is its outputs, as in ``torch.nn.Linear``; weights stored the
other way (Conv1D of GPT-2, expert stacks of some models) are turned first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from msprobe_engine.core.dtypes import item_size
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.model import Box, StoredTensor, concatenate_tensors, drop_dimension, permute_boxes, rows


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of attention, in rows of a fused projection.

    Attributes:
        q: rows of all query heads.
        k: rows of all key heads; those of the values where `v` is None.
        groups: key/value heads.
        v: rows of all value heads, if not `k`.
        gated: of each group the queries are followed by as many rows of a gate of the output; `q` counts both. A projection of queries
            alone has the gate of each head behind the head (Qwen3-Next).
        size: elements of a head, where `gated`.
    """

    q: int
    k: int
    groups: int
    v: int | None = None
    gated: bool = False
    size: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.q, self.k, self.k if self.v is None else self.v

    @property
    def total(self) -> int:
        return sum(self.sizes)


def width_of(tensor: StoredTensor) -> int:
    """Bytes of one element.

    Raises:
        DumpFormatError: the dtype is unknown, so nothing can be cut out of the tensor.
    """
    width = item_size(tensor.dtype)
    if width is None:
        raise DumpFormatError(f"{tensor.key}: elements of dtype {tensor.dtype!r} have an unknown size; it can only be compared as a whole")
    return width


def name_part(tensor: StoredTensor, part: str) -> StoredTensor:
    """The tensor, called a part of what it was: `part` is added to the name of the part that it was before."""
    return replace(tensor, part=f"{tensor.part} {part}".strip())


def transpose_tensor(tensor: StoredTensor, order: Iterable[int] | None = None) -> StoredTensor:
    """The tensor with its dimensions in another order; the last two exchanged where no order is given (nothing happens below two)."""
    n = len(tensor.shape)
    if n < 2:
        return tensor
    dims = tuple(order) if order is not None else (*range(n - 2), n - 1, n - 2)
    return replace(
        tensor,
        shape=tuple(tensor.shape[d] for d in dims),
        boxes=permute_boxes(tensor.boxes, dims),
        copies=permute_boxes(tensor.copies, dims),
    )


def every(tensor: StoredTensor, first: int, step: int, dim: int = 0) -> StoredTensor:
    """Rows ``first``, ``first + step``, ... of a tensor, as ``tensor[first::step]``."""
    width = width_of(tensor)

    def pick(boxes: tuple[Box, ...]) -> tuple[Box, ...]:
        found = []
        for box in boxes:
            skip = (first - box.offsets[dim]) % step
            count = -((skip - box.sizes[dim]) // step)
            if count > 0:
                offset = (box.offsets[dim] + skip - first) // step
                found.append(
                    replace(
                        box,
                        offsets=(*box.offsets[:dim], offset, *box.offsets[dim + 1 :]),
                        sizes=(*box.sizes[:dim], count, *box.sizes[dim + 1 :]),
                        start=box.start + skip * box.strides[dim] * width,
                        strides=(*box.strides[:dim], box.strides[dim] * step, *box.strides[dim + 1 :]),
                    )
                )
        return tuple(found)

    n = max(0, -((first - tensor.shape[dim]) // step))
    shape = (*tensor.shape[:dim], n, *tensor.shape[dim + 1 :])
    return replace(tensor, shape=shape, boxes=pick(tensor.boxes), copies=pick(tensor.copies))


def halves(tensor: StoredTensor, names: tuple[str, str] = ("gate", "up"), *, alternating: bool = False) -> list[StoredTensor]:
    """The two halves of dimension 0, or its even and its odd rows.

    Raises:
        DumpFormatError: the number of rows is odd.
    """
    n = tensor.shape[0]
    if n % 2:
        raise DumpFormatError(f"{tensor.key}: {n} rows do not hold {names[0]} and {names[1]} of one size")
    if alternating:
        return [name_part(every(tensor, i, 2), name) for i, name in enumerate(names)]
    return blocks(tensor, [n // 2, n // 2], names)


def blocks(tensor: StoredTensor, sizes: Iterable[int], names: Iterable[str]) -> list[StoredTensor]:
    """Stretches of dimension 0, one behind the other.

    Raises:
        DumpFormatError: they are not as many rows as the tensor has.
    """
    width, at, found = width_of(tensor), 0, []
    for size, name in zip(sizes, names):
        found.append(name_part(rows(tensor, at, size, width), name))
        at += size
    if at != tensor.shape[0]:
        raise DumpFormatError(f"{tensor.key}: has {tensor.shape[0]} rows; its parts together have {at}")
    return found


def grouped_qkv(tensor: StoredTensor, heads: Heads) -> list[StoredTensor]:
    """q, k and v of a projection whose rows go by key/value head: the queries of a group, then its key, then its value.

    This is how Megatron stores ``linear_qkv`` (checkpoint version 3; ``query_key_value`` of GPT-NeoX and BLOOM alike, with one query a
    group). In the result heads follow one another, as separate projections have them.

    Raises:
        DumpFormatError: the rows are not those of `heads`, or not divisible by the groups.
    """
    if heads.total != tensor.shape[0] or any(size % heads.groups for size in heads.sizes):
        raise DumpFormatError(
            f"{tensor.key}: {tensor.shape[0]} rows are not {heads.q} of queries, {heads.sizes[1]} of keys and {heads.sizes[2]} of values "
            f"in {heads.groups} groups"
        )
    width, per_group = width_of(tensor), tensor.shape[0] // heads.groups
    found, at = [], 0
    for size, name in zip(heads.sizes, "qkv"):
        one = size // heads.groups
        pieces = [rows(tensor, group * per_group + at, one, width) for group in range(heads.groups)]
        if name == "q" and heads.gated:
            pieces = [part for piece in pieces for part in _gates_behind_heads(piece, heads.size, width)]
        found.append(name_part(concatenate_tensors(pieces), name))
        at += one
    return found


def _gates_behind_heads(piece: StoredTensor, size: int, width: int) -> list[StoredTensor]:
    """Heads and then their gates, as head, gate, head, gate."""
    half = piece.shape[0] // 2
    return [rows(piece, at + i * size, size, width) for i in range(half // size) for at in (0, half)]


def split_stack(tensor: StoredTensor) -> list[StoredTensor]:
    """The slices of dimension 0 (experts), without that dimension."""
    width, found = width_of(tensor), []
    for i in range(tensor.shape[0]):
        row = rows(tensor, i, 1, width)
        row = replace(row, shape=row.shape[1:], boxes=drop_dimension(row.boxes, 0), copies=drop_dimension(row.copies, 0))
        found.append(name_part(row, f"expert {i}"))
    return found


def half_rotation(tensor: StoredTensor, head_dim: int) -> StoredTensor:
    """Rows of q or k, stored for rotary positions of neighbouring elements, in the order for rotating halves: even rows of each head first.

    Raises:
        DumpFormatError: `head_dim` does not divide the rows.
    """
    if head_dim % 2 or tensor.shape[0] % head_dim:
        raise DumpFormatError(f"{tensor.key}: {tensor.shape[0]} rows are not heads of {head_dim}")
    width, pieces = width_of(tensor), []
    for at in range(0, tensor.shape[0], head_dim):
        head = rows(tensor, at, head_dim, width)
        pieces += [every(head, 0, 2), every(head, 1, 2)]
    return concatenate_tensors(pieces)


Cut = Callable[[StoredTensor], list[StoredTensor]]
"""Takes a tensor apart, one piece for each slot in their order."""
