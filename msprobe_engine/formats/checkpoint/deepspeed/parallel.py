"""Puts the pieces of DeepSpeed's tensor parallel ranks together.

How a parameter was cut stands in the entry ``universal_checkpoint_info`` as lists of patterns of names, which AutoTP and
Megatron-DeepSpeed write (``deepspeed/checkpoint/constants.py``; ``merge_tp_slices`` in ``ds_to_universal.py`` reads them); where a file has
none, Megatron's names tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.formats.checkpoint.cuts import width_of
from msprobe_engine.formats.checkpoint.deepspeed.zero_rank_file import as_list
from msprobe_engine.formats.checkpoint.megatron.cuts import Cut, cut_of, merge_pieces
from msprobe_engine.formats.checkpoint.model import Index, StoredTensor, concatenate_tensors, rows
from msprobe_engine.formats.tensors.torch_file import attributes

_SAFE = re.compile(r"(?:\\.|[^()|{}\[\]\\]|\[[\w-]{1,16}\])*")
_NAME = re.compile(r"\^(?:\\\W|\w)*\$")
"""A name and nothing else, escaped."""
_MAX_REPEATS, _MAX_PATTERN = 2, 400


@dataclass(frozen=True)
class Patterns:
    """Patterns of names, as Python's `re.match` takes them; those that are one name only (AutoTP writes no others) are looked up.

    Attributes:
        names: whole names.
    """

    names: frozenset[str] = frozenset()
    others: tuple[re.Pattern[str], ...] = ()

    def match(self, name: str) -> bool:
        return name in self.names or any(pattern.match(name) for pattern in self.others)


@dataclass(frozen=True)
class Cuts:
    """How parameters were cut, as the checkpoint says it.

    Attributes:
        same: patterns of parameters that every rank has as a whole.
        averaged: those that every rank has and that have drifted apart; the first rank's is taken, the others are copies.
        columns: cut in dimension 1; all others in dimension 0.
        halves: two parts behind each other in dimension 0, each of them cut.
        parts: pattern -> dimension, widths of each part on each rank.
        vocabulary: patterns of embeddings with rows that only fill up.
        vocabulary_size: rows without these.
    """

    same: Patterns = Patterns()
    averaged: Patterns = Patterns()
    columns: Patterns = Patterns()
    halves: Patterns = Patterns()
    parts: tuple[tuple[re.Pattern[str], int, tuple[tuple[int, ...], ...] | int], ...] = ()
    vocabulary: Patterns = Patterns()
    vocabulary_size: int | None = None


def cuts_of(info: Mapping[str, Any], notes: list[str]) -> Cuts | None:
    """The entry ``universal_checkpoint_info``; None: the checkpoint has none.

    Patterns come from a file, and Python's matching can be made to take for ever: those beyond plain names, classes and two repetitions
    are passed over, which `notes` says.
    """
    if not info:
        return None
    passed: list[str] = []

    def patterns(key: str) -> Patterns:
        said = info.get(key)
        texts = [text for text in said if isinstance(text, str)] if isinstance(said, (list, tuple)) else []
        names = {text: re.sub(r"\\(\W)", r"\1", text[1:-1]) for text in texts if _NAME.fullmatch(text)}
        compiled = [_pattern(text, passed) for text in texts if text not in names]
        return Patterns(frozenset(names.values()), tuple(pattern for pattern in compiled if pattern is not None))

    widths = info.get("sub_param_shard_widths")
    parts = []
    for entry in as_list(info.get("parameter_with_sub_params")):
        said = attributes(entry)
        dim, shape = said.get("partition_dim"), said.get("shape")
        for text in as_list(said.get("patterns")):
            pattern, cut = _pattern(text, passed), _part_widths(widths, text, shape, dim)
            if pattern is not None and type(dim) is int and cut is not None:
                parts.append((pattern, dim, cut))
    size = info.get("original_vocab_size")
    found = Cuts(
        patterns("tp_replicated_parameter_patterns"),
        patterns("parameter_to_average_patterns"),
        patterns("parameter_with_row_parallelism_patterns"),
        patterns("parameter_with_2_sub_params_cat_dim_0"),
        tuple(parts),
        patterns("vocabulary_parameter_patterns"),
        size if type(size) is int and size > 0 else None,
    )
    if passed:
        notes.append(
            f"{len(passed)} patterns of universal_checkpoint_info are no plain names and were passed over, the first {passed[0][:80]!r}"
        )
    return found


def _pattern(text: Any, passed: list[str]) -> re.Pattern[str] | None:
    known = isinstance(text, str) and len(text) <= _MAX_PATTERN and _SAFE.fullmatch(text)
    if known and len(re.findall(r"(?<!\\)[*+?]", text)) <= _MAX_REPEATS:
        with suppress(re.error, OverflowError):
            return re.compile(text)
    passed.append(str(text))
    return None


def _part_widths(widths: Any, text: Any, shape: Any, dim: Any) -> tuple[tuple[int, ...], ...] | int | None:
    """Widths of the parts by rank; or how many equal parts there are (before version 0.4 of the entry)."""
    said = widths.get(text) if isinstance(widths, dict) else None
    if isinstance(said, (list, tuple)) and all(
        isinstance(row, (list, tuple)) and all(type(n) is int and n >= 0 for n in row) for row in said
    ):
        return tuple(tuple(row) for row in said)
    if isinstance(shape, (list, tuple)) and type(dim) is int and 0 <= dim < len(shape):
        if isinstance(shape[dim], (list, tuple)) and all(type(n) is int and n > 0 for n in shape[dim]):
            return tuple((n,) for n in shape[dim])
        if isinstance(shape[dim], int) and shape[dim] > 0:
            return int(shape[dim])
    return None


def together(name: str, pieces: Sequence[StoredTensor], cuts: Cuts | None, shapes: Mapping[str, Index]) -> StoredTensor:
    """The whole of the pieces of all tensor parallel ranks, in their order.

    Args:
        pieces: of the weight or of one of its states.
        cuts: as the checkpoint says it; None: by the names of Megatron.
        shapes: of all parameters on one rank.

    Raises:
        DumpFormatError: they do not fit together.
    """
    if len(pieces) == 1 or not pieces[0].shape:
        return merge_pieces(pieces, Cut.SAME)
    if cuts is None:
        return merge_pieces(pieces, cut_of(name, shapes, len(pieces)))
    if cuts.same.match(name) or cuts.averaged.match(name):
        return merge_pieces(pieces, Cut.SAME)
    if cuts.halves.match(name):
        return merge_pieces(pieces, Cut.GATED)
    for pattern, dim, widths in cuts.parts:
        if pattern.match(name):
            return _of_parts(pieces, dim, widths)
    found = merge_pieces(pieces, Cut.COLUMNS if cuts.columns.match(name) else Cut.ROWS)
    if cuts.vocabulary_size is not None and cuts.vocabulary.match(name) and cuts.vocabulary_size < found.shape[0]:
        return replace(found, padding=cuts.vocabulary_size)
    return found


def _of_parts(pieces: Sequence[StoredTensor], dim: int, widths: tuple[tuple[int, ...], ...] | int) -> StoredTensor:
    """Parts (query, key and value of one projection) behind each other, each of them cut over the ranks."""
    if isinstance(widths, int):
        total = sum(piece.shape[dim] for piece in pieces)
        widths = ((total // widths,),) * widths
    table = [row if len(row) == len(pieces) else (row[0] // len(pieces),) * len(pieces) if len(row) == 1 else () for row in widths]
    for rank, piece in enumerate(pieces):
        held = sum(row[rank] for row in table if row)
        if not all(table) or held != piece.shape[dim]:
            raise DumpFormatError(
                f"{piece.key}: rank {rank} of {len(pieces)} has {piece.shape[dim]} in dimension {dim}, and its parts by "
                f"universal_checkpoint_info have {held}; the files do not belong together"
            )
    width = width_of(pieces[0])
    found = []
    for number, row in enumerate(table):
        for rank, piece in enumerate(pieces):
            found.append(rows(piece, sum(before[rank] for before in table[:number]), row[rank], width, dim))
    return concatenate_tensors(found, dim)
