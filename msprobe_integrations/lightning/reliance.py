"""What the integration relies on in Lightning; ``trainer`` is its Trainer, of whichever of the two packages."""

from __future__ import annotations

from msprobe_integrations.requirements import Requirement

NAME = "Lightning"
PACKAGE = "lightning"
TABLE = (
    Requirement("trainer.fit", "following a Trainer at all", "2.4 to 2.6"),
    Requirement("trainer.callbacks", "following a Trainer at all", "2.4 to 2.6"),
    Requirement("trainer.strategy.model", "wrapped model (DDP, FSDP, DeepSpeed)", "2.4 to 2.6"),
    Requirement("trainer.optimizers", "gradients, parameters and optimizer states", "2.4 to 2.6"),
    Requirement("trainer.save_checkpoint", "checkpoints kept out", "2.4 to 2.6"),
)
