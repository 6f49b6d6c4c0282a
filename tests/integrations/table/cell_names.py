"""The names of the table in docs/integrations.md: frameworks and features. Layouts are free text."""

from __future__ import annotations

FRAMEWORKS = {
    "PyTorch": "torch",
    "Megatron": "megatron-core",
    "MindSpeed": "mindspeed",
    "DeepSpeed": "deepspeed",
    "Transformers": "transformers",
    "Accelerate": "accelerate",
    "Lightning": "lightning",
    "torchtitan": "torchtitan",
}
"""Name in the table to the distribution whose version is shown, in the order of the page."""
FEATURES = (
    "dump L0",
    "dump L1",
    "dump mix",
    "monitor: activations",
    "monitor: gradients",
    "monitor: parameters",
    "monitor: optimizer",
    "grad probe",
    "collectives",
    "replica check",
    "incident capture",
    "same bits",
    "detach",
    "config check",
    "checkpoint diff",
)
"""Columns of the table."""


def checked(framework: str, features: tuple[str, ...]) -> None:
    """Raises ValueError for a name that is not in the table, or no feature at all."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"no framework {framework!r} in the table; there are {', '.join(FRAMEWORKS)}")
    if not features:
        raise ValueError(f"no feature named for {framework}; there are {', '.join(FEATURES)}")
    for feature in features:
        if feature not in FEATURES:
            raise ValueError(f"no feature {feature!r} in the table; there are {', '.join(FEATURES)}")
