"""What following a loop of plain torch relies on."""

from __future__ import annotations

from msprobe_integrations.requirements import Requirement

NAME = "PyTorch"
PACKAGE = "torch"
TABLE = (
    Requirement("torch.optim.optimizer:register_optimizer_step_post_hook", "steps", "2.0 and later"),
    Requirement("torch.optim.optimizer:register_optimizer_step_pre_hook", "learning rate, skipped updates", "2.0 and later"),
    Requirement("torch.nn:Module._compiled_call_impl", "steps: calls of the model", "2.2 and later"),
    Requirement("torch.autograd:backward", "loss", "all"),
    Requirement("torch._C:_current_graph_task_id", "telling passes of the loop from those of activation checkpointing", "1.13 and later"),
    Requirement(
        "torch.amp:GradScaler.step | torch.cuda.amp:GradScaler.step", "skipped updates and loss scale of GradScaler", "1.6 and later"
    ),
    Requirement(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward "
        "| torch.distributed._composable.fsdp._fsdp_param_group:FSDPParamGroup.post_backward",
        "unreduced gradients of FSDP2",
        "2.4 and later",
    ),
    Requirement("torch.distributed.fsdp._flat_param:FlatParameter", "parameters and gradients of FSDP1 by name", "2.0 and later"),
)
