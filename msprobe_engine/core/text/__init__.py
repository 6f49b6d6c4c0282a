"""Sentences and ranges for people."""
