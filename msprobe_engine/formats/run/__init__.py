"""What an output directory holds."""
