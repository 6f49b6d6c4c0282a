"""Alert, then capture."""
