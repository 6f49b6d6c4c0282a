"""Where MindSpore's optimizers keep parameters, gradients and states."""
