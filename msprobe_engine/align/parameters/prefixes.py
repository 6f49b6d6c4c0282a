"""What wrappers put before or into the names of parameters, and what optimizers call their states."""

from __future__ import annotations

import re
from functools import lru_cache

from msprobe_engine.formats.checkpoint.model import StoredTensor

_INSIDE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_dp_module", "base_layer"})
"""torch.compile; FSDP 1; activation checkpointing; Lightning Fabric; a LoRA layer's own weight (peft)."""
_LEADING = re.compile(r"(?:module\.|base_model\.model\.|state_dict\.)+(?=.)", re.DOTALL)
"""DistributedDataParallel, DeepSpeed and Megatron; peft; a dictionary around the dictionary."""
_STATES = {
    "param": "master",
    "fp32": "master",
    "fp32_param": "master",
    "master_param": "master",
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moments1": "exp_avg",
    "moments2": "exp_avg_sq",
    "adam_m": "exp_avg",
    "adam_v": "exp_avg_sq",
    "momentum": "momentum_buffer",
    "moments": "momentum_buffer",
    "accum": "momentum_buffer",
    "lamb_m": "exp_avg",
    "lamb_v": "exp_avg_sq",
    "vhat": "max_exp_avg_sq",
}
_BUFFER = re.compile(
    r"(?:^|\.)(?:rotary_emb\.(?:original_)?inv_freq|rotary_pos_emb\.inv_freq|attn\.(?:masked_)?bias|attention\.(?:masked_)?bias|"
    r"masked_bias|position_ids|embeddings\.position_ids|_extra_state|_extra_state/.*|freqs_cis|rope\.cache|"
    r"local_tokens_per_expert|global_tokens_per_expert|tokens_per_expert)$"
)


_MINDSPORE = {
    "embedding_table": "weight",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
"""Last words of the names in MindSpore's cells (Embedding, LayerNorm, BatchNorm), and what torch's modules call the same. Old models of
transformers have gamma and beta too."""


def bare(name: str) -> str:
    """The name without what wrappers add: ``layers.0.weight`` of ``module._orig_mod.layers.0._fsdp_wrapped_module.weight``; and with
    torch's word for what MindSpore calls otherwise.

    A leading ``model.`` stays: many models have a submodule of that name.
    """
    pieces = [piece for piece in name.split(".") if piece not in _INSIDE]
    if len(pieces) > 1 and pieces[-1] in _MINDSPORE:
        pieces[-1] = _MINDSPORE[pieces[-1]]
    text = ".".join(pieces)
    leading = _LEADING.match(text)
    return text[leading.end() :] if leading is not None else text


@lru_cache(maxsize=65536)
def strip_wrappers(path: str) -> str:
    """The path of a module without what wrappers add; "" of the whole model."""
    return bare(f"{path}.x").rpartition(".")[0]


def state_of(tensor: StoredTensor) -> str:
    """The optimizer's state in one word for all frameworks: ``exp_avg`` of MindSpore's ``moments1``, ``master`` of ``fp32_param``."""
    return _STATES.get(tensor.state, tensor.state)


def is_computed_buffer(name: str) -> bool:
    """Whether a name is that of a buffer that is computed when a model is made and not learnt: masks, tables of rotary positions."""
    return _BUFFER.search(name) is not None
