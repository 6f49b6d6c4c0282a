"""Calls become records, for every framework."""
