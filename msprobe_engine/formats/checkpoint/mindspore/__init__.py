"""Checkpoints of MindSpore."""
