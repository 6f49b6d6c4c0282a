"""Programs that lead a user through several steps."""
