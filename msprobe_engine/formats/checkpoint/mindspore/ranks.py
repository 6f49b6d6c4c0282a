"""Puts the tensors of MindSpore's ranks together, as a strategy file says how they were cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from msprobe_engine.formats.checkpoint.mindspore.file import Held
from msprobe_engine.formats.checkpoint.mindspore.strategy import Layout
from msprobe_engine.formats.checkpoint.model import Box

Whole = tuple[Held, tuple[Box, ...]]
"""A tensor, and boxes that hold parts of it once more."""


def together(
    held: Mapping[str, Mapping[int, Held]], layouts: Mapping[str, Layout], ranks: int
) -> tuple[dict[str, Whole], list[str], list[str]]:
    """The whole of every tensor.

    Args:
        held: tag -> rank -> what it has.
        layouts: of parameters, by name; states are cut as their parameter unless they have their own.
        ranks: how many files were read.

    Returns:
        Tensors by tag, notes, problems. Without any layout and more than one rank each rank's tensors are apart, as ``rank_3.fc.weight``.
    """
    found: dict[str, Whole] = {}
    problems: list[str] = []
    if ranks == 1:
        return {tag: (next(iter(pieces.values())), ()) for tag, pieces in held.items()}, [], []
    if not layouts:
        note = (
            f"{ranks} ranks saved and no strategy file says how they cut the parameters: each rank is compared by itself. Copy the "
            "files of strategy_ckpt_config into a directory 'strategy' beside the ranks; where every rank has the whole model, give the "
            "directory of one"
        )
        return {f"rank_{rank}.{tag}": (piece, ()) for tag, pieces in held.items() for rank, piece in sorted(pieces.items())}, [note], []
    uncut = 0
    for tag, pieces in held.items():
        layout = layouts.get(tag) or _of_parameter(tag, pieces, held, layouts)
        uncut += layout is None
        whole = _joined(tag, pieces, layout, problems)
        if whole is not None:
            found[tag] = whole
    notes = [f"{uncut} of {len(held)} tensors are in no strategy file and were taken for the same on all ranks"] if uncut else []
    return found, notes, problems


def _of_parameter(
    tag: str, pieces: Mapping[int, Held], held: Mapping[str, Mapping[int, Held]], layouts: Mapping[str, Layout]
) -> Layout | None:
    """The layout of a state's parameter, where they have the same shape on a rank."""
    name = tag.partition(".")[2]
    rank = min(pieces)
    same = name in held and rank in held[name] and held[name][rank].shape == pieces[rank].shape
    return layouts.get(name) if same else None


def _joined(tag: str, pieces: Mapping[int, Held], layout: Layout | None, problems: list[str]) -> Whole | None:
    ranks = sorted(pieces)
    first = pieces[ranks[0]]
    if any((piece.shape, piece.dtype) != (first.shape, first.dtype) for piece in pieces.values()):
        problems.append(f"the ranks have {tag} in several shapes or types; their files do not belong together, and it is not compared")
        return None
    if layout is None:
        return first, tuple(box for rank in ranks[1:] for box in pieces[rank].boxes)
    if len(layout.axes) != len(first.shape):
        problems.append(
            f"the strategy of {tag} is of {len(layout.axes)} dimensions and the tensor has {len(first.shape)}; it is not compared"
        )
        return None
    cuts = layout.cuts()
    shape = tuple(size * count for size, count in zip(first.shape, cuts))
    boxes: dict[tuple[int, ...], tuple[Box, ...]] = {}
    copies: list[Box] = []
    for rank in ranks:
        offsets = tuple(number * size for number, size in zip(layout.piece(rank), first.shape))
        placed = tuple(replace(box, offsets=tuple(a + b for a, b in zip(box.offsets, offsets))) for box in pieces[rank].boxes)
        if offsets in boxes:
            copies += placed
        else:
            boxes[offsets] = placed
    if len(boxes) < math.prod(cuts):
        problems.append(f"{tag} was cut into {math.prod(cuts)} pieces and the ranks that can be read have {len(boxes)}")
    return replace(first, shape=shape, boxes=tuple(box for part in boxes.values() for box in part)), tuple(copies)
