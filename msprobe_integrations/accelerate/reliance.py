"""What the integration relies on in Hugging Face Accelerate."""

from __future__ import annotations

from msprobe_integrations.requirements import Requirement

NAME = "Accelerate"
PACKAGE = "accelerate"
_ACCELERATOR = "accelerate.accelerator:Accelerator"
TABLE = (
    Requirement("accelerate.optimizer:AcceleratedOptimizer.step", "gradients, parameters and optimizer states", "1.0 to 1.15"),
    Requirement(f"{_ACCELERATOR}.clip_grad_norm_", "scalar grad_norm under FSDP2", "1.0 to 1.15"),
    Requirement(f"{_ACCELERATOR}.save_state", "checkpoints kept out", "1.0 to 1.15"),
    Requirement(f"{_ACCELERATOR}.gather", "gathered metrics kept out", "1.0 to 1.15"),
)
