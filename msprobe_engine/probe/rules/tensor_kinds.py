"""What kind of tensor a record is: the word that alerts, rules and metrics use for it."""

from __future__ import annotations

from msprobe_engine.core.names import is_collective
from msprobe_engine.core.records import Entry, Sample

KINDS = ("activation", "activation_grad", "grad", "param", "opt_state", "update", "feature", "collective", "loss", "step")
"""All kinds. `loss` and `step` are scalars: the loss, and every other number of a step."""

_FAMILY = {
    "actv": "activation", "actv_grad": "activation_grad", "grad_unreduced": "grad", "grad_reduced": "grad",
    "param_origin": "param", "param_updated": "param", "exp_avg": "opt_state", "exp_avg_sq": "opt_state",
    "opt_state": "opt_state", "update": "update", "ratio": "update", "attention_hook": "feature", "linear_hook": "feature",
    "moe_router_weight_hook": "feature", "moe_router_logit_hook": "feature", "other": "collective",
}  # fmt: skip


def sample_kind(sample: Sample) -> str:
    """Kind of a monitor sample: by its family; ``extra["kind"]`` wins where it is one of `KINDS`."""
    kind = sample.extra.get("kind")
    if kind in KINDS:
        return str(kind)
    return _FAMILY.get(sample.family, "collective")


def entry_kind(entry: Entry, section: str) -> str:
    """Kind of the tensors in one section of an entry, by the grammar of record names.

    ``Distributed.*`` (MindSpore: ``MintDistributed.*`` too) is a collective, ``*.parameters_grad[.N]`` a gradient, the section
    ``parameters`` a parameter; the rest is an activation, or its gradient in a ``backward`` entry.
    """
    if is_collective(entry.name):
        return "collective"
    if section == "parameters":
        return "param"
    # Only the last two words say the direction: a module may itself be called "backward".
    tail = entry.name.rsplit(".", 2)[-2:]
    if "parameters_grad" in tail:
        return "grad"
    return "activation_grad" if "backward" in tail else "activation"


def scalar_kind(name: str) -> str:
    """``loss`` for ``loss`` and what ends in it (``lm_loss``, ``validation.loss``), ``step`` for every other number of a step."""
    return "loss" if name == "loss" or name.endswith((" loss", "_loss", ".loss", "/loss")) else "step"
