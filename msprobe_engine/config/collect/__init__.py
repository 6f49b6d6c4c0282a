"""What is collected of a run at its start."""
