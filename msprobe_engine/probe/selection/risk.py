"""Classes of APIs for ``risk_level``: which ones are recorded when neither ``scope`` nor ``list`` is set.

Names are facts of the existing format (version 26.2.0), matched on the last segment of a record's API name. ``linear`` and
``chain_matmul`` belong to CORE; that version loses them.
"""

from __future__ import annotations

_CORE = """
_fused_adamw_ _fused_adam_ matmul __matmul__ bmm addmm addmm_ addbmm addbmm_ baddbmm baddbmm_ mm mv addmv addmv_ addr addr_
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution _convolution linear chain_matmul
bilinear multi_dot vecdot batch_norm instance_norm layer_norm group_norm local_response_norm _batch_norm_impl_index
batch_norm_elemt batch_norm_stats batch_norm_update_stats batch_norm_gather_stats batch_norm_gather_stats_with_counts
batch_norm_backward_elemt batch_norm_backward_reduce embedding embedding_bag multi_head_attention_forward
scaled_dot_product_attention rms_norm _scaled_mm _grouped_mm
"""
CORE = frozenset(_CORE.split())
"""Multiplications, convolutions, normalisations, embeddings, attention. The last three names are unknown to the existing tool."""

_LOW = """
squeeze unsqueeze reshape reshape_as view view_as flatten unflatten expand expand_as repeat repeat_interleave tile transpose
permute moveaxis movedim swapaxes swapdims chunk unsafe_chunk split split_with_sizes unsafe_split unsafe_split_with_sizes
tensor_split hsplit vsplit dsplit unbind stack cat concat concatenate hstack vstack dstack column_stack row_stack align_as
align_to atleast_1d atleast_2d atleast_3d ravel clamp unfold type_as to float double int long half bfloat16 byte char bool
cfloat numpy empty empty_like zeros zeros_like ones ones_like full full_like arange linspace logspace eye identity diag diagflat
diag_embed triu tril triu_indices tril_indices clone __bool__ stride
"""
LOW = frozenset(_LOW.split())
"""Shapes, casts, creation: left out at FOCUS. Casts are prime suspects in precision work, so the default here is ALL."""

_TORCH = frozenset(("Tensor", "Torch", "Functional", "VF", "Aten"))


def is_recorded(level: str, prefix: str, api: str) -> bool:
    """Is the API recorded at this risk level?

    Args:
        level: ``CORE``, ``FOCUS`` or ``ALL``.
        prefix: of the record name. What is none of torch's own name spaces (collectives, device libraries, functions of the
            user) counts as CORE, as the existing tool's NPU, Distributed and MindSpeed do.
        api: last segment of the API's name.
    """
    if level == "ALL":
        return True
    if level == "FOCUS":
        return api not in LOW
    return api in CORE or prefix not in _TORCH
