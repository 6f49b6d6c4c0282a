"""What the tools for single operators share."""
