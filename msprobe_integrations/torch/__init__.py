"""PyTorch: hooks, statistics kernels, probe."""
