"""The computation of `npu_fusion_attention` in all its versions: forward, statistics of the softmax, and the backward from these.

Definition (documentation of ``torch_npu.npu_fusion_attention_v2`` and of CANN's FlashAttentionScore)::

    scores = scale * (q @ k.T + pse)        pse_type 1, the only one of npu_fusion_attention
    scores = scale * (q @ k.T) + pse        pse_type 0
    out = dropout(softmax(scores where the mask lets them count)) @ v

`sink` adds one score per head to the softmax that has no value. `query_rope @ key_rope.T` is added to ``q @ k.T``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.attention_mask import DEFAULT, MaskArguments
from msprobe_integrations.torch.op_tools.accuracy.references.formula import NotChecked, require

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
PACKED = "TND"
WHOLE = 2147483647
"""Default of ``pre_tokens`` and ``next_tokens``: no window."""
_STATISTICS = 8
"""The operator has each maximum and sum of a softmax so many times."""


@dataclass(frozen=True)
class Attention:
    """Arguments of a call, by the names of version 2.

    Attributes:
        heads: of the queries; those of keys and values may be fewer, and are shared then.
        layout: one of `LAYOUTS`.
        query_ends, key_ends: cumulated lengths of packed sequences.
        zero_rows: queries whose scores are all masked have the result 0 (``inner_precise`` 2).
        softmax_layout: ``TND``: statistics of packed sequences are [tokens, heads, 8]; empty: of each sequence [heads, tokens, 8], one
            after the other.
        dropout_mask: bits, 1 is kept, the lowest of a byte first, of [batch, heads, queries, keys], of one sequence after the other.
    """

    heads: int
    layout: str
    scale: float
    mask: MaskArguments
    keep_prob: float = 1.0
    pse: Tensor | None = None
    pse_type: int = 1
    query_ends: Sequence[int] | None = None
    key_ends: Sequence[int] | None = None
    zero_rows: bool = False
    softmax_layout: str = ""
    sink: Tensor | None = None
    dropout_mask: Tensor | None = None
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None

    def check(self) -> None:
        """Raise `NotChecked` for what has no formula."""
        require(self.layout in LAYOUTS, f"input_layout {self.layout[:20]!r} is not known to the formula")
        require(self.pse_type in (0, 1) or self.pse is None, f"pse_type {self.pse_type}: a bias that the operator makes itself")
        lengths = self.query_ends is not None and self.key_ends is not None and len(self.query_ends) == len(self.key_ends)
        require(self.layout != PACKED or lengths, "layout TND without the lengths of its sequences")
        require(self.softmax_layout in ("", PACKED), f"softmax_layout {self.softmax_layout[:20]!r} is not known to the formula")
        if self.keep_prob != 1.0 and self.dropout_mask is None:
            raise NotChecked("attention with dropout draws random numbers (keep_prob below 1 without dropout_mask)")
        require((self.query_rope is None) == (self.key_rope is None), "query_rope without key_rope")
        self.mask.check(self.layout == PACKED)


class Block(NamedTuple):
    """Sequences of one length, heads second.

    Attributes:
        q, k, v: [batch, heads, tokens, size]; heads of the keys and values as often as those of the queries.
        scores: with bias and mask.
        kept: of the dropout, scaled; None: all.
        dead: [batch or 1, heads or 1, queries]: nothing counts for these; None: none is.
        rows: of the packed queries; None: all are in this block.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    kept: Tensor | None
    dead: Tensor | None
    rows: slice | None


def blocks(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Block]:
    """The sequences of a call, or all batches at once where they have one length."""
    drawn = _DropoutBits(call)
    if call.layout != PACKED:
        q = heads_second(query, call.heads, call.layout)
        shared = key.shape[-1] // q.shape[-1]  # heads of the keys, in a layout that does not say
        k, v = (heads_second(t, shared, call.layout) for t in (key, value))
        require(call.query_rope is None, "query_rope is for layout TND alone")
        yield _block(call, drawn, q, k, v, None, call.pse, None, 0, 1)
        return
    bounds = list(_bounds(call))
    require(sum(q1 - q0 for q0, q1, _, _ in bounds) == query.shape[0], "queries behind the last sequence: their result is not defined")
    taken = 0
    for number, (q0, q1, k0, k1) in enumerate(bounds):
        q, k, v = (t.transpose(0, 1)[None] for t in (query[q0:q1], key[k0:k1], value[k0:k1]))
        rope = None
        if call.query_rope is not None and call.key_rope is not None:
            rope = call.query_rope[q0:q1].transpose(0, 1)[None], call.key_rope[k0:k1].transpose(0, 1)[None]
        pse, size = call.pse, q.shape[1] * (q1 - q0) * (k1 - k0)
        if pse is not None and pse.dim():
            require(pse.dim() == 1, "pse of packed sequences in the compressed form has no formula")
            pse = pse[taken : taken + size].view(1, q.shape[1], q1 - q0, k1 - k0)
        taken += size
        yield _block(call, drawn, q, k, v, rope, pse, slice(q0, q1), number, len(bounds))


def _bounds(call: Attention) -> Iterator[tuple[int, int, int, int]]:
    """First and last query and key of each packed sequence. Lengths that fall to 0 at the end are of sequences that take no part."""
    q0 = k0 = 0
    for q1, k1 in zip(call.query_ends or (), call.key_ends or ()):
        if q1 < q0:
            return
        yield q0, q1, k0, k1
        q0, k0 = q1, k1


def _block(
    call: Attention, drawn: _DropoutBits, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor] | None, pse: Tensor | None,
    rows: slice | None, number: int, count: int,
) -> Block:  # fmt: skip
    k, v = (_per_query_head(t, q.shape[1]) for t in (k, v))
    products = q @ k.transpose(-1, -2)
    if rope is not None:
        products = products + rope[0] @ _per_query_head(rope[1], q.shape[1]).transpose(-1, -2)
    if pse is not None and pse.dim():
        full = pse.shape[-2] in (1, products.shape[-2]) and pse.shape[-1] == products.shape[-1]
        require(full, f"pse of shape {list(pse.shape)} (the compressed form) has no formula")
        scores = call.scale * (products + pse) if call.pse_type == 1 else call.scale * products + pse
    else:
        scores = call.scale * products
    dropped = call.mask.build_drop_mask(products.shape[-2], products.shape[-1], number, count, call.layout == PACKED)
    dead = None
    if dropped is not None:
        # what the operator puts in place of masked scores is finite: where nothing counts, all count alike
        scores = scores.masked_fill(dropped, torch.finfo(scores.dtype).min / 2)
        none = dropped.all(-1)
        dead = none.view((1,) * (3 - none.dim()) + none.shape) if bool(none.any()) else None
    if dead is not None and call.mask.mode == DEFAULT and not call.zero_rows:
        window = call.mask.before >= products.shape[-2] and call.mask.behind >= products.shape[-1]
        require(window, "queries for which nothing counts, within a window: their result is not defined")
    return Block(q, k, v, scores, drawn.next(scores.shape, scores), dead, rows)


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    shared = heads // x.shape[1]
    return x.repeat_interleave(shared, 1) if shared > 1 else x


class _DropoutBits:
    """Reads ``dropout_mask``, block by block."""

    def __init__(self, call: Attention) -> None:
        self._bits: Tensor | None = None
        self._scale, self._at = 1.0, 0
        if call.keep_prob != 1.0 and call.dropout_mask is not None:
            require(call.dropout_mask.dtype == torch.uint8, "dropout_mask is no mask of bits")
            shifts = torch.arange(8, device=call.dropout_mask.device, dtype=torch.uint8)
            self._bits = ((call.dropout_mask.reshape(-1, 1) >> shifts) & 1).flatten()
            self._scale = 1 / call.keep_prob

    def next(self, shape: torch.Size, like: Tensor) -> Tensor | None:
        if self._bits is None:
            return None
        begin, self._at = self._at, self._at + shape.numel()
        require(self._at <= self._bits.numel(), "dropout_mask is too short")
        return self._bits[begin : self._at].view(shape).to(like) * self._scale


def heads_second(x: Tensor, heads: int, layout: str) -> Tensor:
    """[batch, heads, tokens, size] of a tensor in `layout`."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    split = torch.unflatten(x, -1, (heads, -1))
    return split.transpose(1, 2) if layout == "BSH" else split.permute(1, 2, 0, 3)


def heads_back(x: Tensor, layout: str) -> Tensor:
    """The way back of `heads_second`; of a packed sequence [tokens, heads, size]."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == PACKED:
        return x[0].transpose(0, 1)
    return x.transpose(1, 2).flatten(2) if layout == "BSH" else x.permute(2, 0, 1, 3).flatten(2)


def forward(call: Attention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """(attention, maximum of each softmax, sum of each softmax); the attention alone where a query has nothing that counts."""
    call.check()
    outputs, maxima, sums = [], [], []
    dead = False
    for block in blocks(call, query, key, value):
        weights, maximum, total = softmax(block.scores, call.sink)
        if block.kept is not None:
            weights = weights * block.kept
        if block.dead is not None:
            dead = True
            if call.zero_rows or call.mask.is_compressed:
                weights = weights.masked_fill(block.dead[..., None], 0)
        outputs.append(heads_back(weights @ block.v, call.layout))
        maxima.append(maximum)
        sums.append(total)
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (out,) if dead else (out, _statistics(call, maxima), _statistics(call, sums))


def softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, maximum, sum of the exponentials), of the latter [batch, heads, queries]. They have no gradients of their own."""
    if not scores.shape[-1]:
        raise NotChecked("a sequence without keys: its result is not defined")
    maximum = scores.detach().amax(-1)
    if sink is not None:
        sink = sink.to(scores.dtype)[None, :, None]
        maximum = torch.maximum(maximum, sink.detach())
    exponentials = (scores - maximum[..., None]).exp()
    total = exponentials.sum(-1)
    if sink is not None:
        total = total + (sink - maximum).exp()
    return exponentials / total[..., None], maximum, total.detach()


def _statistics(call: Attention, values: list[Tensor]) -> Tensor:
    if call.layout == PACKED:
        heads = values[0].shape[1]
        kept = [v[0].transpose(0, 1).flatten() if call.softmax_layout == PACKED else v[0].flatten() for v in values]
        found = torch.cat(kept).view(-1, heads)
    else:
        found = values[0]
    return found[..., None].expand(*found.shape, _STATISTICS)


def statistics_of(call: Attention, values: Tensor, block: Block) -> Tensor:
    """[batch, heads, queries] of the statistics that a call of the backward gets."""
    values = values[..., 0]
    if block.rows is None:
        return values
    found = values[block.rows]
    if call.softmax_layout == PACKED:
        return found.transpose(0, 1)[None]
    return found.reshape(1, found.shape[1], found.shape[0])


class Gradients(NamedTuple):
    """Results of the backward; None for what the call does not have."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    pse: Tensor | None
    query_rope: Tensor | None
    key_rope: Tensor | None
    sink: Tensor | None


def backward(
    call: Attention, query: Tensor, key: Tensor, value: Tensor, grad: Tensor, maximum: Tensor | None, total: Tensor | None,
    attention: Tensor | None,
) -> Gradients:  # fmt: skip
    """Gradients from the kept maximum and sum of each softmax and the kept result, as the operator computes them; of what is None the
    forward is run again.

    The gradient of the scores is written out, ``weights * (gradient of weights - row sum of grad * attention)``; from the scores on to
    the inputs it is autograd's.
    """
    call.check()
    names = ("query", "key", "value", "pse", "query_rope", "key_rope")
    all_inputs = dict(zip(names, (query, key, value, call.pse, call.query_rope, call.key_rope)))
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in all_inputs.items() if tensor is not None and tensor.numel()}
    sinks: list[Tensor] = []
    with torch.enable_grad():
        roots, seeds = [], []
        own_call = replace(call, pse=inputs.get("pse"), query_rope=inputs.get("query_rope"), key_rope=inputs.get("key_rope"))
        for block in blocks(own_call, inputs["query"], inputs["key"], inputs["value"]):
            g = _in_block(grad, call, block)
            kept = None if attention is None else _in_block(attention, call, block)
            with torch.no_grad():
                weights, seed = _score_gradient(call, block, g, kept, maximum, total, sinks)
            roots += [block.scores, weights @ block.v]
            seeds += [seed, g]
        gradients = torch.autograd.grad(roots, list(inputs.values()), seeds, allow_unused=True)
    by_name: dict[str, Tensor | None] = dict(zip(inputs, gradients))
    by_name["sink"] = torch.stack(sinks).sum(0) if sinks else None
    return Gradients(*(by_name.get(name) for name in Gradients._fields))


def _in_block(x: Tensor, call: Attention, block: Block) -> Tensor:
    return heads_second(x, call.heads, call.layout) if block.rows is None else x[block.rows].transpose(0, 1)[None]


def _score_gradient(
    call: Attention, block: Block, grad: Tensor, attention: Tensor | None, maximum: Tensor | None, total: Tensor | None, sinks: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """(weights, gradient of the scores). The gradient of the sink is added to `sinks`. Backward operators have no mask of a dropout."""
    zero = call.zero_rows or call.mask.is_compressed
    require(block.dead is None or zero, "queries for which nothing counts: what the kept statistics are of them is not defined")
    if maximum is None or total is None:
        weights, top, sums = softmax(block.scores, call.sink)
    else:
        top, sums = (statistics_of(call, t, block).to(block.scores.dtype) for t in (maximum, total))
        weights = (block.scores - top[..., None]).exp() / sums[..., None]
    if block.dead is not None:
        weights = weights.masked_fill(block.dead[..., None], 0)
    of_weights = grad @ block.v.transpose(-1, -2)
    rows = (grad * (weights @ block.v if attention is None else attention)).sum(-1)
    if call.sink is not None:
        share = (call.sink.to(top.dtype)[None, :, None] - top).exp() / sums
        sinks.append(-(share * rows).sum((0, 2)))
    return weights, weights * (of_weights - rows[..., None])
