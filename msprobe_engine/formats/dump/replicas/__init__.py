"""Ranks of a step that are the same but for the ranks that they name: read once."""
