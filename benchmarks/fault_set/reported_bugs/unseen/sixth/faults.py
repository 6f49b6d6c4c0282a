"""Bugs that people reported, in parts that the sets before have not: states of linear attention over packed documents, experts in groups,
losses that make their gradients in the forward pass, products and moments of eight bits, pictures among words. Levels are drawn at random;
the cases were run once before the verdict engine was read: of 41 answers about faults 36 were named first, 1 in the first three, 1
elsewhere, 3 missed; of 25 about healthy ones 6 were right, 5 ended with exit code 3, 14 were accused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reported_bugs.case import Fault, Plant, in_model, when_ready
from reported_bugs.run_megatron import of
from reported_bugs.training import Setting
from reported_bugs.unseen.fifth.drawn import with_values
from reported_bugs.unseen.sixth import plants
from reported_bugs.unseen.sixth.plants import some

BOTH, EVERY = ("mix", "L0"), ("mix", "L0", "monitor")
BF16, AMP = Setting("hybrid"), Setting("hybrid", dtype="amp")
PACKED, PACKED_AMP = replace(BF16, packed=True), replace(AMP, packed=True)
PLAIN, WEIGHTED = replace(BF16, form="weighted"), replace(BF16, form="weighted fused")
GRPO = replace(BF16, rows=8, form="grpo")
TIED = Setting("hybrid", form="tied pipeline", micro=4, clip=0.5)
STAGES = replace(TIED, ranks=2)
PARTS_ONE = replace(BF16, clip=0.0)
PARTS = replace(PARTS_ONE, ranks=2)
FSDP = Setting("hybrid", dtype="fp32", ranks=2, wrap="fsdp", form="policy apart", clip=0.0)
OWN = replace(FSDP, form="policy own", clip=1.0)
ONE, ONE_CLIPPED = Setting("hybrid", form="masters apart", clip=0.0), Setting("hybrid", form="masters")
FREE, BLOCKS = replace(BF16, form="scheduleless", steps=4), replace(BF16, form="blocks", steps=4)
EIGHTHS = replace(BF16, form="eighths")
LATENT, CLAMPED, SEEING = Setting("latent"), Setting("clamped", dtype="amp"), Setting("seeing")
BALANCED = replace(AMP, form="balanced", steps=36)
EXPERTS = "--experts 4 --untie --set moe_z_loss_coeff=0.1 --bf16 --lr 1e-3"
UPDATE = r"param|weight|update|optimizer|exp_avg|Tensor\.\w+_\.|step|\blr\b"
LOSS = r"loss|criterion|cross_entropy|inforward|policy|div|exp|tokens|mul|sub"
MIXER, ROUTED = r"layers\.0\.attention", r"layers\.1\.mlp"


def pair(name: str, setting: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...] = BOTH, **more: Any) -> Fault:
    return Fault(f"noted: {name}", setting, plant, truth, seen, some(levels), **more)


def across(name: str, one: Setting, other: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...] = BOTH) -> Fault:
    return Fault(f"noted: {name}, other layout", one, plant, truth, seen, some(levels), other=other)


CASES = (
    pair(
        "state of other documents",
        PACKED,
        when_ready(plants.state_of_other_documents),
        MIXER,
        "packed sequences without cu_seqlens in linear attention",
    ),
    pair("window over documents", PACKED_AMP, when_ready(plants.window_over_documents), MIXER, "causal_conv1d without seq_idx"),
    pair("decays in bf16", replace(BF16, packed=True), when_ready(plants.decays_in_bf16), MIXER, "A_log and dt in bfloat16"),
    pair("best of a group", AMP, when_ready(plants.best_of_a_group), ROUTED, "group scores of DeepSeek V3"),
    pair("latent: scale without stretch", LATENT, in_model(plants.scale_without_stretch), r"self_attn", "NVIDIA/Megatron-LM#1429"),
    pair("clamped: halves for turns", CLAMPED, in_model(plants.halves_for_turns), r"layers\.1\.mlp", "gate_up_proj of GPT-OSS"),
    pair(
        "seeing: pictures in another order",
        SEEING,
        when_ready(plants.pictures_in_another_order),
        r"vision|pixel|picture|image|masked_scatter|input",
        "order of images in a batch",
        EVERY,
    ),
    pair(
        "seeing: states of another layer",
        SEEING,
        in_model(lambda model: setattr(model.config, "vision_feature_layer", -1)),
        r"vision|multi_modal|image|select|masked_scatter|getitem",
        "vision_feature_layer",
    ),
    pair("eight bits: scale of the input", EIGHTHS, when_ready(plants.scale_of_the_input), r"layers\.0\.mlp", "scale of the wrong operand"),
    pair(
        "gradient of the first token",
        WEIGHTED,
        when_ready(plants.gradient_of_the_first_token),
        LOSS + "|norm|head|decoder",
        "linkedin/Liger-Kernel#1298",
        EVERY,
    ),
    pair("temperature left out", GRPO, with_values(temperature_of_policy=1.0), LOSS, "log-probabilities without temperature", EVERY),
    pair("counted over two windows", GRPO, when_ready(plants.counted_over_two_windows), LOSS, "huggingface/trl#6024", EVERY),
    pair(
        "last micro batch dropped",
        replace(BF16, rows=6, micro=3),
        when_ready(plants.last_micro_batch_dropped),
        r"micro|only|missing|batch|label|loss|data|embedding|calls|sum|tokens",
        "drop_last of accumulation",
        EVERY,
    ),
    pair("mean for iterate", FREE, when_ready(plants.mean_for_iterate), UPDATE + "|lerp", "optimizer.train() left out", EVERY),
    pair("largest of the block before", BLOCKS, when_ready(plants.largest_of_the_block_before), UPDATE, "absmax of blocks", EVERY),
    across(
        "fsdp: router not reduced", ONE, FSDP, plants.not_reduced_apart, r"router|reduce|rank", "ignored parameters of fully_shard", EVERY
    ),
    across(
        "fsdp: experts not divided",
        ONE_CLIPPED,
        OWN,
        when_ready(plants.factor_of_one),
        r"experts|layers\.1\.mlp|grad|reduce|clip|norm",
        "set_gradient_divide_factor of experts",
        EVERY,
    ),
    across(
        "stages: copies of a tied table not summed",
        TIED,
        STAGES,
        plants.copies_not_summed,
        r"embedding|head|tied|grad|clip|reduce",
        "shared embedding of stages",
        EVERY,
    ),
    across(
        "parts of experts: weights not summed", PARTS_ONE, PARTS, plants.parts_of_experts(False), r"router|mlp\.experts", "router", EVERY
    ),
    across(
        "mcore: z-loss of each rank",
        of(EXPERTS),
        of(f"{EXPERTS} --tp 2 --sp"),
        plants.z_loss_of_each_rank,
        r"router|z_loss|mlp",
        "moe_z_loss_coeff under SP",
    ),
    Fault(
        "noted: alone: bias the other way",
        BALANCED,
        when_ready(plants.bias_the_other_way),
        r"router|experts|mlp",
        "sign of the expert bias",
        ("watch",),
        alone=True,
    ),
)
