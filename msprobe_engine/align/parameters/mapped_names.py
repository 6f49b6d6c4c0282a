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


def pair_by_rules(a: Checkpoint, b: Checkpoint, mapping: Mapping, notes: list[str]) -> Iterator[tuple[str, Mapped, Mapped]]:
    """Name, side A and side B of each pair that the rules of a mapping file make. Rules that fit nothing are noted.

    Raises:
        DumpFormatError: the shapes of what a rule names do not fit together.
    """
    if not mapping.names:
        return
    by_name_a, by_name_b = _by_name(a), _by_name(b)
    used: set[int] = set()
    taken: set[tuple[str, str]] = set()
    for name, state in by_name_a:
        if (name, state) in taken:
            continue
        for number, rule in enumerate(mapping.names):
            places = rule.places(name)
            if places is None:
                continue
            names_a = [rule.fill_template(template, places) for template in rule.a]
            names_b = [rule.fill_template(template, places) for template in rule.b]
            mine, other = [by_name_a.get((n, state)) for n in names_a], [by_name_b.get((n, state)) for n in names_b]
            if all(t is None for t in other):
                break
            used.add(number)
            taken.update((n, state) for n in names_a)
            yield from _pairs(rule, mine, other, (names_a, names_b), mapping.path)
            break
    for number, rule in enumerate(mapping.names):
        if number not in used:
            notes.append(f"{mapping.path}: names[{number}] ({rule}) fits no tensors of the two checkpoints")


def _by_name(checkpoint: Checkpoint) -> dict[tuple[str, str], StoredTensor]:
    return {(tensor.name, state_of(tensor)): tensor for tensor in checkpoint.tensors.values() if not tensor.part}


def _pairs(
    rule: Names,
    mine: list[StoredTensor | None],
    other: list[StoredTensor | None],
    names: tuple[list[str], list[str]],
    path: str,
) -> Iterator[tuple[str, Mapped, Mapped]]:
    for side, found, wanted in (("the run", mine, names[0]), ("the golden run", other, names[1])):
        for tensor, name in zip(found, wanted):
            if tensor is None:
                raise DumpFormatError(f"{path}: {rule}: {side} has no tensor {name!r}")
    firsts = [Mapped(t, t) for t in mine if t is not None]
    seconds = [Mapped(t, transpose_tensor(t) if rule.transposed else t) for t in other if t is not None]
    if len(firsts) < len(seconds):
        firsts = _cut_fused_tensor(firsts[0], seconds, rule, path)
    elif len(seconds) < len(firsts):
        seconds = _cut_fused_tensor(seconds[0], firsts, rule, path)
    for first, second in zip(firsts, seconds):
        part = f"[{first.piece.part}]" if first.piece.part else ""
        yield f"{first.whole.key}{part}", first, second


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
    width, at, found = width_of(fused.piece), 0, []
    for part, size in zip(parts, sizes):
        piece = rows(fused.piece, at, size, width, rule.dim)
        found.append(Mapped(fused.whole, name_part(piece, part.whole.name)))
        at += size
    return found
