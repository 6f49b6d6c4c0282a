"""The Triton kernels behind rows of tensors on an accelerator, and which of them may be trusted."""
