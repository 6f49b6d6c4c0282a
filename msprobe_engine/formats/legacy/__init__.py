"""Formats that only the existing tool has."""
