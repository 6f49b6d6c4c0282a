"""What rows of statistics hold, and the memory they lie in."""
