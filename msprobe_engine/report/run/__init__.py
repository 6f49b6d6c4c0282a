"""The page of a monitored run."""
