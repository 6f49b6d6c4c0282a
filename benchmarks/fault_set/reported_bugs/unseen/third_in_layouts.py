"""Bugs that appear with a layout (FSDP2, DeepSpeed, megatron-core), written down from reports before the verdict engine and the other
lists were read; the size of each was drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from reported_bugs.case import Fault, when_ready
from reported_bugs.faults.in_deepspeed import ZERO1, ZERO3
from reported_bugs.faults.in_ranks import DATA, REDUCED, second_rank
from reported_bugs.run_megatron import of
from reported_bugs.training import Program
from reported_bugs.unseen.third_in_models import BF16, BOTH, DRAW, FP32, LAYER, drawn
from reported_bugs.unseen.third_in_updates import own_shuffle
from torch import Tensor

GARBAGE, RATIO = drawn(0.5, 0.9), drawn(1.2, 2.5)
SPECIAL = DRAW.choice((LAYER, 1 - LAYER))
FSDP, FSDP_FP32 = replace(BF16, ranks=2, wrap="fsdp"), replace(FP32, ranks=2, wrap="fsdp")


def buffer_of_the_second_rank(program: Program) -> None:
    """A buffer that no checkpoint has is not filled on the other rank."""
    if program.rank == 1:
        program.model.rotary.inverse.mul_(GARBAGE)


def reduced_in_bf16(program: Program) -> None:
    def wrap() -> None:
        from torch.distributed import fsdp

        own, policy = fsdp.fully_shard, fsdp.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        fsdp.fully_shard = lambda module: own(module, mp_policy=policy)
        try:
            Program.wrap(program)
        finally:
            fsdp.fully_shard = own

    program.wrap = wrap  # type: ignore[method-assign]


def one_group(program: Program) -> None:
    program.groups = lambda: [{"params": list(program.model.parameters()), "weight_decay": program.setting.decay}]  # type: ignore[method-assign]


# ---- megatron-core ----------------------------------------------------------------------------------------------------------


def layers_of(chunks: list[Any]) -> list[Any]:
    return [layer for chunk in chunks for layer in chunk.decoder.layers]


def router_not_summed(chunks: list[Any]) -> None:
    for layer in layers_of(chunks):
        layer.mlp.router.weight.sequence_parallel = False


def balance_of_each_micro_batch(chunks: list[Any]) -> None:
    """The loss that balances is not divided by the number of micro batches."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    own = MoEAuxLossAutoScaler.set_loss_scale
    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(lambda scale: own(scale * 4))
    assert chunks


def vocabulary_one_off(chunks: list[Any]) -> None:
    """The second rank takes its part of the table to begin one word later."""
    if dist.get_rank() == 1:
        chunks[0].embedding.word_embeddings.vocab_start_index += 1


def gathered_in_another_order(chunks: list[Any]) -> None:
    """The parts of a sequence are put together the wrong way round."""

    def hook(_module: Any, _given: Any, out: Any) -> Any:
        first, second = out[0].chunk(2)
        return (torch.cat([second, first]), *out[1:])

    layers_of(chunks)[SPECIAL].mlp.linear_fc1.register_forward_hook(hook)


def table_of_the_last_stage(chunks: list[Any]) -> None:
    """The last stage begins with a table of its own."""
    for chunk in chunks:
        if chunk.post_process and not chunk.pre_process:
            generator = torch.Generator().manual_seed(12)
            weight = chunk.shared_embedding_or_output_weight()
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))


def experts_of_the_first_rank(chunks: list[Any]) -> None:
    from megatron.core import parallel_state as state

    for layer in layers_of(chunks):
        for parameter in layer.mlp.experts.parameters():
            dist.broadcast(parameter.data, 0, group=state.get_expert_model_parallel_group())


def scores_of_a_stage(chunks: list[Any]) -> None:
    """The scores of the second layer, on its own stage, are scaled by the number of the layer once more."""
    for layer in layers_of(chunks):
        if layer.layer_number == 2:
            layer.self_attention.core_attention.softmax_scale = (layer.self_attention.core_attention.softmax_scale or 0.35) / RATIO


def dropped_sum(chunks: list[Any]) -> None:
    """A row-parallel layer of one layer scales its part before the sum by the number of ranks."""

    def hook(_module: Any, _given: Any, out: Any) -> Any:
        return (out[0] / 2, *out[1:])

    layers_of(chunks)[SPECIAL].self_attention.linear_proj.register_forward_hook(hook)


def gradient_of_a_part(chunks: list[Any]) -> None:
    """The gradient of a norm's weight is an average over tensor-parallel ranks of what should be a sum."""

    def halve(grad: Tensor) -> Tensor:
        return grad / 2

    for parameter in layers_of(chunks)[SPECIAL].input_layernorm.parameters():
        parameter.register_hook(halve)


def across(name: str, setting: Any, other: Any, plant: Any, truth: str, seen: str, **more: Any) -> Fault:
    return Fault(f"other layout: {name}", setting, plant, truth, seen, other=other, **{"levels": BOTH, **more})


SUM = r"|all_reduce|reduce|grad|param|weight|norm"
MCORE = (
    Fault(
        "mcore: router not summed under SP",
        of("--tp 2 --sp --experts 4 --untie"),
        router_not_summed,
        "router" + SUM,
        "NVIDIA/Megatron-LM#619",
        BOTH,
    ),
    Fault(
        "mcore: router not summed under SP, bf16",
        of("--tp 2 --sp --experts 4 --untie --bf16"),
        router_not_summed,
        "router" + SUM,
        "NVIDIA/Megatron-LM#619",
        BOTH,
    ),
    Fault(
        "mcore: balance of each micro batch in full, bf16",
        of("--experts 4 --untie --nmb 4 --bf16"),
        balance_of_each_micro_batch,
        r"router|aux|mlp|loss",
        "NVIDIA-NeMo/Automodel#3359",
        BOTH,
    ),
    across(
        "mcore: part of the vocabulary one off, bf16",
        of("--bf16"),
        of("--tp 2 --bf16"),
        vocabulary_one_off,
        "embedding",
        "vocab_start_index",
    ),
    Fault(
        "mcore: parts of a sequence in another order",
        of("--tp 2 --sp --bf16"),
        gathered_in_another_order,
        rf"layers\.{SPECIAL}\.mlp|cat",
        "all-gather",
        BOTH,
    ),
    across(
        "mcore: table of the last stage, bf16",
        of("--bf16"),
        of("--pp 2 --bf16"),
        table_of_the_last_stage,
        "output_layer|embedding",
        "tied over stages",
    ),
    across(
        "mcore: experts of the first rank, bf16",
        of("--experts 4 --untie --nmb 4 --bf16"),
        of("--ep 2 --experts 4 --untie --nmb 2 --bf16"),
        experts_of_the_first_rank,
        r"experts|layers\.0\.mlp",
        "number of the expert ignored",
    ),
    across(
        "mcore: scores of a later stage, bf16",
        of("--bf16"),
        of("--pp 2 --bf16"),
        scores_of_a_stage,
        r"layers\.1\.self_attention|core_attention",
        "layer number of a stage",
    ),
    across(
        "mcore: divided before the sum, bf16",
        of("--bf16"),
        of("--tp 2 --bf16"),
        dropped_sum,
        rf"layers\.{SPECIAL}\.self_attention|linear_proj|div",
        "mean for sum",
    ),
    across(
        "mcore: a norm's gradient is a mean, bf16",
        of("--bf16 --lr 1e-3"),
        of("--tp 2 --bf16 --lr 1e-3"),
        gradient_of_a_part,
        rf"layers\.{SPECIAL}\.input_layernorm|div",
        "mean for sum",
    ),
)
CASES = (
    Fault(
        "fsdp: a buffer not filled on one rank",
        FSDP,
        when_ready(buffer_of_the_second_rank),
        r"rotary|inverse|cos|sin",
        "NovaSky-AI/SkyRL#1709",
        BOTH,
    ),
    Fault("fsdp: gradients reduced in bf16", FSDP_FP32, reduced_in_bf16, REDUCED, "reduce_dtype", ("mix", "monitor")),
    across("a rank shuffles otherwise", FP32, replace(FP32, ranks=2, wrap="ddp"), second_rank(own_shuffle), DATA + "|token", "sampler"),
    across("a rank shuffles otherwise, bf16", BF16, FSDP, second_rank(own_shuffle), DATA + "|token", "sampler"),
    across(
        "a buffer not filled on one rank",
        BF16,
        FSDP,
        when_ready(buffer_of_the_second_rank),
        r"rotary|inverse|cos|sin",
        "NovaSky-AI/SkyRL#1709",
    ),
    across(
        "zero 3 for zero 1: all decay",
        replace(ZERO1, lr=5e-3, decay=4 * RATIO, steps=6),
        replace(ZERO3, lr=5e-3, decay=4 * RATIO, steps=6),
        one_group,
        r"norm|decay|weight|param",
        "groups lost",
        levels=("L0", "monitor"),
    ),
    *MCORE,
)
