"""All rules by name. The table of docs/alerts.md is made of this: ``python -m msprobe_engine.probe.rules.document``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.builtin import (
    condition,
    dead_activation,
    dead_expert,
    gradient_underflow,
    layer_gradients,
    learned,
    loss_scaling,
    losses,
    outlier_rank,
    replica_mismatch,
    stalled,
    unchanged_parameter,
    update_norm,
)
from msprobe_engine.probe.rules.builtin.extreme_value import ExtremeValueArgs, ExtremeValueRule
from msprobe_engine.probe.rules.builtin.nan_inf import NanInfArgs, NanInfRule
from msprobe_engine.probe.rules.builtin.no_progress import NoProgressArgs, NoProgressRule
from msprobe_engine.probe.rules.builtin.turbulence import TurbulenceArgs, TurbulenceRule

RECOMMENDED = "recommended"
"""Name of the rule that stands for the set of all rules below with `recommended` True."""


class RuleInfo(NamedTuple):
    """One rule.

    Attributes:
        rule: class, called with the arguments and ``severity``, ``kinds``, ``layouts``.
        args: dataclass of the arguments.
        recommended: part of the set ``recommended``.
    """

    rule: Callable[..., Rule]
    args: type[Any]
    recommended: bool = True


RULES: dict[str, RuleInfo] = {
    "nan_inf": RuleInfo(NanInfRule, NanInfArgs),
    "loss_not_finite": RuleInfo(losses.LossNotFiniteRule, losses.LossNotFiniteArgs),
    "loss_spike": RuleInfo(losses.LossSpikeRule, losses.LossSpikeArgs),
    "update_norm_doubling": RuleInfo(update_norm.UpdateNormRule, update_norm.UpdateNormArgs),
    "exploding_gradient": RuleInfo(layer_gradients.ExplodingGradientRule, layer_gradients.ExplodingGradientArgs),
    "vanishing_gradient": RuleInfo(layer_gradients.VanishingGradientRule, layer_gradients.VanishingGradientArgs),
    "dead_activation": RuleInfo(dead_activation.DeadActivationRule, dead_activation.DeadActivationArgs),
    "dead_expert": RuleInfo(dead_expert.DeadExpertRule, dead_expert.DeadExpertArgs),
    "unchanged_parameter": RuleInfo(unchanged_parameter.UnchangedParameterRule, unchanged_parameter.UnchangedParameterArgs),
    "gradient_underflow": RuleInfo(gradient_underflow.GradientUnderflowRule, gradient_underflow.GradientUnderflowArgs),
    "loss_scale_collapse": RuleInfo(loss_scaling.LossScaleRule, loss_scaling.LossScaleArgs),
    "skipped_updates": RuleInfo(loss_scaling.SkippedUpdatesRule, loss_scaling.SkippedUpdatesArgs),
    "replica_mismatch": RuleInfo(replica_mismatch.ReplicaMismatchRule, replica_mismatch.ReplicaMismatchArgs),
    "outlier_rank": RuleInfo(outlier_rank.OutlierRankRule, outlier_rank.OutlierRankArgs),
    "stalled": RuleInfo(stalled.StalledRule, stalled.StalledArgs),
    "no_progress": RuleInfo(NoProgressRule, NoProgressArgs),
    "extreme_value": RuleInfo(ExtremeValueRule, ExtremeValueArgs),
    "turbulence": RuleInfo(TurbulenceRule, TurbulenceArgs, recommended=False),
    "learned": RuleInfo(learned.LearnedRule, learned.LearnedArgs, recommended=False),
    "condition": RuleInfo(condition.ConditionRule, condition.ConditionArgs, recommended=False),
}
