"""Names of the existing monitor package. Re-exports only."""
