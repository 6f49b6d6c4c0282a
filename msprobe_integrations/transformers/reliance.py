"""What the integration relies on in Hugging Face Transformers."""

from __future__ import annotations

from msprobe_integrations.requirements import Requirement

NAME = "Transformers"
PACKAGE = "transformers"
_TRAINER = "transformers.trainer:Trainer"
TABLE = (
    Requirement(f"{_TRAINER}.train", "following a Trainer at all", "4.46 to 5.23"),
    Requirement("trainer.callback_handler", "following a Trainer at all", "4.46 to 5.23"),
    Requirement("trainer.model_wrapped", "wrapped model (DDP, FSDP, DeepSpeed)", "4.46 to 5.23"),
    Requirement("trainer.optimizer", "gradients, parameters and optimizer states", "4.46 to 5.23"),
    Requirement(f"{_TRAINER}.training_step", "loss and numbers of micro batches", "4.46 to 5.23"),
    Requirement(f"{_TRAINER}._maybe_log_save_evaluate", "gradient norm; scheduled evaluation and checkpoints kept out", "4.46 to 5.23"),
    Requirement(f"{_TRAINER}.evaluate", "evaluation kept out", "4.46 to 5.23"),
    Requirement(f"{_TRAINER}._save_checkpoint", "checkpoints kept out", "4.46 to 5.23"),
    Requirement("transformers.trainer_callback:TrainerCallback.on_pre_optimizer_step", "learning rate, loss scale", "4.46 to 5.23"),
    Requirement("trainer.accelerator.optimizer_step_was_skipped", "scalar skipped", "4.46 to 5.23"),
)
