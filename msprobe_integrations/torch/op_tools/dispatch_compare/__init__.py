"""Dispatch compare: every ATen operator of a training on its device and on a benchmark, while the training runs."""
