"""What monitor output says of one run, or of two."""
