"""Megatron's ``torch`` checkpoints."""
