"""Conclusions: where a difference or a NaN comes from, and what was compared."""
