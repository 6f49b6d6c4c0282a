"""Pairs that a mapping file makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msprobe_engine.align.parameters.mapping_file import Mapping, Names
from msprobe_engine.align.parameters.prefixes import state_of
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.cuts import name_part, transpose_tensor, width_of
from msprobe_engine.formats.checkpoint.model import Checkpoint, StoredTensor, rows


class Mapped(NamedTuple):
    """A tensor of a checkpoint, and what of it is in a pair."""

    whole: StoredTensor
    piece: StoredTensor


def pair_by_rules(target: Checkpoint, golden: Checkpoint, mapping: Mapping, notes: list[str]) -> Iterator[tuple[str, Mapped, Mapped]]:
    """Name, side A and side B of each pair that the rules of a mapping file make. Rules that fit nothing are noted.

    Raises:
        DumpFormatError: the shapes of what a rule names do not fit together.
    """
    if not mapping.names:
        return
    target_by_name, golden_by_name = _by_name(target), _by_name(golden)
    used: set[int] = set()
    taken: set[tuple[str, str]] = set()
    for name, state in target_by_name:
        if (name, state) in taken:
            continue
        for number, rule in enumerate(mapping.names):
            places = rule.places(name)
            if places is None:
                continue
            target_names = [rule.fill_template(template, places) for template in rule.a]
            golden_names = [rule.fill_template(template, places) for template in rule.b]
            target_tensors, golden_tensors = (
                [target_by_name.get((n, state)) for n in target_names],
                [golden_by_name.get((n, state)) for n in golden_names],
            )
            if all(t is None for t in golden_tensors):
                break
            used.add(number)
            taken.update((n, state) for n in target_names)
            yield from _pairs(rule, target_tensors, golden_tensors, (target_names, golden_names), mapping.path)
            break
    for number, rule in enumerate(mapping.names):
        if number not in used:
            notes.append(f"{mapping.path}: names[{number}] ({rule}) fits no tensors of the two checkpoints")


def _by_name(checkpoint: Checkpoint) -> dict[tuple[str, str], StoredTensor]:
    return {(tensor.name, state_of(tensor)): tensor for tensor in checkpoint.tensors.values() if not tensor.part}


def _pairs(
    rule: Names,
    target_tensors: list[StoredTensor | None],
    golden_tensors: list[StoredTensor | None],
    names: tuple[list[str], list[str]],
    path: str,
) -> Iterator[tuple[str, Mapped, Mapped]]:
    for side, tensors, wanted in (("the run", target_tensors, names[0]), ("the golden run", golden_tensors, names[1])):
        for tensor, name in zip(tensors, wanted):
            if tensor is None:
                raise DumpFormatError(f"{path}: {rule}: {side} has no tensor {name!r}")
    target_pieces = [Mapped(t, t) for t in target_tensors if t is not None]
    golden_pieces = [Mapped(t, transpose_tensor(t) if rule.transposed else t) for t in golden_tensors if t is not None]
    if len(target_pieces) < len(golden_pieces):
        target_pieces = _cut_fused_tensor(target_pieces[0], golden_pieces, rule, path)
    elif len(golden_pieces) < len(target_pieces):
        golden_pieces = _cut_fused_tensor(golden_pieces[0], target_pieces, rule, path)
    for target_piece, golden_piece in zip(target_pieces, golden_pieces):
        part = f"[{target_piece.piece.part}]" if target_piece.piece.part else ""
        yield f"{target_piece.whole.key}{part}", target_piece, golden_piece


def _cut_fused_tensor(fused: Mapped, parts: list[Mapped], rule: Names, path: str) -> list[Mapped]:
    """The pieces of a fused tensor; single numbers (Adam's step) count for each part."""
    if fused.piece.numel == 1:
        return [fused for _ in parts]
    shape = fused.piece.shape
    sizes = [part.piece.shape[rule.dim] if rule.dim < len(part.piece.shape) else 0 for part in parts]
    if rule.dim >= len(shape) or sum(sizes) != shape[rule.dim]:
        raise DumpFormatError(
            f"{path}: {rule}: {fused.whole.name} has shape {list(shape)}; the others together have {sum(sizes)} along dimension {rule.dim}"
        )
    width, offset, pieces = width_of(fused.piece), 0, []
    for part, size in zip(parts, sizes):
        piece = rows(fused.piece, offset, size, width, rule.dim)
        pieces.append(Mapped(fused.whole, name_part(piece, part.whole.name)))
        offset += size
    return pieces
