"""What arguments are for, by operator and place: how values that are drawn for them must be (`msprobe_engine.accuracy.draw`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msprobe_engine.accuracy.draw import CLASSES, DEFINITE, DISTINCT, DROP, KEEP, OFFSETS, PLAIN, SORTED, SYMMETRIC, TRIANGULAR, UNIQUE


class Purpose(NamedTuple):
    """See `msprobe_engine.accuracy.draw.draw`."""

    kind: str = PLAIN
    axis: int = -1


_Places = Mapping[int | str, str]

_TABLE: tuple[tuple[str, _Places], ...] = (
    ("cross_entropy nll_loss nll_loss2d cross_entropy_loss nll_loss_forward", {1: CLASSES, "target": CLASSES}),
    ("searchsorted", {0: SORTED, "sorted_sequence": SORTED}),
    ("bucketize", {1: SORTED, "boundaries": SORTED}),
    ("embedding_bag", {2: OFFSETS, "offsets": OFFSETS}),
    ("cholesky cholesky_ex linalg_cholesky linalg_cholesky_ex", {0: DEFINITE, "input": DEFINITE}),
    ("cholesky_inverse", {0: TRIANGULAR, "input": TRIANGULAR}),
    ("cholesky_solve triangular_solve", {1: TRIANGULAR, "L": TRIANGULAR, "A": TRIANGULAR}),
    ("solve_triangular linalg_solve_triangular", {0: TRIANGULAR, "A": TRIANGULAR}),
    ("eigh eigvalsh linalg_eigh", {0: SYMMETRIC, "A": SYMMETRIC}),
    ("masked_fill masked_fill_", {1: DROP, "mask": DROP}),
    ("scaled_dot_product_attention", {3: KEEP, "attn_mask": KEEP}),
    ("npu_scaled_masked_softmax", {1: DROP, "mask": DROP}),
)
_PLACES = {api: places for names, places in _TABLE for api in names.split()}
_NAMED: _Places = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k", "cu_seqlens", "cum_seq_q", "cum_seq_k"), OFFSETS),
    **dict.fromkeys(("atten_mask", "key_padding_mask"), DROP),
}
"""Keywords that mean the same in every operator."""
_ONE_EACH = frozenset(
    ("scatter", "scatter_", "index_copy", "index_copy_", "index_put", "index_put_", "__setitem__", "put_", "scatter_update")
)
"""Operators that write to the places of an index: which of two writers wins differs from device to device."""

_TAKE = frozenset(("__getitem__", "index"))
"""Operators that read from the places of an index, `index_select` besides. Programs pick rows more often than they repeat them, and where
an index repeats, the backward adds up in the recorded type: in 16 bits that is an error of its own."""


def purpose(api: str, place: tuple[int | str, ...], args: Any) -> Purpose:
    """What the argument at `place` of a record is for.

    Args:
        api: last part of the operator's name.
        place: from the outside in: ``(1,)``, ``("mask",)``.
        args: positional arguments of the record.
    """
    first = place[0]
    if api in _ONE_EACH and first in (1, 2, "index"):
        accumulates = api.startswith(("index_put", "put_")) and isinstance(args, list) and len(args) > 3 and _value(args[3])
        axis = _value(args[1]) if api.startswith("scatter") and isinstance(args, list) and len(args) > 1 else -1
        return Purpose() if accumulates else Purpose(UNIQUE, axis if type(axis) is int else -1)
    if (api in _TAKE and first in (1, "indices")) or (api == "index_select" and first in (2, "index")):
        return Purpose(DISTINCT)
    known = _PLACES.get(api, {}).get(first) or (_NAMED.get(first) if isinstance(first, str) else None)
    return Purpose(known or PLAIN)


def _value(item: Any) -> Any:
    return item.get("value") if isinstance(item, Mapping) else item
