"""Rows of statistics, on the host and on devices."""
