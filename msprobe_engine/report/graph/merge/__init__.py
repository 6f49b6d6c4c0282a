"""Ranks of a parallel job in one graph."""
