"""Whose random states a checkpoint holds: each rank has its own, so those of other layouts say nothing of each other."""

from __future__ import annotations

import re

from msprobe_engine.formats.checkpoint.model import RANDOM, Checkpoint, value_group

_PLACE = re.compile(r"rng_state\.((?:(?:rank|tp|pp|ep|dp|cp|shard_)[0-9_]+\.?)+)")

_CUT = re.compile(r"args\.(\w*parallel_size|\w*pipeline\w*layers?\w*|\w*pipeline_model_parallel_layout)$")
"""Arguments of Megatron that say how the model is cut."""


def random_places(checkpoint: Checkpoint) -> frozenset[str]:
    """The ranks whose random states a checkpoint has: ``tp0.pp0`` of ``rng_state.tp0.pp0.random_rng_state``; empty: none are told apart."""
    paths = [key for key in checkpoint.values if value_group(key) == RANDOM]
    paths += [tensor.name for tensor in checkpoint.tensors.values() if tensor.group == RANDOM]
    found = (_PLACE.match(path) for path in paths)
    return frozenset(match[1].rstrip(".") for match in found if match is not None)


def other_places(target: Checkpoint, golden: Checkpoint) -> bool:
    """Whether both have random states, but of other ranks: then there is no telling which belongs to which."""
    target_ranks, golden_ranks = random_places(target), random_places(golden)
    return bool(target_ranks and golden_ranks) and (target_ranks != golden_ranks or _layout(target, golden))


def _layout(target: Checkpoint, golden: Checkpoint) -> bool:
    """Whether the model was cut differently: a rank with the same number then made other weights, and drew other random numbers."""
    keys = (key for key in target.values if key in golden.values and _CUT.match(key))
    return any(target.values[key] != golden.values[key] for key in keys)
