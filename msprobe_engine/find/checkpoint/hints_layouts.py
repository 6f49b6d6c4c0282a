"""Other orders in which the same parameter may lie: transposed, q, k and v in another order, gate and up exchanged, rotary pairs, rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msprobe_engine.align.parameters import rules
from msprobe_engine.align.parameters.model_facts import Model
from msprobe_engine.align.parameters.slots import place
from msprobe_engine.core.errors import DumpFormatError
from msprobe_engine.core.text.sentences import Sentence
from msprobe_engine.formats.checkpoint import cuts
from msprobe_engine.formats.checkpoint.cuts import Heads
from msprobe_engine.formats.checkpoint.model import StoredTensor, concatenate_tensors, rows
from msprobe_engine.measure.stored.contents import Contents

_MOST_ROWS = 1 << 20
_MOST_BYTES = 512 << 20
"""Of a tensor whose rows or columns are looked for one by one."""


def explain_rearrangement(a: StoredTensor, b: StoredTensor, model: Model | None, contents: Contents) -> str:
    """How `b` holds what `a` holds, in words; "" when it does not, or not in a way that is known here."""
    try:
        for words, candidate in _candidates(a, b, model):
            if candidate.shape == a.shape and contents.same(a, candidate):
                return words
        parts = _by_part(a, b, model, contents)
        return parts or _explain_permutation(a, b, contents)
    except DumpFormatError:
        return ""


def _candidates(a: StoredTensor, b: StoredTensor, model: Model | None) -> Iterator[tuple[str, StoredTensor]]:
    if len(b.shape) in (2, 3):
        yield "equal when transposed", cuts.transpose_tensor(b)
    if a.shape != b.shape or not b.shape or b.shape[0] < 2:
        return
    spot = model.spot(a.name) if model is not None else None
    if model is not None and spot is not None and spot.rule.slot == "attention.qkv" and not a.part:
        heads = model.heads(spot.layer, a.shape[0])
        if isinstance(heads, Heads):
            yield from _qkv_orders(b, heads)
    if spot is not None and model is not None and (a.part or spot.rule.slot).rpartition(".")[2] in ("q", "k"):
        size = model.head_dim(spot.layer)
        if size and size % 2 == 0 and b.shape[0] % size == 0:
            yield (
                "equal when rotary pairs of rows become halves of each head: the run has them apart, the golden run side by side",
                cuts.half_rotation(b, size),
            )
            yield (
                "equal when halves of each head become rotary pairs of rows: the run has them side by side, the golden run apart",
                _interleave_halves(b, size),
            )
    if b.shape[0] % 2 == 0 and not a.part:
        first, second = cuts.halves(b)
        gated = spot is not None and spot.rule.form in (rules.FC1, rules.HALVES)
        yield (
            ("equal with gate and up exchanged" if gated else "equal with its two halves of rows exchanged"),
            concatenate_tensors([second, first]),
        )
        yield (
            "equal when its halves take turns row by row: the run has two halves, the golden run alternates",
            concatenate_tensors(cuts.halves(b, alternating=True)),
        )


def _qkv_orders(b: StoredTensor, heads: Heads) -> Iterator[tuple[str, StoredTensor]]:
    """`b` read as another layout of fused q, k and v, in the layout by group."""
    sizes = dict(zip("qkv", heads.sizes))
    for order in ("qkv", "qvk", "kqv", "kvq", "vqk", "vkq"):
        parts = {part.part.rpartition(" ")[2]: part for part in cuts.blocks(b, [sizes[x] for x in order], order)}
        words = ", ".join(order)
        yield f"equal when the golden run is read as blocks {words} and the run by key/value head", _group_by_head(parts, heads)
        if heads.groups > 1 and order != "qkv":
            per = {x: sizes[x] // heads.groups for x in "qkv"}
            yield (
                f"equal when the rows of each head group of the golden run are {words}",
                concatenate_tensors(_reorder_head_rows(b, order, per, heads.groups)),
            )


def _reorder_head_rows(b: StoredTensor, order: str, per: dict[str, int], groups: int) -> list[StoredTensor]:
    found = []
    for piece in cuts.blocks(b, [b.shape[0] // groups] * groups, [""] * groups):
        parts = dict(zip(order, cuts.blocks(piece, [per[x] for x in order], [""] * 3)))
        found += [parts[x] for x in "qkv"]
    return found


def _group_by_head(parts: dict[str, StoredTensor], heads: Heads) -> StoredTensor:
    """Blocks of q, k and v put together by group."""
    groups = heads.groups
    cut = {x: cuts.blocks(part, [part.shape[0] // groups] * groups, [""] * groups) for x, part in parts.items()}
    return concatenate_tensors([cut[x][g] for g in range(groups) for x in "qkv"])


def _interleave_halves(b: StoredTensor, size: int) -> StoredTensor:
    """The inverse of `cuts.half_rotation`: rows ``0, size/2, 1, size/2 + 1, ...`` of each head."""
    heads = cuts.blocks(b, [size] * (b.shape[0] // size), [""] * (b.shape[0] // size))
    pieces = []
    for head in heads:
        low, high = cuts.halves(head, ("", ""))
        for i in range(size // 2):
            pieces += [_row(low, i), _row(high, i)]
    return concatenate_tensors(pieces)


def _row(tensor: StoredTensor, i: int) -> StoredTensor:
    return rows(tensor, i, 1, cuts.width_of(tensor))


def _by_part(a: StoredTensor, b: StoredTensor, model: Model | None, contents: Contents) -> str:
    """Of a fused parameter: the parts that differ, and how."""
    if model is None or a.shape != b.shape or a.part:
        return ""
    placed = place(a, model)
    if placed.cut is None or len(placed.slots) < 2 or len(placed.slots) > 64:
        return ""
    parts_a, parts_b = placed.cut(a), placed.cut(b)
    differing = [i for i, (x, y) in enumerate(zip(parts_a, parts_b)) if not contents.same(x, y)]
    if not differing or len(differing) == len(parts_a) > 2:
        return ""
    names = ", ".join(parts_a[i].part or "?" for i in differing)
    if len(differing) == 2:
        i, j = differing
        if contents.same(parts_a[i], parts_b[j]) and contents.same(parts_a[j], parts_b[i]):
            return Sentence("equal with {0} and {1} exchanged", parts_a[i].part, parts_a[j].part)
    if len(differing) == 1:
        how = explain_rearrangement(parts_a[differing[0]], parts_b[differing[0]], model, contents)
        return Sentence("only {0} differs", names) + (Sentence(": {0}", how) if how else "")
    return Sentence("only {0} differ", names) if len(differing) < len(parts_a) else ""


def _explain_permutation(a: StoredTensor, b: StoredTensor, contents: Contents) -> str:
    """Whether slices of dimension 0, or of the last, of `a` are those of `b` in another order."""
    if a.shape != b.shape or a.dtype != b.dtype or a.numel * cuts.width_of(a) > _MOST_BYTES:
        return ""
    for words, x, y in _slices(a, b):
        if not 2 <= x.shape[0] <= _MOST_ROWS:
            continue
        mine, other = contents.row_digests(x), contents.row_digests(y)
        if mine and mine != other and Counter(mine) == Counter(other):
            return Sentence("equal with its {0} in another order: {1}", words, _moves(mine, other))
    return ""


def _slices(a: StoredTensor, b: StoredTensor) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    if len(a.shape) == 1:
        yield Sentence("elements"), a, b
    elif len(a.shape) == 2:
        yield Sentence("rows"), a, b
        yield Sentence("columns"), cuts.transpose_tensor(a), cuts.transpose_tensor(b)
    elif len(a.shape) > 2:
        yield Sentence("slices of dimension 0"), a, b


def _moves(mine: list[bytes], other: list[bytes]) -> str:
    """Which slices went where, in few words."""
    moved = [i for i, (x, y) in enumerate(zip(mine, other)) if x != y]
    if len(moved) == 2:
        return Sentence("{0} and {1} are exchanged", moved[0], moved[1])
    first, last = moved[0], moved[-1]
    n = len(mine)
    if len(set(mine)) == n:
        where = {digest: i for i, digest in enumerate(other)}
        shift = where[mine[first]] - first
        if all((where[digest] - i - shift) % n == 0 for i, digest in enumerate(mine)):
            return Sentence("shifted by {0}", shift % n)
    return Sentence("all of them") if len(moved) == n else Sentence("{0} of them, from {1} to {2}", len(moved), first, last)
