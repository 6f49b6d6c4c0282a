"""The existing tool's monitor, as far as it knows no framework."""
