"""Sinks that stand in front of dump files."""
