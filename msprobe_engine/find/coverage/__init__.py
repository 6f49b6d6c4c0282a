"""What of two dumps was compared."""
