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


def explain_rearrangement(target: StoredTensor, golden: StoredTensor, model: Model | None, contents: Contents) -> str:
    """How `golden` holds what `target` holds, in words; "" when it does not, or not in a way that is known here."""
    try:
        for words, candidate in _candidates(target, golden, model):
            if candidate.shape == target.shape and contents.same(target, candidate):
                return words
        parts = _by_part(target, golden, model, contents)
        return parts or _explain_permutation(target, golden, contents)
    except DumpFormatError:
        return ""


def _candidates(target: StoredTensor, golden: StoredTensor, model: Model | None) -> Iterator[tuple[str, StoredTensor]]:
    if len(golden.shape) in (2, 3):
        yield "equal when transposed", cuts.transpose_tensor(golden)
    if target.shape != golden.shape or not golden.shape or golden.shape[0] < 2:
        return
    spot = model.spot(target.name) if model is not None else None
    if model is not None and spot is not None and spot.rule.slot == "attention.qkv" and not target.part:
        heads = model.heads(spot.layer, target.shape[0])
        if isinstance(heads, Heads):
            yield from _qkv_orders(golden, heads)
    if spot is not None and model is not None and (target.part or spot.rule.slot).rpartition(".")[2] in ("q", "k"):
        size = model.head_dim(spot.layer)
        if size and size % 2 == 0 and golden.shape[0] % size == 0:
            yield (
                "equal when rotary pairs of rows become halves of each head: the run has them apart, the golden run side by side",
                cuts.half_rotation(golden, size),
            )
            yield (
                "equal when halves of each head become rotary pairs of rows: the run has them side by side, the golden run apart",
                _interleave_halves(golden, size),
            )
    if golden.shape[0] % 2 == 0 and not target.part:
        first, second = cuts.halves(golden)
        gated = spot is not None and spot.rule.form in (rules.FC1, rules.HALVES)
        yield (
            ("equal with gate and up exchanged" if gated else "equal with its two halves of rows exchanged"),
            concatenate_tensors([second, first]),
        )
        yield (
            "equal when its halves take turns row by row: the run has two halves, the golden run alternates",
            concatenate_tensors(cuts.halves(golden, alternating=True)),
        )


def _qkv_orders(golden: StoredTensor, heads: Heads) -> Iterator[tuple[str, StoredTensor]]:
    """`golden` read as another layout of fused q, k and v, in the layout by group."""
    sizes = dict(zip("qkv", heads.sizes))
    for order in ("qkv", "qvk", "kqv", "kvq", "vqk", "vkq"):
        parts = {part.part.rpartition(" ")[2]: part for part in cuts.blocks(golden, [sizes[letter] for letter in order], order)}
        words = ", ".join(order)
        yield f"equal when the golden run is read as blocks {words} and the run by key/value head", _group_by_head(parts, heads)
        if heads.groups > 1 and order != "qkv":
            per = {letter: sizes[letter] // heads.groups for letter in "qkv"}
            yield (
                f"equal when the rows of each head group of the golden run are {words}",
                concatenate_tensors(_reorder_head_rows(golden, order, per, heads.groups)),
            )


def _reorder_head_rows(golden: StoredTensor, order: str, per: dict[str, int], groups: int) -> list[StoredTensor]:
    rows = []
    for piece in cuts.blocks(golden, [golden.shape[0] // groups] * groups, [""] * groups):
        parts = dict(zip(order, cuts.blocks(piece, [per[letter] for letter in order], [""] * 3)))
        rows += [parts[letter] for letter in "qkv"]
    return rows


def _group_by_head(parts: dict[str, StoredTensor], heads: Heads) -> StoredTensor:
    """Blocks of q, k and v put together by group."""
    groups = heads.groups
    cut = {letter: cuts.blocks(part, [part.shape[0] // groups] * groups, [""] * groups) for letter, part in parts.items()}
    return concatenate_tensors([cut[letter][g] for g in range(groups) for letter in "qkv"])


def _interleave_halves(tensor: StoredTensor, size: int) -> StoredTensor:
    """The inverse of `cuts.half_rotation`: rows ``0, size/2, 1, size/2 + 1, ...`` of each head."""
    heads = cuts.blocks(tensor, [size] * (tensor.shape[0] // size), [""] * (tensor.shape[0] // size))
    pieces = []
    for head in heads:
        low, high = cuts.halves(head, ("", ""))
        for i in range(size // 2):
            pieces += [_row(low, i), _row(high, i)]
    return concatenate_tensors(pieces)


def _row(tensor: StoredTensor, i: int) -> StoredTensor:
    return rows(tensor, i, 1, cuts.width_of(tensor))


def _by_part(target: StoredTensor, golden: StoredTensor, model: Model | None, contents: Contents) -> str:
    """Of a fused parameter: the parts that differ, and how."""
    if model is None or target.shape != golden.shape or target.part:
        return ""
    placed = place(target, model)
    if placed.cut is None or len(placed.slots) < 2 or len(placed.slots) > 64:
        return ""
    target_parts, golden_parts = placed.cut(target), placed.cut(golden)
    differing = [
        i for i, (target_part, golden_part) in enumerate(zip(target_parts, golden_parts)) if not contents.same(target_part, golden_part)
    ]
    if not differing or len(differing) == len(target_parts) > 2:
        return ""
    names = ", ".join(target_parts[i].part or "?" for i in differing)
    if len(differing) == 2:
        i, j = differing
        if contents.same(target_parts[i], golden_parts[j]) and contents.same(target_parts[j], golden_parts[i]):
            return Sentence("equal with {0} and {1} exchanged", target_parts[i].part, target_parts[j].part)
    if len(differing) == 1:
        how = explain_rearrangement(target_parts[differing[0]], golden_parts[differing[0]], model, contents)
        return Sentence("only {0} differs", names) + (Sentence(": {0}", how) if how else "")
    return Sentence("only {0} differ", names) if len(differing) < len(target_parts) else ""


def _explain_permutation(target: StoredTensor, golden: StoredTensor, contents: Contents) -> str:
    """Whether slices of dimension 0, or of the last, of `target` are those of `golden` in another order."""
    if target.shape != golden.shape or target.dtype != golden.dtype or target.numel * cuts.width_of(target) > _MOST_BYTES:
        return ""
    for words, target_slices, golden_slices in _slices(target, golden):
        if not 2 <= target_slices.shape[0] <= _MOST_ROWS:
            continue
        target_digests, golden_digests = contents.row_digests(target_slices), contents.row_digests(golden_slices)
        if target_digests and target_digests != golden_digests and Counter(target_digests) == Counter(golden_digests):
            return Sentence("equal with its {0} in another order: {1}", words, _moves(target_digests, golden_digests))
    return ""


def _slices(target: StoredTensor, golden: StoredTensor) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    if len(target.shape) == 1:
        yield Sentence("elements"), target, golden
    elif len(target.shape) == 2:
        yield Sentence("rows"), target, golden
        yield Sentence("columns"), cuts.transpose_tensor(target), cuts.transpose_tensor(golden)
    elif len(target.shape) > 2:
        yield Sentence("slices of dimension 0"), target, golden


def _moves(target_digests: list[bytes], golden_digests: list[bytes]) -> str:
    """Which slices went where, in few words."""
    moved = [i for i, (target_digest, golden_digest) in enumerate(zip(target_digests, golden_digests)) if target_digest != golden_digest]
    if len(moved) == 2:
        return Sentence("{0} and {1} are exchanged", moved[0], moved[1])
    first, last = moved[0], moved[-1]
    n = len(target_digests)
    if len(set(target_digests)) == n:
        where = {digest: i for i, digest in enumerate(golden_digests)}
        shift = where[target_digests[first]] - first
        if all((where[digest] - i - shift) % n == 0 for i, digest in enumerate(target_digests)):
            return Sentence("shifted by {0}", shift % n)
    return Sentence("all of them") if len(moved) == n else Sentence("{0} of them, from {1} to {2}", len(moved), first, last)
