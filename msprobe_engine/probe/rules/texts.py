"""What the rules say in words: one line of help, and for the reader of an alert what it usually means and what to run next."""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """The words of one rule.

    Attributes:
        fires: when the rule fires, one line; the table of docs/alerts.md is made of it.
        severity: what its alerts are unless the settings say otherwise.
        meaning: what an alert of it usually means.
        next: what to run or to look at next.
    """

    fires: str
    severity: str
    meaning: str
    next: str


_ORDER = "`msprobe monitor analyze RUN` lists the alerts in the order of execution; the first one is nearest to the cause"

TEXTS: dict[str, Text] = {
    "nan_inf": Text(
        "a tensor or number of the step is NaN or Inf; earliest first",
        "critical",
        "An operation overflowed, divided by zero, or was given NaN. What comes later in the step follows from the first one.",
        f"{_ORDER}. In a dump of the step `msprobe nan_analyze -i DUMP` names the operator in which the first NaN was born",
    ),
    "loss_not_finite": Text(
        "the loss is NaN or Inf",
        "critical",
        "The forward pass overflowed, or the parameters are not finite any more since an earlier update.",
        f"{_ORDER}. If parameters are NaN at the beginning of the step, the fault is in the step before",
    ),
    "extreme_value": Text(
        "a finite absolute value is above `threshold`",
        "warning",
        "Values near the end of a half-precision range: Inf is a step or two away.",
        f"{_ORDER}; then look at scale and normalisation in front of the named tensor",
    ),
    "turbulence": Text(
        "norm (or mean) above `(1 + threshold)` times the running mean of its own healthy past",
        "warning",
        "One tensor left the range of its own past: a rare batch, a learning rate that is too high, or a fault in its layer.",
        f"{_ORDER}; a single hit with a normal next step is usually the batch",
    ),
    "loss_spike": Text(
        "the loss is far above the median of its last steps, measured by their scatter",
        "warning",
        "A bad batch, a learning rate that is too high, or an update that was too large a step or two earlier.",
        "look for an update_norm_doubling or exploding_gradient alert in the steps before: with one it is the optimizer, "
        "without one the data of this step",
    ),
    "vanishing_gradient": Text(
        "the gradient of a layer falls to almost nothing, against its own past or against the other layers",
        "warning",
        "The layer does not learn any more: saturated activations, a cut in the graph, or values too small for the number format.",
        "watch its activations (`monitor: {activations: true, targets: [...]}`) for zeros and saturation; "
        "compare with a float32 run of a few steps",
    ),
    "exploding_gradient": Text(
        "the gradient of a layer, or the global norm, rises far above its own running level",
        "warning",
        "An unstable layer or a learning rate that is too high; without clipping the next update will be as large.",
        f"{_ORDER}; the layer named first is where it began. Try gradient clipping or a smaller learning rate",
    ),
    "update_norm_doubling": Text(
        "the optimizer's update, of a layer or in total, doubles against its running median",
        "warning",
        "The earliest known sign of a loss spike: gradients begin to point the same way while the second moment is still small.",
        "keep a checkpoint of this step; lower beta2 or the learning rate, or clip updates, if the loss follows",
    ),
    "dead_activation": Text(
        "an output is (almost) all exact zeros for `patience` monitored steps",
        "warning",
        "The units of this layer have died (a ReLU pushed below zero for good) or nothing is routed through it.",
        "look at bias and learning rate of the layer in front; compare the share of zeros over the run in `msprobe monitor report RUN`",
    ),
    "unchanged_parameter": Text(
        "a parameter with a gradient is the same after the optimizer step although the learning rate is not 0",
        "warning",
        "The optimizer does not own this parameter, its update is lost (a stale copy, a wrong shard), or the update is smaller than "
        "the parameter's number format can hold.",
        "check that the parameter is in a group of the optimizer with a learning rate; for half-precision parameters keep float32 copies",
    ),
    "no_progress": Text(
        "`patience` monitored steps with the same loss, with all reduced gradients exactly zero, or with unchanged parameters",
        "warning",
        "Nothing is learned: a learning rate of 0, a graph that is cut off, frozen parameters, or the same batch over and over.",
        "check learning rate, requires_grad and the data loader",
    ),
    "gradient_underflow": Text(
        "a good part of a gradient is, or becomes, zero for want of range in the number format",
        "warning",
        "Gradients are smaller than the format can hold: the loss scale is too small, or a scale in the model is.",
        "raise the loss scale or use bfloat16; watch op `underflow` with `monitor.underflow_dtype` of the training",
    ),
    "loss_scale_collapse": Text(
        "the loss scale falls again and again, or down to `floor`",
        "warning",
        "Gradients overflow at every scale: there are NaN in the model, not values that are merely too large.",
        "look at the alerts of nan_inf in the skipped steps; the first tensor named is the cause",
    ),
    "skipped_updates": Text(
        "too many updates are skipped",
        "warning",
        "The optimizer finds Inf or NaN in the gradients and drops the step: training stands still while time goes by.",
        "look at the alerts of nan_inf in the skipped steps, and at the loss scale",
    ),
    "replica_mismatch": Text(
        "parameters or gradients that have to be equal on several ranks are not (needs `monitor.replica_check`)",
        "critical",
        "Replicas drift apart: a gradient that is not reduced, a different seed or order of operations, or a fault of the hardware. "
        "It does not heal by itself.",
        "ranks in a minority are the suspects, of two ranks both: dump a step there and on another rank and compare the records; one "
        "single rank and one single tensor point to its hardware",
    ),
    "dead_expert": Text(
        "an expert gets no token or no gradient for `patience` monitored steps while its neighbours do",
        "warning",
        "The router has stopped to use the expert; without a balancing loss it will not come back.",
        "check the balancing loss and the router's logits (`monitor.layer_features.router_logits`)",
    ),
    "outlier_rank": Text(
        "numbers of one rank (loss, local gradient norm, time) differ from those of all others for `patience` steps",
        "warning",
        "One rank computes something else: its data, its device, or a parameter that drifted.",
        "switch on `monitor.replica_check`; dump a step there and on a neighbour and compare the records",
    ),
    "stalled": Text(
        "no step has ended for `factor` times the median time of a step",
        "warning",
        "A rank waits: a hanging collective, a slow or dead neighbour, storage or the data loader.",
        "the stack in the alert says where this rank waits; the rank whose stack is elsewhere is the one the others wait for",
    ),
    "learned": Text(
        "a metric leaves the band that `msprobe monitor learn` found in a healthy run, or a relation that held there does not",
        "warning",
        "This run does something that the healthy run never did.",
        f"{_ORDER}; if the change is meant, learn again from a run that has it",
    ),
    "condition": Text(
        "the expression `when` holds for `for_steps` steps",
        "warning",
        "A condition of the settings holds.",
        "see the condition in the settings",
    ),
}
