"""Follows training loops: from a framework's events to steps of the probe."""
