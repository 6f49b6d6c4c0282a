"""What looks at frames and raises alerts; the rules themselves are in `builtin`."""
