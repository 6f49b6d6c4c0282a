"""Verdicts of table rows: ours, 26.2.0's, 8.1.1's."""
