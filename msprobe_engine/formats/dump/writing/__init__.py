"""Writes dumps while the training runs."""
