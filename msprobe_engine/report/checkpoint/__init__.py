"""A comparison of checkpoints as text, files and a page."""
