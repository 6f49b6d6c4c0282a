"""Ranks against each other."""
