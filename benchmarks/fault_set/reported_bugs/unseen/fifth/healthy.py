"""Pairs that differ in nothing but rounding, most of them in layouts, and single runs that are right; written down before the verdict
engine was read. They were run once before anything was changed for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reported_bugs.case import Healthy, Plant, nothing
from reported_bugs.run_megatron import of
from reported_bugs.training import Setting
from reported_bugs.unseen.fifth.drawn import some
from reported_bugs.unseen.fifth.faults import (
    AMP,
    BF16,
    BOTH,
    DDP,
    DPO_ROWS,
    EVERY,
    GQA,
    HSDP,
    MASTERS,
    MUON,
    ONE_POLICY,
    PARTS,
    PARTS_ONE,
    PLACES,
    POLICY,
    QK,
    SHARED,
    STAGES,
    STAGES_ONE,
    ZERO1,
    ZERO2,
)
from reported_bugs.unseen.fifth.in_ranks import heads_for_places, tensor_parallel


def pair(name: str, setting: Setting, other: Setting, levels: tuple[str, ...] = BOTH, plant: Plant = nothing) -> Healthy:
    return Healthy(f"told: {name}", setting, other, plant, some(levels))


def mcore(name: str, form: str, other: str, levels: tuple[str, ...] = BOTH) -> Healthy:
    return Healthy(f"told: mcore: {name}", of(form), of(other), levels=some(levels))


def alone(name: str, setting: Setting, levels: tuple[str, ...], plant: Plant = nothing) -> Healthy:
    return Healthy(f"told: alone: {name}", setting, None, plant, some(levels))


def changed(setting: Setting, **changes: Any) -> Setting:
    return replace(setting, changes=(*setting.changes, *changes.items()))


CALLS = changed(BF16, sinks=False)
LONG = replace(AMP, steps=36)
CASES = (
    mcore("groups of keys, tp 2 for one process, bf16", f"{GQA} --bf16 --lr 1e-3", f"{GQA} --tp 2 --bf16 --lr 1e-3", EVERY),
    mcore("shared expert, ep 2 for one process, bf16", f"{SHARED} --bf16 --nmb 4 --lr 1e-3", f"--ep 2 {SHARED} --bf16 --lr 1e-3", EVERY),
    mcore("norms of heads, sp 2 for one process, bf16", f"{QK} --bf16 --lr 1e-3", f"{QK} --tp 2 --sp --bf16 --lr 1e-3", EVERY),
    mcore("norms of heads, tp 2 for one process", f"{QK} --lr 1e-3", f"{QK} --tp 2 --lr 1e-3"),
    mcore("two stages for two data ranks with shards, bf16", "--dp 2 --distopt --bf16 --lr 1e-3", "--pp 2 --nmb 4 --bf16 --lr 1e-3", EVERY),
    mcore("groups computed again, bf16", f"{GQA} --tp 2 --sp --bf16", f"{GQA} --tp 2 --sp --recompute --bf16"),
    mcore("groups, tp 2 and two stages for one process, bf16", f"{GQA} {QK} --bf16 --nmb 4", f"{GQA} {QK} --tp 2 --pp 2 --nmb 4 --bf16"),
    mcore("shared expert, gather for all-to-all, bf16", f"--ep 2 {SHARED} --bf16", f"--ep 2 {SHARED} --allgather --bf16"),
    pair("two stages for one process, bf16", STAGES_ONE, STAGES, EVERY),
    pair("two stages for one process, fp32", replace(STAGES_ONE, dtype="fp32"), replace(STAGES, dtype="fp32")),
    pair("gpipe for 1f1b, bf16", STAGES, replace(STAGES, form="pipeline gpipe"), EVERY),
    pair("hsdp for one process, policy", ONE_POLICY, HSDP),
    pair("hsdp for fsdp, policy", replace(POLICY, ranks=4), HSDP, EVERY),
    pair("kept whole, policy", POLICY, replace(POLICY, form="policy kept"), EVERY),
    pair("static graph with small buckets for one process, amp", AMP, replace(AMP, ranks=2, wrap="ddp", form="static"), EVERY),
    pair("tp 2 of attention for one process, bf16", PARTS_ONE, PARTS, EVERY, tensor_parallel()),
    pair("heads for places, bf16", PARTS_ONE, PLACES, EVERY, heads_for_places()),
    pair("zero 2 for zero 1, bf16", ZERO1, ZERO2, EVERY),
    pair("chunks for a whole loss, bf16", BF16, replace(BF16, form="chunks")),
    pair("one call of attention, bf16", CALLS, changed(CALLS, one_call=True)),
    pair("groups not expanded, bf16", changed(CALLS, one_call=True), changed(CALLS, one_call=True, expanded=False)),
    pair("policy, two micro batches for one, bf16", DPO_ROWS, replace(DPO_ROWS, micro=2), EVERY),
    pair("copies in float32, ddp for one process, bf16", MASTERS, replace(MASTERS, ranks=2, wrap="ddp"), EVERY),
    pair("packed, ddp for two micro batches, bf16", replace(BF16, packed=True, micro=2), replace(DDP, packed=True)),
    alone("stages", replace(STAGES, steps=5, dtype="fp32"), EVERY),
    alone("hsdp", replace(HSDP, steps=6), EVERY),
    alone("rate that falls at the end", replace(LONG, form="wsd"), ("watch", "monitor")),
    alone("muon", replace(MUON, steps=30, dtype="amp"), ("watch", "monitor")),
    alone("policy with groups", replace(DPO_ROWS, steps=36, dtype="amp", lr=3e-4), ("watch", "monitor")),
    alone("tensor parallel", replace(PARTS, steps=5), EVERY, tensor_parallel()),
)
