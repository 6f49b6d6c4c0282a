"""What ranks tell each other, whatever carries it."""
