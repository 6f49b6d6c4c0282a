"""Reported bugs of megatron-core's parallel layouts, and other ways to the same numbers."""

from __future__ import annotations

import sys
from typing import Any

from reported_bugs.case import Fault, Healthy
from reported_bugs.run_megatron import of


def decoder(chunks: list[Any]) -> Any:
    return chunks[0].decoder


def last_norm_not_summed(chunks: list[Any]) -> None:
    """The gradient of the last norm is not summed over the ranks that each have a part of the sequence."""
    for chunk in chunks:
        for parameter in chunk.decoder.final_layernorm.parameters():
            parameter.sequence_parallel = False


def norms_not_summed(chunks: list[Any]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "layernorm" in name:
                parameter.sequence_parallel = False


def embedding_not_summed(_chunks: list[Any]) -> None:
    """First and last stage keep their own gradients of the shared table."""
    finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]
    finalize._allreduce_word_embedding_grads = lambda *_args, **_more: None  # type: ignore[attr-defined]
    finalize._allreduce_embedding_grads = lambda *_args, **_more: None  # type: ignore[attr-defined]


def expert_gradients_larger(chunks: list[Any]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "experts" in name:
                parameter.register_hook(lambda grad: grad * 2)


def bias_on_each_rank(chunks: list[Any]) -> None:
    """The bias of a row-parallel layer is added before the sum: once per rank."""
    for layer in decoder(chunks).layers:
        layer.mlp.linear_fc2.bias.data.mul_(2)


def backward_not_summed(chunks: list[Any]) -> None:
    """What goes back into a column-parallel layer is not summed."""
    linear = decoder(chunks).layers[1].mlp.linear_fc1
    linear.allreduce_dgrad, linear.disable_grad_reduce = False, True


def forward_not_summed(chunks: list[Any]) -> None:
    from megatron.core.tensor_parallel import layers

    linear, reduce = decoder(chunks).layers[0].self_attention.linear_proj, layers.reduce_from_tensor_model_parallel_region
    own = linear.forward

    def forward(*args: Any, **more: Any) -> Any:
        layers.reduce_from_tensor_model_parallel_region = lambda x, **_: x
        try:
            return own(*args, **more)
        finally:
            layers.reduce_from_tensor_model_parallel_region = reduce

    linear.forward = forward


def same_shard(chunks: list[Any]) -> None:
    """Both ranks load the shard of the first one."""
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    weight = decoder(chunks).layers[0].mlp.linear_fc1.weight
    dist.broadcast(weight.data, 0, group=state.get_tensor_model_parallel_group())


def heads_swapped(chunks: list[Any]) -> None:
    """Queries, keys and values of a fused projection are laid out one after the other, not head by head."""
    for layer in decoder(chunks).layers:
        weight = layer.self_attention.linear_qkv.weight
        size = weight.shape[0] // 3
        heads = size // layer.self_attention.hidden_size_per_attention_head
        weight.data.copy_(weight.data.view(heads, 3, -1, weight.shape[1]).transpose(0, 1).reshape(weight.shape))


def shard_stale(chunks: list[Any]) -> None:
    """The second rank does not take over one weight after the update."""
    import torch.distributed as dist

    if dist.get_rank() != 1:
        return
    weight = decoder(chunks).layers[0].mlp.linear_fc2.weight
    kept = weight.detach().clone()

    def before(*_: Any) -> None:
        weight.data.copy_(kept)

    chunks[0].register_forward_pre_hook(before)


def gradients_kept(chunks: list[Any]) -> None:
    """Gradients of data-parallel ranks are not reduced."""
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.start_grad_sync = DistributedDataParallel.finish_grad_sync = lambda *_args, **_more: None  # type: ignore[method-assign]
    assert chunks


def router_of_one(chunks: list[Any]) -> None:
    for layer in decoder(chunks).layers:
        layer.mlp.router.topk = 1


def balance_off(chunks: list[Any]) -> None:
    for layer in decoder(chunks).layers:
        layer.mlp.router.config.moe_aux_loss_coeff = 0.1


def softmax_before(chunks: list[Any]) -> None:
    for layer in decoder(chunks).layers:
        layer.mlp.router.config.moe_router_pre_softmax = True


def rotary_base(chunks: list[Any]) -> None:
    import torch

    for chunk in chunks:
        inverse = chunk.rotary_pos_emb.inv_freq
        chunk.rotary_pos_emb.inv_freq = 1.0 / 500000.0 ** (torch.arange(0, 2 * len(inverse), 2).float() / (2 * len(inverse)))


def no_clipping_over_ranks(_chunks: list[Any]) -> None:
    """The norm that clips is this rank's own."""
    clip = sys.modules["megatron.core.optimizer.clip_grads"]
    own = clip.torch.distributed.all_reduce
    optimizers = sys.modules["megatron.core.optimizer.optimizer"]
    norm = optimizers.get_grad_norm_fp32  # type: ignore[attr-defined]

    def local(*args: Any, **more: Any) -> Any:
        clip.torch.distributed.all_reduce = lambda *_a, **_m: None
        try:
            return norm(*args, **more)
        finally:
            clip.torch.distributed.all_reduce = own

    optimizers.get_grad_norm_fp32 = local  # type: ignore[attr-defined]


def dropped(chunks: list[Any]) -> None:
    """Dropout behind the branches, with the same masks on all ranks."""
    for layer in decoder(chunks).layers:
        layer.hidden_dropout = 0.1


def dropped_otherwise(chunks: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    dropped(chunks)
    torch.manual_seed(1234 + dist.get_rank())


UPDATE = r"flatten_dense|norm|clip|Tensor\.\w+_\.|foreach|param|weight|grad"
SUM = r"all_reduce|reduce|Distributed|matmul|view_as|Linear"
TWO, THREE = ("mix", "L0"), ("mix", "L1", "L0")


def eps_of_the_second_layer(chunks: list[Any]) -> None:
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if layer.layer_number == 2:
                layer.input_layernorm.eps = 1e-3


def bias_of_the_first_rank(chunks: list[Any]) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state as state

    dist.broadcast(decoder(chunks).layers[1].self_attention.linear_qkv.bias.data, 0, group=state.get_tensor_model_parallel_group())


def scores_of_one_rank(chunks: list[Any]) -> None:
    """One rank scales the scores of its heads by another number."""
    from megatron.core import parallel_state as state

    if state.get_tensor_model_parallel_rank() == 1:
        decoder(chunks).layers[0].self_attention.core_attention.softmax_scale *= 1.25


CASES = (
    Fault(
        "mcore: eps of a later stage", of("--pp 2 --nmb 4"), eps_of_the_second_layer, r"layers\.\d\.input_layernorm", levels=("mix", "L0")
    ),
    Fault(
        "mcore: bias of the first rank",
        of("--tp 2"),
        bias_of_the_first_rank,
        r"layers\.1\.self_attention\.linear_qkv",
        levels=("mix", "L0"),
    ),
    Fault(
        "mcore: scores of one rank, from one process",
        of("--bf16"),
        scores_of_one_rank,
        r"layers\.0\.self_attention|core_attention",
        levels=("mix", "L0"),
        other=of("--tp 2 --bf16"),
    ),
    Fault(
        "mcore: last norm not summed under SP",
        of("--tp 2 --sp"),
        last_norm_not_summed,
        r"final_layernorm|norm|all_reduce|" + UPDATE,
        "NVIDIA/Megatron-LM#1446",
        TWO,
    ),
    Fault(
        "mcore: last norm not summed under SP, bf16",
        of("--tp 2 --sp --bf16"),
        last_norm_not_summed,
        r"final_layernorm|norm|all_reduce|" + UPDATE,
        "NVIDIA/Megatron-LM#1446",
        TWO,
    ),
    Fault(
        "mcore: norms not summed under SP, bf16",
        of("--tp 2 --sp --bf16"),
        norms_not_summed,
        r"norm|all_reduce|" + UPDATE,
        "NVIDIA-NeMo/Speech#4380",
        TWO,
    ),
    Fault(
        "mcore: shared embedding not summed over stages",
        of("--pp 2"),
        embedding_not_summed,
        r"embedding|all_reduce|output_layer|" + UPDATE,
        "pipeline with tied embeddings",
        THREE,
    ),
    Fault(
        "mcore: shared embedding not summed over stages, bf16",
        of("--pp 2 --bf16"),
        embedding_not_summed,
        r"embedding|all_reduce|output_layer|" + UPDATE,
        "pipeline with tied embeddings",
        TWO,
    ),
    Fault(
        "mcore: expert gradients twice as large",
        of("--ep 2 --experts 4 --untie"),
        expert_gradients_larger,
        r"experts|__mul__",
        "NVIDIA/Megatron-LM#5956, pytorch/pytorch#160285",
        THREE,
    ),
    Fault(
        "mcore: expert gradients twice as large, bf16",
        of("--ep 2 --experts 4 --untie --bf16"),
        expert_gradients_larger,
        r"experts|__mul__",
        "NVIDIA/Megatron-LM#5956",
        TWO,
    ),
    Fault(
        "mcore: bias added on each rank",
        of("--tp 2"),
        bias_on_each_rank,
        r"layers\.0\.mlp|bias|__add__",
        "row-parallel bias before the sum",
        THREE,
    ),
    Fault(
        "mcore: sum missing in the backward pass",
        of("--tp 2"),
        backward_not_summed,
        r"layers\.1\.(mlp|pre_mlp)|" + SUM,
        "allreduce_dgrad",
        THREE,
    ),
    Fault(
        "mcore: sum missing in the backward pass, bf16",
        of("--tp 2 --bf16"),
        backward_not_summed,
        r"layers\.1\.(mlp|pre_mlp)|" + SUM,
        "allreduce_dgrad",
        THREE,
    ),
    Fault(
        "mcore: sum missing in the forward pass, bf16",
        of("--tp 2 --bf16"),
        forward_not_summed,
        r"layers\.0\.self_attention|" + SUM,
        "row-parallel without reduce",
        THREE,
    ),
    Fault("mcore: both ranks load one shard, bf16", of("--tp 2 --bf16"), same_shard, r"layers\.0\.mlp", "conversion of checkpoints", THREE),
    Fault(
        "mcore: fused projection laid out otherwise, bf16",
        of("--tp 2 --bf16"),
        heads_swapped,
        r"layers\.0\.self_attention",
        "conversion of checkpoints",
        THREE,
    ),
    Fault(
        "mcore: a weight not updated on one rank",
        of("--dp 2"),
        shard_stale,
        r"layers\.0\.mlp\.linear_fc2|copy_",
        "stale parameter gather",
        TWO,
    ),
    Fault("mcore: gradients not reduced, bf16", of("--dp 2 --bf16"), gradients_kept, SUM + "|" + UPDATE, "grad sync skipped", TWO),
    Fault(
        "mcore: one expert for two, bf16",
        of("--experts 4 --untie --bf16"),
        router_of_one,
        r"layers\.0\.mlp|router|topk",
        "moe_router_topk",
        TWO,
    ),
    Fault(
        "mcore: balance weighted ten times, bf16",
        of("--experts 4 --untie --bf16"),
        balance_off,
        r"router|aux|mlp|__mul__",
        "moe_aux_loss_coeff",
        TWO,
    ),
    Fault(
        "mcore: softmax before the choice, bf16",
        of("--experts 4 --untie --bf16"),
        softmax_before,
        r"layers\.0\.mlp|router|softmax|topk",
        "moe_router_pre_softmax",
        TWO,
    ),
    Fault("mcore: rotary base, bf16", of("--bf16"), rotary_base, r"rotary", "rotary_base", THREE),
    Fault(
        "mcore: other dropout on each tensor-parallel rank, alone",
        of("--tp 2"),
        dropped_otherwise,
        r"dropout",
        "seeds per rank outside of the tensor-parallel region",
        alone=True,
    ),
    Fault(
        "mcore: other dropout on each tensor-parallel rank, alone, bf16",
        of("--tp 2 --bf16"),
        dropped_otherwise,
        r"dropout",
        "seeds per rank outside of the tensor-parallel region",
        alone=True,
    ),
    Fault("mcore: clipped by this rank's norm", of("--tp 2 --clip 0.05"), no_clipping_over_ranks, UPDATE, "NVIDIA/Megatron-LM#5916", TWO),
)


def pair(name: str, one: str, other: str, levels: tuple[str, ...] = TWO) -> Healthy:
    return Healthy(f"mcore: {name}", of(one), of(other), levels=levels)


HEALTHY = (
    pair("a repeat", "--tp 2", "--tp 2"),
    pair("tp 2 for one process", "", "--tp 2"),
    pair("tp 2 for one process, bf16", "--bf16", "--tp 2 --bf16"),
    pair("sp 2 for tp 2", "--tp 2", "--tp 2 --sp"),
    pair("sp 2 for tp 2, bf16", "--tp 2 --bf16", "--tp 2 --sp --bf16"),
    pair("pp 2 for one process", "", "--pp 2"),
    pair("pp 2 for one process, bf16", "--bf16", "--pp 2 --bf16"),
    pair("dp 2 for one process", "--nmb 4", "--dp 2 --nmb 2"),
    pair("dp 2 for one process, bf16", "--nmb 4 --bf16", "--dp 2 --nmb 2 --bf16"),
    pair("distributed optimizer", "--dp 2", "--dp 2 --distopt"),
    pair("distributed optimizer, bf16", "--dp 2 --bf16", "--dp 2 --distopt --bf16"),
    pair("overlapped reduction", "--dp 2", "--dp 2 --overlap"),
    pair("recomputation", "--tp 2", "--tp 2 --recompute"),
    pair("recomputation of attention, bf16", "--tp 2 --bf16", "--tp 2 --recompute-core --bf16"),
    pair("ep 2 for one process", "--experts 4 --untie --nmb 4", "--ep 2 --experts 4 --untie --nmb 2"),
    pair("tp 2 for one process, bf16, larger steps", "--bf16 --lr 1e-3", "--tp 2 --bf16 --lr 1e-3"),
    pair("pp 2 for one process, four micro batches", "--nmb 4 --untie --lr 1e-3", "--pp 2 --nmb 4 --untie --lr 1e-3"),
    pair("pp 2 for one process, bf16, four micro batches", "--nmb 4 --bf16 --lr 1e-3", "--pp 2 --nmb 4 --bf16 --lr 1e-3"),
    pair("pp 2 for one stage, tp 2", "--tp 2 --nmb 4 --lr 1e-3", "--tp 2 --pp 2 --nmb 4 --lr 1e-3"),
    pair("pp 2 for one process, experts", "--experts 4 --untie --nmb 4", "--pp 2 --experts 4 --untie --nmb 4"),
    Healthy("mcore: alone, tp 2 with dropout", of("--tp 2"), None, dropped, TWO),
    Healthy("mcore: alone, sp 2 with dropout", of("--tp 2 --sp"), None, dropped, TWO),
    Healthy("mcore: alone, dp 2 with dropout", of("--dp 2"), None, dropped, TWO),
    Healthy("mcore: alone, sp 2", of("--tp 2 --sp --bf16"), None, levels=TWO),
    Healthy("mcore: alone, ep 2", of("--ep 2 --experts 4 --untie"), None, levels=TWO),
)
