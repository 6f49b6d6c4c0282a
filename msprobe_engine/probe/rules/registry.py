"""All rules by name, in the order of docs/guide/alerts.md: ``python -m msprobe_engine.probe.rules.document docs/guide/alerts.md``."""

from __future__ import annotations

from msprobe_engine.probe.rules.base import Rule
from msprobe_engine.probe.rules.builtin.parameters import (
    dead_expert,
    gradient_underflow,
    growing_weights,
    initial_weights,
    layer_gradients,
    lost_updates,
    unchanged_parameter,
    untrained_parameter,
    update_norm,
    written_parameter,
)
from msprobe_engine.probe.rules.builtin.progress import (
    broken_loop,
    loss_scaling,
    losses,
    no_progress,
    rate_jump,
    repeated_batch,
    stalled,
)
from msprobe_engine.probe.rules.builtin.ranks import outlier_rank, replica_mismatch
from msprobe_engine.probe.rules.builtin.values import condition, dead_activation, extreme_value, learned, nan_inf, turbulence

RECOMMENDED = "recommended"
"""Name of the rule that stands for the set of all rules below that are recommended."""

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        nan_inf.NanInfRule,
        losses.LossNotFiniteRule,
        losses.LossSpikeRule,
        update_norm.UpdateNormRule,
        layer_gradients.ExplodingGradientRule,
        layer_gradients.VanishingGradientRule,
        dead_activation.DeadActivationRule,
        dead_expert.DeadExpertRule,
        unchanged_parameter.UnchangedParameterRule,
        untrained_parameter.UntrainedParameterRule,
        written_parameter.WrittenParameterRule,
        initial_weights.InitialWeightsRule,
        lost_updates.LostUpdatesRule,
        growing_weights.GrowingWeightsRule,
        gradient_underflow.GradientUnderflowRule,
        loss_scaling.LossScaleRule,
        loss_scaling.SkippedUpdatesRule,
        rate_jump.RateJumpRule,
        broken_loop.BrokenLoopRule,
        repeated_batch.RepeatedBatchRule,
        replica_mismatch.ReplicaMismatchRule,
        outlier_rank.OutlierRankRule,
        stalled.StalledRule,
        no_progress.NoProgressRule,
        extreme_value.ExtremeValueRule,
        turbulence.TurbulenceRule,
        learned.LearnedRule,
        condition.ConditionRule,
    )
}
