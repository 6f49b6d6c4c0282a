"""Hugging Face Transformers: a callback for its Trainer."""
