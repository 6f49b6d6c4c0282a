"""What the probe costs: memory, time, bandwidth; and how fast checkpoints are compared."""
