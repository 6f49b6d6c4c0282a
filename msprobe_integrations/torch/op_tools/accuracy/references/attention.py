"""`npu_fusion_attention` in its versions, their backward operators, MindSpeed's, and the update of ring attention.

Arguments are those of op-plugin's ``op_plugin_functions.yaml`` (2026) and of ``mindspeed.ops``. Of the results the attention and the
statistics of the softmax are compared; seed, offset and number of dropped elements are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from msprobe_integrations.torch.op_tools.accuracy.references.attention_core import PACKED, WHOLE, Attention, Gradients, backward, forward
from msprobe_integrations.torch.op_tools.accuracy.references.attention_mask import MaskArguments
from msprobe_integrations.torch.op_tools.accuracy.references.formula import Formula, ends_of, require

Ends = Sequence[int] | Tensor


def _call(of: Mapping[str, Any]) -> Attention:
    """The arguments of any version, by one name each."""
    mask = MaskArguments(
        of["atten_mask"], of["sparse_mode"], of.get("pre_tokens", of.get("pre_tockens", WHOLE)),
        of.get("next_tokens", of.get("next_tockens", WHOLE)), of["prefix"],
    )  # fmt: skip
    query_ends, key_ends = of["actual_seq_qlen"], of["actual_seq_kvlen"]
    return Attention(
        heads=of["head_num"], layout=of["input_layout"].upper(), scale=of["scale_value"] if "scale_value" in of else of["scale"],
        mask=mask, keep_prob=of["keep_prob"], pse=of["pse"], pse_type=of.get("pse_type", 1),
        query_ends=None if query_ends is None else ends_of(query_ends), key_ends=None if key_ends is None else ends_of(key_ends),
        zero_rows=of["inner_precise"] == 2, softmax_layout=of.get("softmax_layout", ""), sink=of.get("sink"),
        dropout_mask=of.get("dropout_mask"), query_rope=of.get("query_rope"), key_rope=of.get("key_rope"),
    )  # fmt: skip


def _forward(of: Mapping[str, Any]) -> tuple[Tensor, ...]:
    return forward(_call(of), of["query"], of["key"], of["value"])


def _backward(of: Mapping[str, Any], grad: str) -> Gradients:
    kept = of["softmax_max"], of["softmax_sum"], of["attention_in"]
    return backward(_call(of), of["query"], of["key"], of["value"], of[grad], *kept)


def fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = WHOLE, next_tockens: int = WHOLE, inner_precise: int = 0, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Ends | None = None, actual_seq_kvlen: Ends | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
    dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(attention, maximum of each softmax, sum of each softmax), the former in the layout of the inputs (``BSH``, ``SBH``, ``BSND``,
    ``BNSD``, ``TND``), the latter [batch, heads, queries, 8], packed [tokens, heads, 8].

    Raises:
        NotChecked: random dropout, a bias in a compressed form, or a result that is not defined.
    """
    return _forward(locals())


def fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = WHOLE, next_tokens: int = WHOLE,
    inner_precise: int = 0, prefix: Sequence[int] | None = None, actual_seq_qlen: Ends | None = None,
    actual_seq_kvlen: Ends | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None, kv_start_idx: Sequence[int] | None = None, softmax_layout: str = "",
    sink: Tensor | None = None, dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`fusion_attention` with positions apart (`query_rope`, `key_rope`) and a bias before or after the scale. Also MindSpeed's
    ``npu_fusion_attention``."""
    return _forward(locals())


def fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = WHOLE, next_tockens: int = WHOLE, inner_precise: int = 0, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Ends | None = None, actual_seq_kvlen: Ends | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`fusion_attention` for captured graphs: lengths are tensors."""
    return _forward(locals())


def fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None, attention_in: Tensor | None = None, scale_value: float = 1.0,
    keep_prob: float = 1.0, pre_tockens: int = WHOLE, next_tockens: int = WHOLE, inner_precise: int = 0, seed: Any = 0, offset: Any = 0,
    numels: int = 0, prefix: Sequence[int] | None = None, actual_seq_qlen: Ends | None = None, actual_seq_kvlen: Ends | None = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(gradients of query, key, value, pse, sink). Also version 3, whose seed and offset are tensors.

    Raises:
        NotChecked: as `fusion_attention`; with dropout always, as the operator draws its mask again.
    """
    gradients = _backward(locals(), "dy")
    return gradients.query, gradients.key, gradients.value, gradients.pse, gradients.sink


def fusion_attention_grad_v2(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None, attention_in: Tensor | None = None,
    query_rope: Tensor | None = None, key_rope: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tokens: int = WHOLE, next_tokens: int = WHOLE, inner_precise: int = 0, seed: int = 0, offset: int = 0, numels: int = 0,
    prefix: Sequence[int] | None = None, actual_seq_qlen: Ends | None = None, actual_seq_kvlen: Ends | None = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None, kv_start_idx: Sequence[int] | None = None, softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(gradients of query, key, value, pse, query_rope, key_rope, sink)."""
    return tuple(_backward(locals(), "dy"))


def mindspeed_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, grad_outputs: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None, attention_in: Tensor | None = None, scale: float = 1.0,
    keep_prob: float = 1.0, pre_tokens: int = WHOLE, next_tokens: int = WHOLE, inner_precise: int = 0, seed: int = 1234,
    offset: int = 0, numels: int = 0, prefix: Sequence[int] | None = None, actual_seq_qlen: Ends | None = None,
    actual_seq_kvlen: Ends | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = 1,
    q_start_idx: Sequence[int] | None = None, kv_start_idx: Sequence[int] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(gradients of query, key, value, pse), of ``mindspeed.ops.fusion_attention_v2``."""
    return tuple(_backward(locals(), "grad_outputs"))[:4]


def ring_attention_update(
    prev_attn_out: Tensor, prev_softmax_max: Tensor, prev_softmax_sum: Tensor, cur_attn_out: Tensor, cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor, *, actual_seq_qlen: Ends | None = None, input_layout: str = "SBH", input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(attention, maximum, sum) of two parts of the keys together, from those of each part. Layout ``SBH``: statistics are [batch,
    heads, tokens, 8]; ``TND``: as those of `fusion_attention`."""
    require(input_layout in ("SBH", PACKED), f"input_layout {input_layout[:20]!r} is not known to the formula")
    maximum = torch.maximum(prev_softmax_max, cur_softmax_max)
    before, new = ((m - maximum).exp() * s for m, s in ((prev_softmax_max, prev_softmax_sum), (cur_softmax_max, cur_softmax_sum)))
    total = before + new

    def per_head(share: Tensor) -> Tensor:
        share = share[..., 0]
        if input_layout == "SBH":
            size = prev_attn_out.shape[-1] // share.shape[1]
            return share.permute(2, 0, 1).repeat_interleave(size, -1)
        return (share if input_softmax_layout == PACKED else _tokens_first(share, actual_seq_qlen))[..., None]

    return prev_attn_out * per_head(before / total) + cur_attn_out * per_head(new / total), maximum, total


def _tokens_first(share: Tensor, ends: Ends | None) -> Tensor:
    """[tokens, heads] of statistics that are [heads, tokens] for each packed sequence."""
    require(ends is not None, "layout TND without actual_seq_qlen")
    assert ends is not None
    lengths = [end - begin for begin, end in zip([0, *ends_of(ends)], ends_of(ends))]
    parts = share.flatten().split([length * share.shape[1] for length in lengths])
    return torch.cat([part.view(share.shape[1], -1).t() for part in parts])


def mindspeed_ring_attention_update(
    prev_attn_out: Tensor, prev_softmax_max: Tensor, prev_softmax_sum: Tensor, cur_attn_out: Tensor, cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor, actual_seq_qlen: Ends | None = None, layout: str = "SBH",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`ring_attention_update` by the names of ``mindspeed.ops``; its lengths begin with 0."""
    return ring_attention_update(
        prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max, cur_softmax_sum,
        actual_seq_qlen=actual_seq_qlen, input_layout=layout,
    )  # fmt: skip


FORMULAS: dict[str, Formula] = {
    "npu_fusion_attention": fusion_attention,
    "npu_fusion_attention_v2": fusion_attention_v2,
    "npu_fusion_attention_v3": fusion_attention_v3,
    "npu_fusion_attention_grad": fusion_attention_grad,
    "npu_fusion_attention_grad_v2": fusion_attention_grad_v2,
    "npu_fusion_attention_grad_v3": fusion_attention_grad,
    "npu_ring_attention_update": ring_attention_update,
    "MindSpeed.npu_fusion_attention": fusion_attention_v2,
    "MindSpeed.npu_fusion_attention_grad": mindspeed_fusion_attention_grad,
    "MindSpeed.npu_ring_attention_update": mindspeed_ring_attention_update,
}
