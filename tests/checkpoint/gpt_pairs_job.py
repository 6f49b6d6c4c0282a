"""The same weights in transformers and in megatron-core, by the map of names that is under test.

``gpt_pairs_job.py DIRECTORY [MODEL ...]``. For each model: transformers makes it and writes it; megatron-core makes one of the same form
with weights of its own; every pair of `align_checkpoints` is copied from the first into the second; both run forward on the same tokens.
``result.json``: model -> what was seen.
A process of its own, for the device shim.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}
ZERO_CENTERED = ("qwen3-next",)
"""Models whose norms hold what is to be added to 1; Megatron has that with Transformer Engine only."""
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


def main() -> None:
    warnings.filterwarnings("ignore")
    sys.path[:0] = [str(ROOT / "tests" / "checkpoint"), str(ROOT / "examples" / "megatron")]
    import cpu_shim

    cpu_shim.install()
    import torch
    import transformers
    from megatron.core import parallel_state, tensor_parallel

    transformers.logging.set_verbosity_error()
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    target = Path(sys.argv[1])
    (target / "result.json").write_text(json.dumps({name: run(name, target / name) for name in sys.argv[2:] or MODELS}))
    os._exit(0)  # without the teardown of process groups that the shim does not know


def run(name: str, directory: Path) -> dict[str, Any]:
    """Both models on the same tokens, before and after the weights went over."""
    import torch
    from stored_arrays import array_of, checkpoint_of, fill

    from msprobe_engine.align.parameters.align_names import align_checkpoints

    torch.manual_seed(3)
    source, model = MODELS[name]()
    for parameter in source.parameters():  # biases and norms that begin as zeros and ones would prove nothing
        torch.nn.init.normal_(parameter, std=0.3)
    for key, buffer in source.named_buffers():
        if "correction_bias" in key:
            torch.nn.init.normal_(buffer, std=0.1)
    directory.mkdir(parents=True)
    source.save_pretrained(directory / "hf", save_original_format=True)
    config = source.config
    facts = {"heads": config.num_attention_heads, "kv_heads": getattr(config, "num_key_value_heads", config.num_attention_heads)}
    tensors = {key: value.detach().numpy() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    mine = checkpoint_of(tensors, directory / "megatron", facts)
    mine.values["args.rotary_interleaved"] = model.config.rotary_interleaved
    theirs = checkpoint_of(saved(directory / "hf"), directory / "transformers", facts)
    found = align_checkpoints(mine, theirs)
    for pair in found.pairs:
        fill(pair.a, array_of(pair.b))
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(5))
    source.eval()
    model.eval()
    with torch.no_grad():
        expected = source(tokens).logits
        before = logits(model, tokens)
        loaded = {k: torch.from_numpy(array_of(t)) for k, t in mine.tensors.items()}
        model.load_state_dict(loaded, strict=False)
        write_megatron(directory / "megatron_run", model, config)
        if name in ZERO_CENTERED:
            model.load_state_dict({k: t + 1 if "norm" in k else t for k, t in loaded.items()}, strict=False)
        after = logits(model, tokens)
    return {
        "gradients": gradients(source, model, tokens, directory, facts),
        "before": float((before - expected).abs().max()),
        "after": float((after - expected).abs().max()),
        "size": float(expected.abs().max()),
        "pairs": len(found.pairs),
        "only_a": [t.key for t in found.only_a],
        "only_b": [t.key for t in found.only_b],
        "left_out": [[left.side, *left.names, left.reason] for left in found.left_out],
        "notes": found.notes,
    }


def gradients(source: Any, model: Any, tokens: Any, directory: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Gradients of one loss, as an optimizer's state of both models: how far the pairs are apart, and what is not in one."""
    import numpy as np
    from stored_arrays import array_of, checkpoint_of

    from msprobe_engine.align.parameters.align_names import align_checkpoints

    sides = []
    for side, outputs in ((model, logits(model, tokens)), (source, source(tokens).logits)):
        outputs.square().mean().backward()
        found = {f"exp_avg|{key}": p.grad.numpy() for key, p in side.named_parameters() if p.grad is not None}
        sides.append(checkpoint_of(found, directory / f"gradients{len(sides)}", facts))
    sides[0].values["args.rotary_interleaved"] = model.config.rotary_interleaved
    found = align_checkpoints(*sides)
    values = [(array_of(pair.a), array_of(pair.b)) for pair in found.pairs]
    noise = 1e-3 * max(float(np.abs(b).max()) for _, b in values)  # the gradient of a bias of keys is 0 but for rounding
    apart = [float(np.abs(a - b).max() / (np.abs(b).max() + noise)) for a, b in values]
    return {"pairs": len(apart), "apart": max(apart), "only": [t.key for t in (*found.only_a, *found.only_b)]}


def write_megatron(directory: Path, model: Any, config: Any) -> None:
    """The checkpoint that Megatron's ``save_checkpoint`` writes with ``--ckpt-format torch`` on one rank, without an optimizer."""
    from argparse import Namespace

    import torch

    made = model.config
    args = Namespace(**{key: value for key, value in vars(made).items() if isinstance(value, int | float | str | bool)})
    args.swiglu, args.num_experts, args.group_query_attention = made.gated_linear_unit, made.num_moe_experts, True
    args.untie_embeddings_and_output_weights = not model.share_embeddings_and_output_weights
    args.vocab_size = args.padded_vocab_size = config.vocab_size
    file = directory / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 1, "model": model.state_dict_for_save_checkpoint()}, file)
    (directory / "latest_checkpointed_iteration.txt").write_text("1")


def saved(directory: Path) -> dict[str, Any]:
    """What transformers wrote."""
    from safetensors.numpy import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def logits(model: Any, tokens: Any) -> Any:
    """Forward of a megatron-core model, [batch, sequence, vocabulary]."""
    import torch

    length = tokens.shape[1]
    mask = torch.tril(torch.ones(1, 1, length, length)) < 0.5
    return model(tokens, torch.arange(length)[None].expand_as(tokens), mask)


def megatron(config: Any, *, tied: bool = False, mla: bool = False, position: str = "rope", **settings: Any) -> Any:
    """A GPT of megatron-core with the sizes of a configuration of transformers."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "layernorm_epsilon": getattr(config, "rms_norm_eps", 1e-5),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "params_dtype": torch.float32,
        "moe_grouped_gemm": False,
        "use_cpu_initialization": True,
    }
    made = (MLATransformerConfig if mla else TransformerConfig)(**(values | settings))
    spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization=made.normalization)
    if mla:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = latent_attention()
    return GPTModel(
        config=made,
        transformer_layer_spec=spec,
        vocab_size=96,
        max_sequence_length=32,
        share_embeddings_and_output_weights=tied,
        position_embedding_type=position,
        rotary_percent=getattr(config, "rope_parameters", {}).get("partial_rotary_factor", 1.0),
        rotary_base=getattr(config, "rope_parameters", {}).get("rope_theta", 10000.0),
    )


def latent_attention() -> type:
    """Attention whose values are not as wide as its keys: megatron-core has that only with Transformer Engine."""
    import torch
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.TELinear = multi_latent_attention.TEColumnParallelLinear = ()  # asked for even where it is not installed

    class Attention(torch.nn.Module):
        def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
            super().__init__()
            self.scale = softmax_scale

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            return mixed.permute(2, 0, 1, 3).flatten(2)

    return Attention


def llama(tied: bool = False) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**COMMON, tie_word_embeddings=tied)
    return LlamaForCausalLM(config), megatron(config, tied=tied)


def gpt2() -> tuple[Any, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=32, attn_implementation="eager")
    settings = {
        "ffn_hidden_size": 128,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "num_query_groups": 4,
        "add_bias_linear": True,
    }
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    return GPT2LMHeadModel(config), megatron(config, tied=True, position="learned_absolute", activation_func=gelu, **settings)


def qwen2() -> tuple[Any, Any]:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**COMMON)
    return Qwen2ForCausalLM(config), megatron(config, add_qkv_bias=True)


def qwen3(interleaved: bool = False) -> tuple[Any, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**COMMON, head_dim=16)
    return Qwen3ForCausalLM(config), megatron(config, qk_layernorm=True, kv_channels=16, rotary_interleaved=interleaved)


def phi3() -> tuple[Any, Any]:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(**COMMON, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return Phi3ForCausalLM(config), megatron(config)


def neox() -> tuple[Any, Any]:
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    sizes = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
    config = GPTNeoXConfig(
        **sizes, use_parallel_residual=False, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, rotary_pct=1.0
    )
    settings = {"normalization": "LayerNorm", "gated_linear_unit": False, "num_query_groups": 4, "add_bias_linear": True}
    return GPTNeoXForCausalLM(config), megatron(config, activation_func=torch.nn.functional.gelu, **settings)


def starcoder2() -> tuple[Any, Any]:
    import torch
    from transformers import Starcoder2Config, Starcoder2ForCausalLM

    config = Starcoder2Config(**COMMON)
    settings = {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True, "layernorm_epsilon": config.norm_epsilon}
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    return Starcoder2ForCausalLM(config), megatron(config, tied=True, activation_func=gelu, **settings)


def experts(**settings: Any) -> dict[str, Any]:
    return {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        **settings,
    }


def mixtral() -> tuple[Any, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(config), megatron(config, **experts(moe_ffn_hidden_size=48))


def qwen2_moe() -> tuple[Any, Any]:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(**COMMON, **MOE, num_experts=4, shared_expert_intermediate_size=40, norm_topk_prob=False)
    settings = experts(
        moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True, moe_router_pre_softmax=True
    )
    return Qwen2MoeForCausalLM(config), megatron(config, add_qkv_bias=True, **settings)


def qwen3_moe() -> tuple[Any, Any]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**COMMON, **MOE, num_experts=4, head_dim=8, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config), megatron(config, qk_layernorm=True, **experts(moe_ffn_hidden_size=24))


def qwen3_next() -> tuple[Any, Any]:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    full = ["full_attention", "full_attention"]
    config = Qwen3NextConfig(**COMMON, **MOE, num_experts=4, shared_expert_intermediate_size=40, head_dim=8, layer_types=full)
    settings = experts(moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True)
    return Qwen3NextForCausalLM(config), megatron(config, qk_layernorm=True, attention_output_gate=True, kv_channels=8, **settings)


def deepseek(low_rank: bool = True) -> tuple[Any, Any]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    heads = {"kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 8}
    rank = 16 if low_rank else None
    routing = {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    }
    config = DeepseekV3Config(**(COMMON | {"num_key_value_heads": 4}), **MOE, **heads, **routing, q_lora_rank=rank)
    settings = experts(
        moe_ffn_hidden_size=24,
        moe_layer_freq=[0, 1],
        moe_shared_expert_intermediate_size=24,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        moe_router_topk_scaling_factor=2.5,
    )
    latent = {"q_lora_rank": rank, "kv_lora_rank": 12, "qk_head_dim": 4, "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "rope_type": "rope"}
    return DeepseekV3ForCausalLM(config), megatron(config, mla=True, qk_layernorm=True, **(settings | latent | {"num_query_groups": 4}))


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llama": llama,
    "llama-tied": partial(llama, tied=True),
    "gpt2": gpt2,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3-interleaved": partial(qwen3, interleaved=True),
    "phi3": phi3,
    "gpt-neox": neox,
    "starcoder2": starcoder2,
    "mixtral": mixtral,
    "qwen2-moe": qwen2_moe,
    "qwen3-moe": qwen3_moe,
    "qwen3-next": qwen3_next,
    "deepseek": deepseek,
    "deepseek-full-rank": partial(deepseek, low_rank=False),
}

if __name__ == "__main__":
    main()
