"""Findings as text, tables, JSON and pages."""
