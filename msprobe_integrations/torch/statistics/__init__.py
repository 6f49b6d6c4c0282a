"""Rows of statistics: host memory, kernels and their way to the host."""
