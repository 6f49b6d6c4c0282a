"""Writes the pack of a run: one zip, by all its ranks."""
