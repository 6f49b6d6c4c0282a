"""What the figures of a batch point to. A rule of thumb with its evidence, no proof."""

from __future__ import annotations

import math
from typing import NamedTuple

from msprobe_engine.accuracy.rl.mismatch import Mismatch

AGREE, ROUNDING, NOT_FINITE, MASK, SHIFT, TEMPERATURE, WEIGHTS, NOTHING = (
    *("agree", "rounding", "not finite", "mask", "shift", "temperature", "weights", "no tokens"),
)
FINE = (AGREE, ROUNDING)
_AGREE, _ROUNDING = 1e-4, 2e-2
_ENOUGH = 16
"""Tokens for a line through them."""


class Cause(NamedTuple):
    """What it looks like, and why."""

    name: str
    evidence: str


def cause_of(found: Mismatch, first: bool = False) -> Cause:
    """The first of the causes that fits.

    Args:
        found: figures of a batch.
        first: before any update, when both sides should have the same weights, or it was `SHIFT` then.
    """
    if found.not_finite_rollout or found.not_finite_trainer:
        where = "the rollout" if found.not_finite_rollout else "the trainer"
        return Cause(NOT_FINITE, f"{where} has NaN or Inf for {found.not_finite_rollout or found.not_finite_trainer} tokens of the mask")
    if not found.tokens:
        return Cause(NOTHING, "the mask leaves no token; is it that of the response?")
    zeros = found.zero_rollout + found.zero_trainer
    if zeros and found.absolute > _AGREE and not found.without_zeros > found.absolute / 2:
        side = "rollout" if found.zero_rollout >= found.zero_trainer else "trainer"
        return Cause(
            MASK,
            f"{zeros} tokens of the mask have a log probability of exactly 0 in the {side} only, as padding has; "
            f"without them the mean difference is {found.without_zeros:.2g}",
        )
    if found.absolute <= _AGREE:
        return Cause(AGREE, f"the mean difference is {found.absolute:.2g}")
    if found.shifted > 0.9 and not found.correlation > 0.9:
        return Cause(
            SHIFT, f"the neighbouring position fits better: correlation {found.shifted:.3f}, at the same position {found.correlation:.3f}"
        )
    if found.tokens >= _ENOUGH and abs(found.explained) > 0.9 and abs(found.slope - 1) > 0.01:
        return Cause(
            TEMPERATURE,
            f"the differences follow the log probabilities (correlation {found.explained:.3f}): the trainer's are {found.slope:.3g} times "
            "the rollout's; is the temperature of sampling applied on both sides?",
        )
    if found.absolute <= _ROUNDING and not found.correlation < 0.99 and abs(found.mean) <= max(0.5 * found.absolute, _noise(found)):
        return Cause(
            ROUNDING,
            f"small differences of both signs (mean {found.absolute:.2g}): other kernels, or one side computes in a lower precision, "
            "bfloat16 in the output layer for example",
        )
    text = f"mean difference {found.absolute:.2g}, correlation {found.correlation:.3f}"
    if first:
        return Cause(
            SHIFT, f"{text}, before any update: do the logits stand one position before the tokens that they score, on both sides?"
        )
    return Cause(WEIGHTS, f"{text}: the rollout has other weights than the trainer; are they handed over after every update?")


def _noise(found: Mismatch) -> float:
    """What the mean of as many differences of this size may be by chance."""
    return 4 * found.absolute / math.sqrt(found.tokens)
