"""What a run was started with."""
