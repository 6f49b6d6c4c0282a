"""What the probe touches in Megatron. Checked when it attaches to a training; ``msprobe frameworks`` shows it for what is installed.

Rows with a module are about functions that are wrapped; rows about ``fsdp`` and ``optimizer`` are about objects of the training at hand.
What `requirements.need` is asked for has no row here: it says itself what it does not find.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from msprobe_integrations import requirements
from msprobe_integrations.requirements import Requirement

NAME = "Megatron"
PACKAGE = "megatron-core"
_NEWEST = "0.19"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"

CORE = (
    Requirement(f"{_SCHEDULES}:get_forward_backward_func", "steps, losses and evaluation in a loop of one's own", f"0.8 to {_NEWEST}"),
    Requirement(f"{_SCHEDULES}:forward_step", "number of the micro batch", f"0.8 to {_NEWEST}"),
    Requirement("megatron.core.optimizer:get_megatron_optimizer", "model and optimizer in a loop of one's own", f"0.8 to {_NEWEST}"),
    Requirement(
        "megatron.core.parallel_state:model_parallel_is_initialized", "place of the rank in the parallel layout", f"0.8 to {_NEWEST}"
    ),
    Requirement(
        "megatron.core.parallel_state:get_tensor_model_parallel_world_size",
        "sizes of the parallel layout in dump.json",
        f"0.8 to {_NEWEST}",
    ),
    Requirement(
        "megatron.core.parallel_state:get_tensor_model_parallel_group", "replica check over tensor-parallel ranks", f"0.8 to {_NEWEST}"
    ),
    Requirement(
        "megatron.core.parallel_state:_GLOBAL_MEMORY_BUFFER",
        "memory without values in dumps that begin in a later step",
        f"0.8 to {_NEWEST}",
    ),
    Requirement(
        "megatron.core.rerun_state_machine:RerunStateMachine.should_run_forward_backward",
        "capture of the second run of Megatron's rerun machine",
        f"0.10 to {_NEWEST}",
    ),
)
FSDP_ROWS = (Requirement("fsdp.param_and_grad_buffer", "gradients, parameters and states under Megatron-FSDP", f"0.14 to {_NEWEST}"),)
OPTIMIZER = (
    Requirement("optimizer.prepare_grads", "gradient phases unscaled and clipped", f"0.8 to {_NEWEST}"),
    Requirement("optimizer.step_with_ready_grads", "values just before and after the inner update", f"0.8 to {_NEWEST}"),
    Requirement("optimizer.step", "reduced gradients, gradient norm, whether the update was skipped", f"0.8 to {_NEWEST}"),
    Requirement("optimizer.param_groups", "learning rate, updates and ratios", f"0.8 to {_NEWEST}"),
)
LOOP = (
    Requirement("megatron.training.arguments:parse_args", "launch arguments (MSPROBE_CONFIG works)", f"0.8 to {_NEWEST}"),
    Requirement("megatron.training.training:setup_model_and_optimizer", "models of Megatron's own loop", f"0.8 to {_NEWEST}"),
    Requirement("megatron.training.training:train_step", "the iteration's number, steps as Megatron counts them", f"0.8 to {_NEWEST}"),
    Requirement("megatron.training.training:training_log", "params_norm, num_zeros, auxiliary losses", f"0.8 to {_NEWEST}"),
    Requirement("megatron.training.training:evaluate", "evaluation that leaves no trace", f"0.8 to {_NEWEST}"),
    Requirement("megatron.training.training:save_checkpoint", "moments of checkpoints", f"0.8 to {_NEWEST}"),
    Requirement("megatron.training.training:load_checkpoint", "moments of checkpoints", f"0.8 to {_NEWEST}"),
)
TABLE = (*CORE, *FSDP_ROWS, *OPTIMIZER, *LOOP)
PARTS = ("megatron.training",)
"""Not in every distribution of megatron-core."""


def check(chunks: Sequence[Any], optimizer: Any) -> list[Requirement]:
    """Say once what this version or this training lacks, and what that takes away. Never raises.

    Args:
        chunks: model chunks as the loop has them.
        optimizer: Megatron's, another one, or None.
    """
    from msprobe_integrations.megatron.optimizers import is_megatron

    rows = [*CORE]
    objects: dict[str, Any] = {}
    if "megatron.training.training" in sys.modules:
        rows += LOOP
    if chunks and type(chunks[0]).__name__ == "FullyShardedDataParallel":  # Megatron's own; for torch's: TorchFullyShardedDataParallel
        rows += FSDP_ROWS
        objects["fsdp"] = chunks[0]
    if is_megatron(optimizer):
        rows += OPTIMIZER
        objects["optimizer"] = optimizer
    return requirements.check(NAME, PACKAGE, rows, {name: value for name, value in objects.items() if value is not None})


def check_schedules() -> None:
    """Say what Megatron's schedules lack, as soon as they are imported: without them no step may ever begin, and nothing else would say
    so. Never raises."""
    requirements.check(NAME, PACKAGE, [row for row in CORE if row.on.startswith(_SCHEDULES)])


def check_loop_of_mindspeed_mm() -> None:
    """The same for the loop of MindSpeed-MM. Never raises."""
    step = Requirement(
        "mindspeed_mm.training:train_step", "steps that have the number of MindSpeed-MM's loop; with --hetero-parallel: no steps"
    )
    requirements.check("MindSpeed-MM", "mindspeed_mm", [step])
