"""Commands before and around a training."""
