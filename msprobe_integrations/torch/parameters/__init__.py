"""Where torch, DDP and FSDP keep parameters, gradients and states."""
