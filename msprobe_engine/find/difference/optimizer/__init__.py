"""Differences in and behind the update."""
