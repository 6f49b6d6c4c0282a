"""Hugging Face Accelerate: a training loop of one's own around an Accelerator."""
