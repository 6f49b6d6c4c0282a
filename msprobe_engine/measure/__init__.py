"""Comparisons of what two runs wrote."""
