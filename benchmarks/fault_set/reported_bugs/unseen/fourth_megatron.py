"""Bugs that people reported of trainings in parallel layouts (megatron-core), written down before the verdict engine and the other lists
were read; the size of each was drawn at random. They were run once before anything was changed for them."""

from __future__ import annotations

from typing import Any

from reported_bugs.case import Fault
from reported_bugs.run_megatron import of
from reported_bugs.unseen.fourth_plants import (
    BOTH,
    EVERY,
    LAYER,
    RATE,
    UPDATE,
    a_micro_batch_forgotten,
    activation_of_the_last_micro_batch,
    bucket_not_gathered,
    copies_not_reloaded,
    counted_tokens,
    experts_exchanged,
    heads_of_the_other_rank,
    interleaved_rotary,
    masks_not_restored,
    nan_of_an_expert,
    norm_of_the_second_rank,
    norms_centred_at_zero,
    one_token_later,
    padded_vocabulary,
    rate_of,
    read_before_reduced,
    routed_factor,
    row_biases_not_summed,
    rows,
    same_draws,
    second_rank_evaluates,
    shared_counted_twice,
    sigmoid_scores,
    some,
    update_skipped_by_the_second_rank,
    with_dropout,
)


def pair(name: str, form: str, plant: Any, truth: str, seen: str, levels: tuple[str, ...] = BOTH, **more: Any) -> Fault:
    return Fault(f"reported: mcore: {name}", of(form), plant, truth, seen, some(levels), **more)


def across(name: str, form: str, other: str, plant: Any, truth: str, seen: str, levels: tuple[str, ...] = BOTH) -> Fault:
    return Fault(f"reported: mcore: {name}, other layout", of(form), plant, truth, seen, some(levels), other=of(other))


def alone(name: str, form: str, plant: Any, truth: str, seen: str, levels: tuple[str, ...] = BOTH) -> Fault:
    return Fault(f"reported: mcore: {name}, alone", of(form), plant, truth, seen, some(levels), alone=True)


MOE = "--experts 4 --untie --bf16"
ROW_BIAS = r"linear_fc2|linear_proj|bias|all_reduce|" + UPDATE
CASES = (
    pair("row-parallel biases not summed under SP", "--tp 2 --sp --bf16", row_biases_not_summed, ROW_BIAS, "NVIDIA/Megatron-LM#1446"),
    across(
        "row-parallel biases not summed under SP",
        "--bf16 --lr 1e-3",
        "--tp 2 --sp --bf16 --lr 1e-3",
        row_biases_not_summed,
        ROW_BIAS,
        "NVIDIA/Megatron-LM#1446",
    ),
    pair(
        "loss by the tokens of each rank",
        "--dp 2 --bf16",
        counted_tokens(True),
        r"loss|div|sum|cross|output_layer|all_reduce",
        "calculate_per_token_loss",
        EVERY,
        golden=counted_tokens(False),
    ),
    pair(
        "learning rate of experts",
        "--dp 2 --experts 4 --untie --bf16 --lr 1e-3",
        rate_of(lambda group: any(p.dim() > 1 for p in group["params"]), RATE),
        r"\blr\b|learning|" + UPDATE,
        "decoupled rate",
        EVERY,
    ),
    pair(
        "part of a weight not gathered",
        "--dp 2 --distopt --bf16 --lr 1e-3",
        bucket_not_gathered,
        rf"layers\.{LAYER}\.mlp\.linear_fc1",
        "param gather",
        EVERY,
    ),
    across(
        "part of a weight not gathered",
        "--nmb 4 --bf16 --lr 1e-3",
        "--dp 2 --nmb 2 --distopt --bf16 --lr 1e-3",
        bucket_not_gathered,
        rf"layers\.{LAYER}\.mlp\.linear_fc1",
        "param gather",
    ),
    pair(
        "read before the sum has ended",
        "--dp 2 --overlap --bf16 --lr 1e-3",
        read_before_reduced,
        rf"layers\.{1 - LAYER}\.self_attention\.linear_proj|copy_|" + UPDATE,
        "overlap_grad_reduce",
    ),
    alone(
        "read before the sum has ended",
        "--dp 2 --overlap --bf16 --lr 1e-3",
        read_before_reduced,
        rf"layers\.{1 - LAYER}\.self_attention\.linear_proj",
        "overlap_grad_reduce",
        EVERY,
    ),
    across(
        "heads of the other rank",
        "--bf16",
        "--tp 2 --bf16",
        heads_of_the_other_rank,
        rf"layers\.{LAYER}\.self_attention",
        "conversion of checkpoints",
    ),
    pair(
        "rows that fill up the vocabulary",
        "--bf16",
        padded_vocabulary(False),
        r"output_layer|cross_entropy|masked_fill|loss",
        "make-vocab-size-divisible-by",
        golden=padded_vocabulary(True),
    ),
    pair(
        "one rank evaluates",
        "--dp 2 --bf16",
        second_rank_evaluates,
        r"layers\.0\.|drop",
        "model.eval() behind a condition",
        EVERY,
        golden=with_dropout,
    ),
    across(
        "experts exchanged on a rank",
        "--experts 4 --untie --nmb 4 --bf16",
        "--ep 2 --experts 4 --untie --nmb 2 --bf16",
        experts_exchanged,
        rf"layers\.{LAYER}\.mlp|experts",
        "all-to-all splits",
    ),
    pair("sigmoid for softmax", MOE, sigmoid_scores, r"layers\.0\.mlp|router|sigmoid|softmax|topk", "moe_router_score_function"),
    pair(
        "factor of routed experts",
        "--ep 2 " + MOE,
        routed_factor,
        r"layers\.0\.mlp|router|mul",
        "moe_router_topk_scaling_factor",
    ),
    pair("shared table twice in the norm", "--pp 2 --clip 0.05 --bf16", shared_counted_twice, UPDATE, "NVIDIA/Megatron-LM#5916"),
    pair("float32 copies not reloaded", "--bf16 --lr 1e-3", copies_not_reloaded, UPDATE + "|embedding|between", "load without optimizer"),
    pair(
        "first micro batch forgotten",
        "--nmb 4 --bf16 --lr 1e-3",
        a_micro_batch_forgotten,
        rf"layers\.{LAYER}\.mlp\.linear_fc2|mul",
        "gradient_accumulation_fusion",
    ),
    across(
        "message of the last micro batch",
        "--nmb 4 --bf16",
        "--pp 2 --nmb 4 --bf16",
        activation_of_the_last_micro_batch,
        r"layers\.1|copy_|recv|input",
        "recv not waited for",
    ),
    pair("rotary halves interleaved", "--tp 2 --bf16", interleaved_rotary, r"rotary|self_attention|stack|cat", "rotary_interleaved", EVERY),
    across(
        "norm centred at zero",
        "--bf16",
        "--tp 2 --sp --bf16",
        norms_centred_at_zero,
        rf"layers\.{LAYER}\.pre_mlp_layernorm",
        "layernorm_zero_centered_gamma",
    ),
    pair(
        "other masks when computed again",
        "--recompute --bf16 --lr 1e-3",
        masks_not_restored,
        r"drop|layers|recompute|Checkpoint|embedding|grad|backward",
        "RNG states under recomputation",
        golden=with_dropout,
    ),
    alone(
        "an update left out by one rank",
        "--dp 2 --fp16 --lr 1e-3",
        update_skipped_by_the_second_rank,
        r"rank|param|weight|embedding|update",
        "found_inf not summed",
        EVERY,
    ),
    alone(
        "all ranks read the same", "--dp 2 --bf16", rows(lambda _r, b: b, True), r"data|batch|input|token|same|embedding", "sampler", EVERY
    ),
    pair("rows of one rank shifted", "--dp 2 --bf16", rows(one_token_later), r"embedding|token|data|input", "data shard", EVERY),
    alone(
        "NaN of an expert",
        "--ep 2 --experts 4 --untie --bf16",
        nan_of_an_expert,
        r"layers\.1\.mlp\.experts|div",
        "0/0 in one expert",
        EVERY,
    ),
    alone(
        "a norm not read by one rank",
        "--tp 2 --bf16",
        norm_of_the_second_rank,
        rf"layers\.{LAYER}\.pre_mlp_layernorm",
        "partial load",
        EVERY,
    ),
    across(
        "one seed for all parts",
        "--bf16",
        "--tp 2 --bf16",
        same_draws,
        r"layers\.0\.(self_attention|input_layernorm)|linear_qkv",
        "init without the fork",
    ),
)
