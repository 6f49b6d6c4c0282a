"""Calls of MindSpore become records."""
