"""Pairs that differ in nothing but rounding, and single runs that are right; written down before the verdict engine was read."""

from __future__ import annotations

from dataclasses import replace

from reported_bugs.case import Healthy, Plant, nothing, when_ready
from reported_bugs.training import Setting
from reported_bugs.unseen.sixth.faults import (
    BALANCED,
    BF16,
    BLOCKS,
    BOTH,
    CLAMPED,
    EVERY,
    FREE,
    FSDP,
    LATENT,
    ONE,
    ONE_CLIPPED,
    OWN,
    PACKED,
    PARTS,
    PARTS_ONE,
    PLAIN,
    SEEING,
    STAGES,
    TIED,
    WEIGHTED,
)
from reported_bugs.unseen.sixth.plants import mixer, parts_of_experts, some


def pair(name: str, setting: Setting, other: Setting, levels: tuple[str, ...] = BOTH, plant: Plant = nothing) -> Healthy:
    return Healthy(f"noted: {name}", setting, other, plant, some(levels))


CASES = (
    pair("step by step, bf16", PACKED, PACKED, BOTH, when_ready(lambda p: setattr(mixer(p), "stepwise", True))),
    pair("experts together, bf16", BF16, BF16, BOTH, when_ready(lambda p: setattr(p.experts(), "together", True))),  # type: ignore[attr-defined]
    pair("loss in the forward pass, bf16", PLAIN, WEIGHTED, EVERY),
    pair("lists of tensors, bf16", FREE, FREE, EVERY, when_ready(lambda p: setattr(p.optimizer, "lists", True))),
    pair("blocks, ddp for one process, bf16", BLOCKS, replace(BLOCKS, ranks=2, wrap="ddp"), EVERY),
    pair("stages with a tied table for one process, bf16", TIED, STAGES, EVERY),
    pair("fsdp with a router apart for one process", ONE, FSDP, EVERY),
    pair("fsdp with experts of their own for one process", ONE_CLIPPED, OWN, EVERY),
    pair("parts of experts for one process, bf16", PARTS_ONE, PARTS, EVERY, parts_of_experts()),
    pair("latent: eager attention for sdpa, bf16", LATENT, replace(LATENT, attention="eager"), EVERY),
    pair("clamped: two micro batches for one, amp", CLAMPED, replace(CLAMPED, micro=2), EVERY),
    pair("seeing: ddp for one process, bf16", SEEING, replace(SEEING, ranks=2, wrap="ddp"), EVERY),
    Healthy("noted: alone: bias that follows the load", BALANCED, None, levels=("watch",)),
)
