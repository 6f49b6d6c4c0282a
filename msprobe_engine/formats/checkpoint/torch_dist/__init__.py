"""Megatron's distributed checkpoints."""
