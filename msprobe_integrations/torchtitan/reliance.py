"""What the integration relies on in torchtitan; ``trainer`` is its Trainer."""

from __future__ import annotations

from msprobe_integrations.requirements import Requirement

NAME = "torchtitan"
PACKAGE = "torchtitan"
_TRAINER = "torchtitan.trainer:Trainer.{0} | torchtitan.train:Trainer.{0}"
TABLE = (
    Requirement(_TRAINER.format("train_step"), "following a Trainer at all", "0.2 to 0.3"),
    Requirement(_TRAINER.format("forward_backward_step"), "loss and numbers of micro batches", "0.2 to 0.3"),
    Requirement("trainer.step", "step numbers of the Trainer", "0.2 to 0.3"),
    Requirement("trainer.model_parts", "model (the parts of a pipeline stage)", "0.2 to 0.3"),
    Requirement("trainer.optimizers.optimizers", "gradients, parameters and optimizer states", "0.2 to 0.3"),
    Requirement("trainer.parallel_dims", "places of ranks in the parallel layout", "0.2 to 0.3"),
    Requirement("trainer.metrics_processor.log", "the loss over all ranks, as torchtitan logs it", "0.2 to 0.3"),
    Requirement("torchtitan.distributed.utils:clip_grad_norm_", "scalar grad_norm", "0.2 to 0.3"),
    Requirement("trainer.checkpointer.save", "checkpoints kept out", "0.2 to 0.3"),
)
