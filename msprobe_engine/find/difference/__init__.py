"""Where a difference between two runs begins, and which call makes it."""
