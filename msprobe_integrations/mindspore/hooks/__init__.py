"""Hooks on Cells, gradients and functions that MindSpore's graph compiler looks through."""
