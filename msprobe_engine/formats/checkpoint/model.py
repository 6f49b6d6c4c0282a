"""What a checkpoint holds: tensors as boxes that lie in files, and plain values. Nothing of a tensor is read to make these.

A reader of a format makes a `Checkpoint`; a map of names makes another of it; the comparison walks two of them and reads blocks. Cuts
(tensor parallel, stacked layers, halves of a gated layer, flat partitions of ZeRO, transposed weights) are index arithmetic on boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msprobe_engine.core.errors import DumpFormatError

Index = tuple[int, ...]

MODEL, OPTIMIZER, SCHEDULER, RANDOM, OTHER = "model", "optimizer", "scheduler", "random", "other"
"""What a tensor or a value belongs to."""


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor, and where its elements lie.

    Attributes:
        offsets: index of its first element in the whole tensor, one number per dimension.
        sizes: elements per dimension.
        start: byte in the file at which its first element begins.
        strides: of the file, in elements, one number per dimension.
    """

    offsets: Index
    sizes: Index
    file: Path
    start: int
    strides: Index

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        name: of the parameter, whole-model numbers in it (``decoder.layers.7.mlp.linear_fc1.weight``), whatever rank or stage held it.
        shape: of the whole.
        dtype: plain name (``bfloat16``), as `msprobe_engine.core.dtypes` has it.
        boxes: cover the whole once. Elements that no box covers were missing in the checkpoint.
        copies: boxes that hold again what `boxes` hold: replicas on other ranks.
        state: of an optimizer what it is to the parameter `name`: ``exp_avg``, ``exp_avg_sq``, ``master`` (the copy that is updated,
            usually float32), ``momentum_buffer``, ``step``; "" for the parameter itself, a buffer, or anything else.
        group: one of `MODEL`, `OPTIMIZER`, `SCHEDULER`, `RANDOM`, `OTHER`.
        part: of `name`, when a map of names took it apart: ``q``, ``k``, ``v``, ``gate``, ``up``.
        origin: what the checkpoint itself calls it, where that differs from `name`.
        padding: rows of dimension 0 from here on only fill up (a padded vocabulary); None: not known to be so.
    """

    name: str
    shape: Index
    dtype: str
    boxes: tuple[Box, ...]
    copies: tuple[Box, ...] = ()
    state: str = ""
    group: str = MODEL
    part: str = ""
    origin: str = ""
    padding: int | None = None

    @property
    def key(self) -> str:
        """What it is called in results: ``decoder.final_layernorm.weight``, ``optimizer.exp_avg.decoder.final_layernorm.weight``."""
        return f"optimizer.{self.state}.{self.name}" if self.state else self.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class Checkpoint:
    """A checkpoint, read but for its tensors.

    Attributes:
        path: what was given, or the iteration in it that was chosen.
        format: its name in messages (``Megatron torch``, ``Megatron torch_dist``, ``torch DCP``, ``DeepSpeed ZeRO 2``, ...).
        tensors: by `StoredTensor.key`; with the part in brackets where there is one.
        values: plain values (numbers, text, booleans, None, lists of these) by dotted path: ``args.num_layers``, ``iteration``,
            ``optimizer.param_groups.0.lr``; the group is told by `value_group`.
        facts: of the model, where they are written: ``heads``, ``kv_heads``, ``head_dim``, ``hidden``, ``layers``, ``experts``, ``vocab``,
            ``gated``, ``tied``.
        naming: the scheme of names: ``megatron``, ``huggingface``, or "" when neither.
        files: all that was read, for sizes and for stale checks.
        notes: what was passed over or assumed; one sentence each.
        problems: what is missing or damaged; the comparison goes on and cannot say "equal".
        lost: tensors of the model that lie in a file that is missing or damaged, by name, and why they are not read; under ``""`` when
            not even the names are known.
    """

    path: Path
    format: str
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    naming: str = ""
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    _alike: dict[str, int] = field(default_factory=dict, repr=False)

    def add(self, tensor: StoredTensor) -> None:
        """Take a tensor in; a second one of a name is called ``NAME#2``, with a note."""
        first, free = _key(tensor), tensor
        while _key(free) in self.tensors:
            free = replace(tensor, name=f"{tensor.name}#{self._next(first)}")
        self.tensors[_key(free)] = free

    def add_values(self, values: Mapping[str, Any]) -> None:
        """Take plain values in; another value of a name that is taken is called ``NAME#2``, with a note."""
        for name, value in values.items():
            free = name
            while free in self.values and repr(self.values[free]) != repr(value):
                free = f"{name}#{self._next(name)}"
            self.values[free] = value

    def _next(self, name: str) -> int:
        if not self._alike:
            self.notes.append(
                f"{self.path}: holds several entries of one name, such as {name[:200]}; the second is called NAME#2, and so on. Keys that "
                "hold dots look like nested ones"
            )
        self._alike[name] = self._alike.get(name, 1) + 1
        return self._alike[name]


def _key(tensor: StoredTensor) -> str:
    return tensor.key + (f"[{tensor.part}]" if tensor.part else "")


def strides_of(shape: Sequence[int]) -> Index:
    """Strides of a tensor in C order, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def whole(shape: Sequence[int], file: Path, start: int, strides: Sequence[int] | None = None) -> tuple[Box, ...]:
    """The one box of a tensor that lies in one place."""
    sizes = tuple(shape)
    return (Box((0,) * len(sizes), sizes, file, start, tuple(strides) if strides is not None else strides_of(sizes)),)


def flat(shape: Sequence[int], first: int, count: int, file: Path, start: int, width: int) -> list[Box]:
    """Boxes of a stretch of a tensor's elements in C order, as flat partitions of optimizers hold it.

    Args:
        shape: of the whole tensor.
        first, count: the stretch, in elements.
        file, start: where the first element of the stretch lies.
        width: bytes of an element.
    """
    sizes = tuple(shape)
    if not sizes or count <= 0:
        return [Box((0,) * len(sizes), (1,) * len(sizes), file, start, strides_of(sizes))] if count > 0 else []
    inner = math.prod(sizes[1:])
    strides = strides_of(sizes)
    boxes: list[Box] = []
    at, left, place = first, count, start
    while left > 0:
        row, column = divmod(at, inner)
        if column == 0 and left >= inner:
            rows = left // inner
            boxes.append(Box((row, *(0,) * (len(sizes) - 1)), (rows, *sizes[1:]), file, place, strides))
            taken = rows * inner
        else:
            taken = min(inner - column, left)
            for box in flat(sizes[1:], column, taken, file, place, width):
                boxes.append(Box((row, *box.offsets), (1, *box.sizes), file, box.start, (strides[0], *box.strides)))
        at, left, place = at + taken, left - taken, place + taken * width
    return boxes


def narrow(boxes: Iterable[Box], dim: int, first: int, count: int, width: int) -> tuple[Box, ...]:
    """What of `boxes` lies in `first` to ``first + count`` of dimension `dim`; offsets count from `first`."""
    found = []
    for box in boxes:
        low, high = max(first, box.offsets[dim]), min(first + count, box.offsets[dim] + box.sizes[dim])
        if low < high:
            start = box.start + (low - box.offsets[dim]) * box.strides[dim] * width
            found.append(replace(box, offsets=_with(box.offsets, dim, low - first), sizes=_with(box.sizes, dim, high - low), start=start))
    return tuple(found)


def shift_boxes(boxes: Iterable[Box], dim: int, by: int) -> tuple[Box, ...]:
    """`boxes` moved by `by` elements along dimension `dim`."""
    return tuple(replace(box, offsets=_with(box.offsets, dim, box.offsets[dim] + by)) for box in boxes)


def drop_dimension(boxes: Iterable[Box], dim: int) -> tuple[Box, ...]:
    """`boxes` without dimension `dim`, which has one element."""
    return tuple(
        replace(box, offsets=_without(box.offsets, dim), sizes=_without(box.sizes, dim), strides=_without(box.strides, dim))
        for box in boxes
    )


def permute_boxes(boxes: Iterable[Box], order: Sequence[int]) -> tuple[Box, ...]:
    """`boxes` of the tensor with its dimensions in another order, as ``numpy.transpose``."""
    return tuple(
        replace(
            box,
            offsets=tuple(box.offsets[d] for d in order),
            sizes=tuple(box.sizes[d] for d in order),
            strides=tuple(box.strides[d] for d in order),
        )
        for box in boxes
    )


def _with(index: Index, dim: int, value: int) -> Index:
    return (*index[:dim], value, *index[dim + 1 :])


def _without(index: Index, dim: int) -> Index:
    return (*index[:dim], *index[dim + 1 :])


def rows(tensor: StoredTensor, first: int, count: int, width: int, dim: int = 0) -> StoredTensor:
    """`count` rows of a tensor, from `first`; along another dimension with `dim`."""
    return replace(
        tensor,
        shape=_with(tensor.shape, dim, count),
        boxes=narrow(tensor.boxes, dim, first, count, width),
        copies=narrow(tensor.copies, dim, first, count, width),
    )


def concatenate_tensors(parts: Sequence[StoredTensor], dim: int = 0) -> StoredTensor:
    """One tensor of all, put together along `dim`, with the name of the first.

    Raises:
        DumpFormatError: their dtypes or other dimensions differ, or they have no dimension `dim`.
    """
    head = parts[0]
    boxes: list[Box] = []
    copies: list[Box] = []
    at = 0
    for part in parts:
        if part.dtype != head.dtype or len(part.shape) <= dim or _without(part.shape, dim) != _without(head.shape, dim):
            raise DumpFormatError(
                f"{head.key}: pieces of {head.dtype} {list(head.shape)} and {part.dtype} {list(part.shape)} cannot be put together along "
                f"dimension {dim}; the ranks' files do not belong together"
            )
        boxes += shift_boxes(part.boxes, dim, at)
        copies += shift_boxes(part.copies, dim, at)
        at += part.shape[dim]
    return replace(head, shape=_with(head.shape, dim, at), boxes=tuple(boxes), copies=tuple(copies))


def value_group(path: str) -> str:
    first = path.split(".", 1)[0]
    known: Mapping[str, str] = {
        "optimizer": OPTIMIZER,
        "optim": OPTIMIZER,
        "opt_param_scheduler": SCHEDULER,
        "lr_scheduler": SCHEDULER,
        "scheduler": SCHEDULER,
        "rng_state": RANDOM,
        "rng": RANDOM,
        "random": RANDOM,
    }
    return known.get(first, OTHER)
