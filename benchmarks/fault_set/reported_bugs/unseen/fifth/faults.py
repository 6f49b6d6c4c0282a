"""Bugs that people reported, in layouts, in new parts of models and in single runs; written down before the verdict engine was read, the
size of each drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reported_bugs.case import Fault, Plant, in_model, nothing, when_ready
from reported_bugs.run_megatron import of
from reported_bugs.training import Setting
from reported_bugs.unseen.fifth import in_megatron, in_models, in_ranks
from reported_bugs.unseen.fifth.drawn import LAYER, START, instead, some, with_values

BOTH, THREE, EVERY = ("mix", "L0"), ("mix", "L0", "L1"), ("mix", "L0", "monitor")
BF16, AMP, FP16 = Setting("decoder"), Setting("decoder", dtype="amp"), Setting("decoder", dtype="fp16")
DDP = replace(BF16, ranks=2, wrap="ddp")
PLAIN = (("next", False), ("sinks", False))
STAGES_ONE = Setting("decoder", form="pipeline", changes=PLAIN, micro=4, clip=0.5)
STAGES = replace(STAGES_ONE, ranks=2)
PARTS_ONE = Setting("decoder", changes=PLAIN, clip=0.0)
PARTS = replace(PARTS_ONE, ranks=2)
PLACES = replace(PARTS, wrap="ddp")
POLICY = Setting("decoder", dtype="fp32", ranks=2, wrap="fsdp", form="policy")
HSDP = replace(POLICY, ranks=4, form="policy hsdp")
ONE_POLICY = Setting("decoder", form="masters")
ZERO1, ZERO2 = replace(DDP, wrap="deepspeed1"), replace(DDP, wrap="deepspeed2")
DPO_ROWS = replace(BF16, rows=8, form="grpo")
UPDATE = r"param|weight|update|optimizer|exp_avg|momentum|Tensor\.\w+_\.|step|\blr\b"


def pair(name: str, setting: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...] = BOTH, **more: Any) -> Fault:
    return Fault(f"told: {name}", setting, plant, truth, seen, some(levels), **more)


def across(
    name: str, setting: Setting, other: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...] = BOTH, **more: Any
) -> Fault:
    return Fault(f"told: {name}, other layout", setting, plant, truth, seen, some(levels), other=other, **more)


def alone(name: str, setting: Setting, plant: Plant, truth: str, seen: str, levels: tuple[str, ...], **more: Any) -> Fault:
    return Fault(f"told: alone: {name}", setting, plant, truth, seen, some(levels), alone=True, **more)


GQA, SHARED = "--set num_query_groups=2", "--experts 4 --untie --set moe_shared_expert_intermediate_size=32"
QK = "--set qk_layernorm=true"
IN_LAYER, ATTENTION, MLP = rf"layers\.{LAYER}\.", rf"layers\.{LAYER}\.(self_)?attention", rf"layers\.{LAYER}\.mlp"
MEGATRON = (
    across(
        "mcore: groups of keys",
        of(f"{GQA} --bf16"),
        of(f"{GQA} --tp 2 --bf16"),
        in_megatron.groups_exchanged,
        ATTENTION,
        "GQA",
    ),
    pair("mcore: shared expert weighted", of(f"--ep 2 {SHARED} --bf16"), in_megatron.shared_expert_twice, MLP, "shared expert gate"),
    across(
        "mcore: shared expert weighted",
        of(f"{SHARED} --bf16 --nmb 4"),
        of(f"--ep 2 {SHARED} --bf16"),
        in_megatron.shared_expert_twice,
        MLP,
        "shared expert gate",
    ),
    across(
        "mcore: gradients between stages",
        of("--nmb 4 --bf16 --lr 1e-3"),
        of("--pp 2 --nmb 4 --bf16 --lr 1e-3"),
        in_megatron.gradient_between_stages,
        r"layers\.0\b|decoder\.Transformer\w+\.backward|send|recv|layers\.1",
        "scale of gradients between stages",
        EVERY,
    ),
    across(
        "mcore: end of a part of the vocabulary",
        of("--bf16 --untie"),
        of("--tp 2 --bf16 --untie"),
        in_megatron.last_word_of_a_part,
        r"cross_entropy|loss|output_layer|vocab",
        "exclusive end",
        THREE,
    ),
    pair(
        "mcore: decay of the second rank",
        of("--dp 2 --distopt --bf16 --lr 1e-2"),
        in_megatron.decay_of_the_second_rank,
        r"decay|mul_|" + UPDATE,
        "groups of a rank after a restart",
        EVERY,
    ),
    pair(
        "mcore: duplicates in the norm",
        of("--tp 2 --bf16 --clip 0.1 --lr 1e-3"),
        in_megatron.duplicates_in_the_norm,
        r"clip|norm|grad|multi_tensor|mul_|copy_|" + UPDATE,
        "norm over tensor parallel duplicates",
        EVERY,
    ),
    across(
        "mcore: duplicates in the norm",
        of("--bf16 --clip 0.1 --lr 1e-3"),
        of("--tp 2 --bf16 --clip 0.1 --lr 1e-3"),
        in_megatron.duplicates_in_the_norm,
        r"clip|norm|grad|multi_tensor|mul_|copy_|" + UPDATE,
        "norm over tensor parallel duplicates",
        EVERY,
    ),
    across(
        "mcore: a layer not divided",
        of("--nmb 4 --bf16 --lr 1e-3"),
        of("--dp 2 --bf16 --lr 1e-3"),
        in_megatron.last_bucket_not_divided,
        MLP + "|mul_",
        "bucket with another factor",
        EVERY,
    ),
    across(
        "mcore: chances of another token",
        of("--experts 4 --untie --bf16 --nmb 4"),
        of("--ep 2 --experts 4 --untie --bf16"),
        in_megatron.chances_of_another_token,
        MLP,
        "permutation of chances",
    ),
    across(
        "mcore: norms of heads not summed",
        of(f"{QK} --bf16 --lr 1e-3"),
        of(f"{QK} --tp 2 --bf16 --lr 1e-3"),
        in_megatron.norms_of_heads_not_summed,
        r"[qk]_layernorm|all_reduce",
        "NVIDIA/Megatron-LM qk norm under TP",
        EVERY,
    ),
    pair(
        "mcore: chosen and weighted with a slope",
        of("--tp 2 --sp --ep 2 --experts 4 --untie --bf16"),
        in_megatron.router_rounds,
        r"router",
        "bias in weights",
    ),
    alone(
        "mcore: a norm not summed",
        of("--tp 2 --sp --bf16 --lr 1e-3"),
        in_megatron.norm_of_a_layer_not_summed,
        rf"layers\.{LAYER}\.input_layernorm",
        "sequence_parallel flag",
        ("mix", "monitor"),
    ),
)
RANKS = (
    pair(
        "ddp: small gradients dropped",
        DDP,
        when_ready(in_ranks.small_gradients_dropped),
        r"grad|reduce|\bddp|weight|param|backward",
        "hook",
    ),
    across(
        "ddp: small gradients dropped",
        replace(BF16, micro=2),
        DDP,
        when_ready(in_ranks.small_gradients_dropped),
        r"grad|reduce|\bddp|weight|param|backward",
        "hook",
        EVERY,
    ),
    across("ddp: ignored", AMP, replace(AMP, ranks=2, wrap="ddp"), in_ranks.ignored_when_wrapped, r"ahead\.joined", "ignored names", EVERY),
    pair(
        "fsdp: places cast by the policy",
        POLICY,
        in_ranks.far_places(True),
        r"layers\.0|rotary|turn|position|input",
        "cast_forward_inputs",
        THREE,
        golden=in_ranks.far_places(False),
    ),
    across("hsdp: replicas apart", ONE_POLICY, HSDP, in_ranks.replicas_apart, r"reduce|grad|rank|backward|" + UPDATE, "mesh", BOTH),
    alone(
        "hsdp: replicas apart", replace(HSDP, steps=5), in_ranks.replicas_apart, r"rank|reduce|copies|part|differ|" + UPDATE, "mesh", EVERY
    ),
    across(
        "zero 2 beside zero 1: rate of norms",
        ZERO1,
        ZERO2,
        when_ready(in_ranks.half_of_the_rate),
        r"\blr\b|rate|norm|before|between|sinks|" + UPDATE,
        "schedule of groups",
        EVERY,
    ),
    across(
        "zero 2 beside zero 1: labels lost",
        ZERO1,
        ZERO2,
        when_ready(in_ranks.lost_labels),
        r"label|loss|cross|criterion|head|data",
        "length",
        EVERY,
    ),
    across(
        "stages: divided by micro batches twice",
        STAGES_ONE,
        STAGES,
        with_values(scaled_by_schedule=True),
        r"grad|div|scale|param|weight|" + UPDATE,
        "scale_grads",
        EVERY,
    ),
    across(
        "stages: layers counted by each",
        STAGES_ONE,
        STAGES,
        when_ready(in_ranks.counted_in_a_stage),
        r"layers\.1\.attention",
        "numbers of layers",
    ),
    across(
        "stages: stale message",
        STAGES_ONE,
        STAGES,
        when_ready(in_ranks.stale_message),
        r"layers\.1|recv|Decoder|changed it in between|__setitem__",
        "buffer read early",
    ),
    across(
        "tp: norms of heads not summed",
        PARTS_ONE,
        PARTS,
        in_ranks.tensor_parallel(summed=False),
        r"[qk]_norm",
        "norm weights under TP",
        EVERY,
        golden=nothing,
    ),
    across("tp: groups exchanged", PARTS_ONE, PARTS, in_ranks.tensor_parallel(exchanged=True), ATTENTION, "order of the mesh"),
    across("heads come back in another order", PARTS_ONE, PLACES, in_ranks.heads_for_places(True), ATTENTION, "Ulysses", BOTH),
)
CHUNKS = replace(BF16, form="chunks", rows=3)
MUON, LION = replace(BF16, form="muon", lr=2e-2), replace(AMP, form="lion", lr=1e-3)
MASTERS = replace(BF16, form="masters")
SLOPES = replace(BF16, changes=(("slopes", True),))
LOSS = r"loss|criterion|cross_entropy|kl_div|advantage|std|mean|exp|sum|mul|sub"
MODELS = (
    pair("sinks left out", BF16, in_model(in_models.without_sinks), ATTENTION, "sinks", THREE),
    pair("sinks of other heads", AMP, in_model(in_models.sinks_of_other_heads), ATTENTION, "sinks"),
    pair("normed behind the turn", BF16, in_model(in_models.normed_behind_the_turn), r"layers\.0\.attention", "order of norm and rotary"),
    pair("slopes in turn", SLOPES, in_model(in_models.slopes_in_turn), ATTENTION, "slopes of ALiBi", THREE),
    pair("multiplier of the head", BF16, in_model(in_models.multiplier_lost), r"logits|multiplier|decoder|head|mul", "muP", EVERY),
    pair(
        "window in the other layers",
        replace(BF16, packed=True),
        in_model(in_models.window_in_the_wrong_layer),
        r"layers\.0\.attention",
        "i",
    ),
    pair("second prediction one early", BF16, when_ready(instead("loss_ahead", in_models.one_token_ahead)), LOSS, "labels of MTP"),
    pair(
        "last chunk lost",
        CHUNKS,
        when_ready(instead("in_chunks", in_models.last_chunk_lost)),
        LOSS,
        "range",
        coarse=LOSS + "|head|backward",
    ),
    pair(
        "z-loss ten times weaker",
        replace(AMP, steps=4),
        with_values(z_weight=1e-3),
        LOSS + r"|logsumexp|z_loss",
        "default",
        EVERY,
        coarse=LOSS + "|head|backward",
    ),
    pair(
        "distillation without its factor",
        replace(BF16, form="distill"),
        when_ready(instead("factor_of_distillation", in_models.no_factor)),
        LOSS,
        "T",
        THREE,
        coarse=LOSS + "|head|backward",
    ),
    pair(
        "advantages over the batch",
        DPO_ROWS,
        when_ready(instead("advantages", in_models.over_the_batch)),
        LOSS,
        "GRPO",
        EVERY,
        coarse=LOSS + "|head|backward",
    ),
    pair(
        "first estimate of the divergence",
        DPO_ROWS,
        when_ready(instead("divergence", in_models.first_estimate)),
        LOSS,
        "k1 for k3",
        BOTH,
        coarse=LOSS + "|head|backward",
    ),
    pair("muon unscaled", MUON, when_ready(in_models.muon_unscaled), r"mlp\.(gate|up)|mul|" + UPDATE, "scale of Muon", EVERY),
    pair("muon with three rounds", MUON, when_ready(in_models.muon_rounds), r"orthogonal|matmul|" + UPDATE, "rounds", EVERY),
    pair("betas of lion exchanged", LION, when_ready(in_models.lion_betas), r"beta|lerp|sign|" + UPDATE, "betas", EVERY),
    pair("copies of a layer one late", MASTERS, when_ready(in_models.late_copies), IN_LAYER + "|copy_", "order of copies", EVERY),
    pair(
        "clipped while half is scaled",
        FP16,
        when_ready(in_models.clipped_while_scaled),
        r"clip|scale|grad|mul_|norm",
        "two optimizers",
        BOTH,
    ),
    pair(
        "rate falls early",
        replace(AMP, form="wsd", steps=30),
        when_ready(in_models.falls_early),
        r"\blr\b|learning|rate",
        "WSD",
        ("monitor", "watch"),
    ),
)
LONG = replace(AMP, steps=36)
SINGLE = (
    alone(
        "log of chances",
        replace(FP16, form="distill"),
        when_ready(instead("distilled", in_models.log_of_chances)),
        r"log|mul|sub|softmax|half",
        "log of zero",
        THREE,
        step=0,
    ),
    alone("queries run away", LONG, when_ready(in_models.scores_grow), rf"layers\.{LAYER}\.attention", "no norm", ("watch", "monitor")),
    alone(
        "second loss breaks on a rank",
        replace(LONG, ranks=2, wrap="ddp"),
        when_ready(in_models.ahead_breaks_on_a_rank),
        r"loss|ahead|grad",
        "mean of nothing",
        ("watch", "monitor", "nan"),
        step=START - 1,
    ),
)
CASES = (*MEGATRON, *RANKS, *MODELS, *SINGLE)
