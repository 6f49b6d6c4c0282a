"""Graphs, compiled code, several ranks, DeepSpeed and Transformer Engine beside the probe."""
